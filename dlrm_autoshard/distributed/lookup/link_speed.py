"""Measures the network's speed per rank once, to decide whether saving bytes is worth computing.

carried = mb_per_s(group)                    # collective; the same on all ranks
remark(dtypes, carried)                      # a sentence if int8 makes steps slower at that speed, else None
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from dlrm_autoshard.config import ExchangeDtypes

SLOW_FOR_IDS = 200.0
"""MB/s per rank below which packing ids saves time: 12,288 ids of one-id bags take 0.3 ms of a core, and 60 kB."""
SLOW_FOR_INT8 = 600.0
"""MB/s per rank below which int8 vectors save time over fp16: encoding takes 1.4 ns per number, and saves a byte."""
PROBE_BYTES, ROUNDS = 1 << 20, 5
"""Bytes that each rank sends per round, and rounds: 40 ms in all at 1 Gbit/s with two ranks per host."""


def mb_per_s(group: dist.ProcessGroup) -> float:
    """Returns the MB/s that the slowest rank can send while all do, in the fastest of a few rounds; infinite for one
    rank."""
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return float("inf")
    to_each = max(1, PROBE_BYTES // ranks)
    sent, received = (torch.zeros(ranks * to_each, dtype=torch.uint8) for _ in range(2))
    seconds = torch.full((ROUNDS,), torch.inf, dtype=torch.float64)
    for number in range(ROUNDS):
        dist.barrier(group)
        began = time.perf_counter()
        dist.all_to_all_single(received, sent, group=group)
        seconds[number] = time.perf_counter() - began
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    return (ranks - 1) * to_each / float(seconds.min()) / 1e6


def remark(dtypes: ExchangeDtypes, carried: float) -> str | None:
    """Returns a sentence if int8 makes steps slower, else None. carried: MB/s per rank."""
    if "int8" not in (dtypes.vectors, dtypes.gradients) or carried <= SLOW_FOR_INT8:
        return None
    link = "Ranks share memory" if carried == float("inf") else f"The network carries {carried:,.0f} MB/s for each rank"
    return (
        f"{link}: int8 (train.exchange_dtype) takes longer to encode than it saves; it pays below about "
        f"{SLOW_FOR_INT8:,.0f} MB/s. fp16 is faster."
    )
