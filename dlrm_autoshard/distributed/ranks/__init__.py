"""Processes: how they start, form process groups, say that they live, and which cores are theirs."""
