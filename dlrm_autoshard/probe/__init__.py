"""Micro-benchmarks of shards, exchanges and whole plans on this hardware, and a log of earlier jobs' measurements.

Takes tables and plans; returns `ShardSample`s, `CommsSample`s and `StepProfile`s, measured on throwaway tables or
simulated.
"""
