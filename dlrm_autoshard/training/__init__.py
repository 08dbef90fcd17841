"""The trainer: everything put together, its state, checkpoints and records."""
