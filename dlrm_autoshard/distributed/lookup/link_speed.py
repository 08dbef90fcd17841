"""Measures once what the network carries for each rank: whether bytes are worth saving by computing.

carried = mb_per_s(group)                    # collective; the same on all ranks
remark(dtypes, carried)                      # a sentence where int8 makes steps slower there, or None
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from dlrm_autoshard.config import ExchangeDtypes

SLOW_FOR_IDS = 200.0
"""MB/s of a rank, below which packing ids saves time: 12,288 ids of one-id bags take 0.3 ms of a core, and 60 kB."""
SLOW_FOR_INT8 = 600.0
"""MB/s of a rank, below which coding vectors in int8 saves time over fp16: a number takes 1.4 ns more, for a byte."""
PROBE_BYTES, ROUNDS = 1 << 20, 5
"""Sent by each rank in a round, and rounds: 40 ms in all at 1 Gbit/s for two ranks a host."""


def mb_per_s(group: dist.ProcessGroup) -> float:
    """Returns what the slowest rank can send to the others while all do, in the fastest of a few rounds; infinite for
    one rank alone."""
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
    """Returns a sentence for people where int8 makes steps slower. carried: MB/s of a rank."""
    if "int8" not in (dtypes.vectors, dtypes.gradients) or carried <= SLOW_FOR_INT8:
        return None
    link = "Ranks share memory" if carried == float("inf") else f"The network carries {carried:,.0f} MB/s for each rank"
    return (
        f"{link}: coding in int8 (train.exchange_dtype) takes longer there than it saves, below about "
        f"{SLOW_FOR_INT8:,.0f} MB/s it pays. fp16 is faster."
    )
