"""The formats that a run writes and that are read back: typed, versioned, one owner each. See SCHEMA.md.

Plain data: no ranks, no planner, nothing that draws.
"""
