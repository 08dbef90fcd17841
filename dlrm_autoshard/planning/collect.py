"""Measures fused shards of a synthetic pool: the data behind the warm start that the package ships.

    python -m dlrm_autoshard.planning.collect --out shards.jsonl --shards 1500 --seconds 110

Shard i is the same whatever came before, so the command can be called again and again, in slices of a quiet machine,
and goes on where it stopped. Every tenth shard is measured a second time at the end: how much a measurement differs
from itself is the floor under any cost model's error. `--pack warm_start.npz` writes the compact file.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.distributed.fingerprint import hardware_fingerprint
from dlrm_autoshard.planning.pool import TablePool, synthetic_pool

BATCH_SIZES, BATCH_SHARES = (512, 1024, 2048, 4096, 8192), (0.1, 0.1, 0.5, 0.2, 0.1)
REPEAT_EVERY = 10
NOISY = 0.1  # spread above which a shard is measured once more


@dataclass(frozen=True)
class Shard:
    """Tables of one pool ('large' or 'small') that are measured fused, at one batch size."""

    pool: str
    batch_size: int
    tables: tuple[int, ...]


def pools(batch_size: int) -> dict[str, TablePool]:
    """What shards are drawn from: tables as in `dlrm_datasets`, and small ones as in MovieLens or Criteo's tail."""
    return {
        "large": synthetic_pool(428, seed=1, batch_size=batch_size),
        "small": synthetic_pool(200, seed=2, batch_size=batch_size, rows=(1e1, 1e5), dims=(4, 64), pooling=(0.5, 6.0)),
    }


def shard(index: int) -> Shard:
    """The index-th shard: 1 to 50 tables, log-uniform, so that single tables are common."""
    generator = np.random.default_rng((7, index))
    pool = "large" if generator.random() < 0.8 else "small"
    batch_size = int(generator.choice(BATCH_SIZES, p=BATCH_SHARES))
    most = 50 if batch_size <= 2048 else 50 * 2048 // batch_size  # a shard takes seconds, not minutes
    count = int(np.floor(np.exp(generator.uniform(0, np.log(most + 1)))))
    num_tables = 428 if pool == "large" else 200
    return Shard(pool, batch_size, tuple(int(t) for t in generator.choice(num_tables, count, replace=False)))


def schedule(num_shards: int) -> Iterator[tuple[int, int]]:
    """(shard, repetition): all once, then every tenth again."""
    yield from ((index, 0) for index in range(num_shards))
    yield from ((index, 1) for index in range(0, num_shards, REPEAT_EVERY))


def collect(out: Path, num_shards: int, seconds: float, core: int) -> int:
    """Measures what is missing in `out` for at most `seconds`; returns how many measurements are still missing."""
    import torch

    from dlrm_autoshard.distributed.shard_probe import ShardProbe

    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    deadline = time.monotonic() + seconds
    done = {(row["shard"], row["repetition"]) for row in read_rows(out)}
    missing = [item for item in schedule(num_shards) if item not in done]
    probe = ShardProbe(undisturbed=True, seconds_per_shard=0.15)
    pool_at = {size: pools(size) for size in BATCH_SIZES}
    fingerprint = hardware_fingerprint()
    with out.open("a") as file:
        for position, (index, repetition) in enumerate(missing):
            if time.monotonic() > deadline:
                return len(missing) - position
            chosen = shard(index)
            pool = pool_at[chosen.batch_size][chosen.pool].chosen(chosen.tables)
            attempts = [probe.measure(pool.tables, pool.stats, chosen.batch_size)]
            if attempts[-1].noise > NOISY:
                attempts.append(probe.measure(pool.tables, pool.stats, chosen.batch_size))
            measured = min(attempts, key=lambda attempt: attempt.noise)
            row = {
                "shard": index,
                "repetition": repetition,
                "fwd_compute": measured.fwd_compute_ms,
                "bwd_compute": measured.bwd_compute_ms,
                "noise": measured.noise,
                "fingerprint": fingerprint,
            }
            file.write(json.dumps(row) + "\n")
            file.flush()
    return 0


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shards", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    arguments = parser.parse_args()
    print(f"{collect(arguments.out, arguments.shards, arguments.seconds, arguments.core)} measurements still missing")


if __name__ == "__main__":
    main()
