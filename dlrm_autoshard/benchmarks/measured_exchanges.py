"""What the exchanges of plans take on real ranks: vectors there and gradients back, with the training step's code.

rounds = exchange_ms(tables, [plan, other], batch_size=2048, rounds=4, cores=[0, 1])
rounds[0][1]                                       # ([fwd ms by rank], [bwd ms by rank]) of the other plan, first round
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.exchange import Exchange
from dlrm_autoshard.distributed.runtime import keep_freed_memory
from dlrm_autoshard.distributed.shared_memory import connect
from dlrm_autoshard.distributed.spawn import run_ranks
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig

Times = tuple[list[float], list[float]]
REPEATS = 5


def exchange_ms(
    tables: Sequence[TableConfig], plans: Sequence[ShardingPlan], batch_size: int, rounds: int, cores: list[int]
) -> list[list[Times]]:
    """By round and plan: each rank's median of some exchanges, each behind a barrier. Plans take turns."""
    by_rank = run_ranks(
        _rank, plans[0].world_size, list(tables), list(plans), batch_size, rounds, timeout=600, cores=cores
    )
    return [
        [tuple([ranks[n][p][i] for ranks in by_rank] for i in (0, 1)) for p in range(len(plans))]  # type: ignore[misc]
        for n in range(rounds)
    ]


def _rank(
    rank: int, world_size: int, tables: list[TableConfig], plans: list[ShardingPlan], batch_size: int, rounds: int
) -> list[list[tuple[float, float]]]:
    keep_freed_memory()
    world, id_group = dist.group.WORLD, dist.new_group()
    assert world is not None
    link = connect(world)
    device = torch.device("cpu")
    found = []
    for _ in range(rounds):
        times = []
        for plan in plans:
            exchange = Exchange(tables, plan, rank, world, id_group, device, torch.float32, link)
            local = torch.zeros(batch_size, exchange.local_dim)
            gradient = torch.zeros(batch_size // world_size, exchange.total_dim)
            forward = _timed(lambda e=exchange, x=local: e.in_output_order(e.send_pooled(x).wait()))  # type: ignore[misc]
            backward = _timed(lambda e=exchange, x=gradient: e.send_gradients(x).wait())  # type: ignore[misc]
            times.append((forward, backward))
        found.append(times)
    return found


def _timed(collective: Callable[[], object]) -> float:
    times = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        started = time.perf_counter()
        collective()
        times.append(1e3 * (time.perf_counter() - started))
    return median(times[1:])
