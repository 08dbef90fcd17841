"""Times the exchanges of plans on real ranks: vectors forward and gradients back, with the training step's code.

rounds = exchange_ms(task, [plan, other], rounds=4, cores=[0, 1])
rounds[0][1]                                       # ([fwd ms by rank], [bwd ms by rank]) of the other plan, first round
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory, runtime_of
from dlrm_autoshard.distributed.ranks.spawn import run_ranks
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.rank_probe import RankProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe

Times = tuple[list[float], list[float]]


def exchange_ms(task: PlacementTask, plans: Sequence[ShardingPlan], rounds: int, cores: list[int]) -> list[list[Times]]:
    """Returns each rank's median of some exchanges, each after a barrier, by round and plan; plans are interleaved."""
    by_rank = run_ranks(_rank, task.world_size, task, list(plans), rounds, timeout=600, cores=cores)
    return [
        [tuple([ranks[n][p][i] for ranks in by_rank] for i in (0, 1)) for p in range(len(plans))]  # type: ignore[misc]
        for n in range(rounds)
    ]


def _rank(
    rank: int, world_size: int, task: PlacementTask, plans: list[ShardingPlan], rounds: int
) -> list[list[list[float]]]:
    keep_freed_memory()
    world = dist.group.WORLD
    assert world is not None
    probe = RankProbe(runtime_of(world, torch.device("cpu")), task.tables, task.stats, task.batch_size, ShardProbe())
    return [[[median(ms) for ms in probe.measure_exchange(plan)] for plan in plans] for _ in range(rounds)]
