"""Times steps of several variants of a job within the same ranks, a few steps of each at a time.

found = interleaved({"ours": ours, "theirs": theirs}, rounds=16)        # on every rank
paired_ratio(slowest_rank(ranks, "theirs"), slowest_rank(ranks, "ours"))       # ranks: what each has found
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import torch.distributed as dist


def interleaved(steps: Mapping[str, Callable[[], object]], *, turn: int, rounds: int) -> dict[str, list[float]]:
    """Returns wall-clock seconds of a step by variant and round, and CPU seconds as '<variant> cpu'.

    A turn is so many steps. A round has a turn of each variant, every other round in the opposite order; a first round
    warms up. Collective.
    """
    found: dict[str, list[float]] = {f"{variant}{end}": [] for variant in steps for end in ("", " cpu")}
    for number in range(rounds + 1):
        for variant in list(steps) if number % 2 else reversed(list(steps)):
            dist.barrier()
            started, cpu = time.perf_counter(), time.process_time()
            for _ in range(turn):
                steps[variant]()
            if number:
                found[variant].append((time.perf_counter() - started) / turn)
                found[f"{variant} cpu"].append((time.process_time() - cpu) / turn)
    return found


def slowest_rank(ranks: Sequence[Mapping[str, Sequence[float]]], name: str) -> list[float]:
    """Returns the largest figure of this name over ranks, by round: a step is over when the last rank is done."""
    return [max(seconds) for seconds in zip(*(rank[name] for rank in ranks), strict=True)]
