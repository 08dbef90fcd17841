"""Processes: how they start, form groups, show that they live, and which cores they use."""
