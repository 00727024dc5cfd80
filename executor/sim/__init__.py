"""The simulated executor: the contract of orders, KV and reports without a model."""
