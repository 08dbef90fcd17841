"""Turns tables, statistics and measured costs into a sharding plan.

Takes a `PlacementTask` and profiles of measured steps; returns a `PlanResult` and predicted `RankCost`s. Uses torch on
the CPU only: no torch.distributed, no fbgemm, no clock but for budgets. Read DERIVATIONS.md first; it derives the
costs.
"""
