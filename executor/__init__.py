"""One process a device: it holds weights and KV memory, and steps through the scheduler's standing orders."""
