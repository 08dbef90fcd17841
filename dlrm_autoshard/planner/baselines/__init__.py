"""What ours is compared with: the reference DreamShard, and the sequence policies of the literature.

Not used by jobs.
"""
