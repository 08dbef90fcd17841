"""Runs distributed tests: `from tests.ranks import run_ranks`; `run_ranks(function, world_size, *args, timeout=60)`.

`function(rank, world_size, *args)` is a module-level function of the test file; the ranks' results are a list by rank.
A gloo group is up when it starts and is taken down after it. See dlrm_autoshard/distributed/ranks/spawn.py.
"""

from dlrm_autoshard.distributed.ranks import spawn
from dlrm_autoshard.distributed.ranks.spawn import RankError, run_ranks

__all__ = ["RankError", "run_ranks"]

spawn.PRELOAD.append("tests.preload")  # a rank that need not import what it tests starts in 0.05 s instead of 2
