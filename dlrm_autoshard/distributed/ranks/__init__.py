"""Processes: how they start, meet, say that they live, and which cores are theirs."""
