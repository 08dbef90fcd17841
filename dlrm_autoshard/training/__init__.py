"""The trainer: its parts, state, checkpoints and records."""
