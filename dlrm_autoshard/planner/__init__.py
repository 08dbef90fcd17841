"""From tables, statistics and measured costs to a sharding plan.

In: a `PlacementTask`, and profiles of measured steps. Out: a `PlanResult`, and predicted `RankCost`s.
torch on the CPU only: no torch.distributed, no fbgemm, no clock but for budgets. DERIVATIONS.md says what to
read first, and derives the costs.
"""
