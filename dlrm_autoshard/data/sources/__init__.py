"""Data sources: published data sets, users' files and code, synthetic data; each is read by position."""
