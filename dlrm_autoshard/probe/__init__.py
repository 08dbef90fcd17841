"""Micro-benchmarks: what shards, exchanges and whole plans cost on this hardware, and what earlier jobs measured.

In: tables and plans. Out: `ShardSample`s, `CommsSample`s, `StepProfile`s, on throwaway tables or simulated.
"""
