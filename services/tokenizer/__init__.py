"""The tokenizer service: all text of a conversation becomes tokens here, and all tokens text."""
