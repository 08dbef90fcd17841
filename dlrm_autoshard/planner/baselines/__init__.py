"""Algorithms to compare ours with: the reference DreamShard, and the sequence policies of the literature. Not used by
jobs.

Not used by jobs.
"""
