"""Criteo's click logs: converts text to npy files and reads these. Independent of the other sources."""
