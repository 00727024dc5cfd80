"""The scheduler: who runs, and which KV block belongs to whom."""
