"""Typed, versioned records that a run writes and reports read. See SCHEMA.md.

Plain data: nothing here imports ranks, the planner or a drawing library.
"""
