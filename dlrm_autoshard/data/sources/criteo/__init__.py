"""Criteo's click logs: text to npy files, and npy files to samples. Needs nothing of the other sources."""
