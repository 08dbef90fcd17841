"""Algorithms that ours are compared with: the reference DreamShard, and the sequence policies of the literature.

No job uses them.
"""
