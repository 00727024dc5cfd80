"""The way to the tokenizers: sessions, replicas, and streams that outlive both."""
