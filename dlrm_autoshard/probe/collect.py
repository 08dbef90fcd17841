"""Measures fused shards of synthetic tables: the data behind the shipped costs.

python -m dlrm_autoshard.probe.collect --out shards.jsonl --shards 1500 --seconds 110        # on a GPU: --device cuda
python -m dlrm_autoshard.probe.collect --out shards.jsonl --exchanges       # gloo exchanges of 2 to 4 ranks
python -m dlrm_autoshard.probe.collect --out shards.jsonl --pack amd_epyc   # fits, prints errors, writes amd_epyc.*
python -m dlrm_autoshard.probe.collect --refit amd_epyc                     # after a change of the model only
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.ranks.runtime import runtime_of
from dlrm_autoshard.distributed.ranks.spawn import run_ranks
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.exchange_model import NVLINK
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample, comms_of
from dlrm_autoshard.planner.dreamshard.pool import TablePool, synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.rank_probe import RankProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe
from dlrm_autoshard.probe.shipped_costs import SHIPPED, read_samples, write_samples


@dataclass(frozen=True)
class Draws:
    """Distribution of shards: batch sizes with their probabilities, and the number of tables in each pool.

    all_tables: the largest batch size with up to 50 tables per shard; larger ones have fewer, to save minutes."""

    batch_sizes: tuple[int, ...]
    shares: tuple[float, ...]
    all_tables: int
    large: int
    small: int


DRAWS = {
    "cpu": Draws((512, 1024, 2048, 4096, 8192), (0.1, 0.1, 0.5, 0.2, 0.1), 2048, large=428, small=200),
    # Larger batches of fewer tables: drawing ids on the host takes most of the time here.
    "cuda": Draws((4096, 16384, 32768), (0.25, 0.5, 0.25), 32768, large=64, small=50),
}
REPEAT_EVERY = 10
NOISY = 0.1  # spread above which a shard is measured a second time
UPDATES = 600
"""Held-out error of the 755 shipped shards, mean of three seeds: 9.5, 8.4, 8.6 and 9.7% at 300, 600, 1000 and 3000."""
WORLD_SIZES, PLANS = (2, 3, 4), 6
"""Numbers of ranks whose exchanges are measured, and plans measured for each."""
DISTURBED = 0.15  # shards with a larger spread reflect other load on the machine and are left out


@dataclass(frozen=True)
class Shard:
    """Tables of one pool ('large' or 'small') that are measured together at one batch size."""

    pool: str
    batch_size: int
    tables: tuple[int, ...]


def pools(batch_size: int) -> dict[str, TablePool]:
    """Returns the pools to draw shards from: tables as in `dlrm_datasets`, and small ones as in MovieLens or Criteo."""
    return {
        "large": synthetic_pool(428, seed=1, batch_size=batch_size),
        "small": synthetic_pool(200, seed=2, batch_size=batch_size, rows=(1e1, 1e5), dims=(4, 64), pooling=(0.5, 6.0)),
    }


def shard(index: int, draws: Draws = DRAWS["cpu"]) -> Shard:
    """Draws the index-th shard: 1 to 50 tables, log-uniform, so that single tables are common."""
    generator = np.random.default_rng((7, index))
    pool = "large" if generator.random() < 0.8 else "small"
    batch_size = int(generator.choice(draws.batch_sizes, p=draws.shares))
    most = 50 if batch_size <= draws.all_tables else 50 * draws.all_tables // batch_size
    count = int(np.floor(np.exp(generator.uniform(0, np.log(most + 1)))))
    num_tables = draws.large if pool == "large" else draws.small
    return Shard(pool, batch_size, tuple(int(t) for t in generator.choice(num_tables, count, replace=False)))


def schedule(num_shards: int) -> Iterator[tuple[int, int]]:
    """Yields (shard, repetition): every tenth shard a second time, a hundred shards later."""
    for index in range(num_shards):
        yield index, 0
        if index % REPEAT_EVERY == 0 and index >= 100:
            yield index - 100, 1


def collect(out: Path, num_shards: int, seconds: float, device: torch.device) -> int:
    """Measures what `out` lacks for at most `seconds`; returns the number of measurements still missing.

    Shard i is always the same, so the command can be repeated while the machine is quiet, and continues where it
    stopped. Every tenth shard is measured again later: that difference is the floor of any cost model's error.
    """
    torch.set_num_threads(1)
    deadline = time.monotonic() + seconds
    done = {(row["shard"], row["repetition"]) for row in read_rows(out) if "shard" in row}
    missing = [item for item in schedule(num_shards) if item not in done]
    draws, probe = DRAWS[device.type], ShardProbe(undisturbed=True, seconds_per_shard=0.15)
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        probe = ShardProbe(
            device=device,
            buffer_gib=0.25 * free / 2**30,
            warmup=2,
            repeats=3,  # a second measurement differs by 0.4%
            seconds_per_shard=0.02,
            most_kept_ids=2_000_000_000,
        )
    pool_at = {size: pools(size) for size in draws.batch_sizes}
    fingerprint = hardware_fingerprint(device)
    with out.open("a") as file:
        for position, (index, repetition) in enumerate(missing):
            if time.monotonic() > deadline:
                return len(missing) - position
            chosen = shard(index, draws)
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
    """Reads the rows collected so far."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def fingerprint_in(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the hardware that the rows were collected on."""
    return dict(next(row["fingerprint"] for row in rows if "fingerprint" in row))


def collect_exchanges(out: Path) -> int:
    """Appends the times of exchanges of pooled vectors under uneven plans, on ranks of this machine."""
    count = 0
    with out.open("a") as file:
        for world_size in WORLD_SIZES:
            cores = sorted(os.sched_getaffinity(0))
            for sample in run_ranks(exchanges_on_ranks, world_size, timeout=100, cores=cores)[0]:
                file.write(json.dumps({"exchange": sample}) + "\n")
                count += 1
    return count


def exchanges_on_ranks(rank: int, world_size: int) -> list[dict[str, Any]] | None:
    """Measures exchanges on every rank, under plans from even to all tables on one rank, at three batch sizes."""
    world = dist.group.WORLD
    assert world is not None
    runtime = runtime_of(world, torch.device("cpu"))
    pool = synthetic_pool(24, seed=3, batch_size=1024, rows=(1e2, 1e3), pooling=(1.0, 1.5))
    names = [table.name for table in pool.tables]
    samples: list[dict[str, Any]] = []
    for batch_size in (768, 3072, 12288):
        probe = RankProbe(
            runtime, pool.tables, pool.stats, batch_size, ShardProbe(buffer_gib=0.01, repeats=1), exchange_repeats=15
        )
        generator = np.random.default_rng(batch_size)
        placements = [
            ShardingPlan({name: int(world_size * generator.random() ** (1 + i)) for name in names}, world_size)
            for i in range(PLANS)
        ]
        profiles = probe.on_rank_zero(functools.partial(probe.measure, placements))
        samples += [comms_of(profile).to_json() for profile in profiles or []]
    return samples if rank == 0 else None


def samples_in(path: Path) -> tuple[list[ShardSample], list[CommsSample], list[float]]:
    """Returns shards (first measurements), exchanges, and relative differences of second measurements."""
    rows = read_rows(path)
    draws = DRAWS[fingerprint_in(rows)["device"]]
    pool_at = {size: pools(size) for size in draws.batch_sizes}
    shards: dict[int, ShardSample] = {}
    again = []
    for row in rows:
        if "exchange" in row:
            continue
        chosen = shard(row["shard"], draws)
        pool = pool_at[chosen.batch_size][chosen.pool].chosen(chosen.tables)
        sample = ShardSample(
            pool.tables, pool.stats, chosen.batch_size, row["fwd_compute"], row["bwd_compute"], row["noise"]
        )
        first = shards.setdefault(row["shard"], sample)
        if first is not sample and max(first.noise, sample.noise) <= DISTURBED:
            again.append(
                (first.fwd_compute_ms + first.bwd_compute_ms) / (sample.fwd_compute_ms + sample.bwd_compute_ms) - 1
            )
    comms = [CommsSample.from_json(row["exchange"]) for row in rows if "exchange" in row]
    return list(shards.values()), comms, again


def pack(path: Path, machine: str) -> dict[str, Any]:
    """Writes a machine's shipped files from its measurements."""
    shards, comms, again = samples_in(path)
    kept = [sample for sample in shards if sample.noise <= DISTURBED]
    write_samples(SHIPPED / f"{machine}.npz", kept, comms)
    facts = {
        "schema": 1,
        "fingerprint": fingerprint_in(read_rows(path)),
        "shards": len(kept),
        "shards_left_out": f"{len(shards) - len(kept)} whose spread was above {DISTURBED}",
        "exchanges": len(comms),
        "measured_again_differs_by": float(np.mean(np.abs(again))) if again else None,
        "measured_again_differs_by_median": float(np.median(np.abs(again))) if again else None,
    }
    return fit_shipped(machine, facts)


def fit_shipped(machine: str, facts: dict[str, Any]) -> dict[str, Any]:
    """Fits to four fifths of a machine's samples, measures the error on the rest, fits to all and writes the record."""
    samples = read_samples(SHIPPED / f"{machine}.npz")
    planner, errors = fit([sample for sample in samples if isinstance(sample, ShardSample)], samples)
    if facts["fingerprint"]["device"] == "cuda":
        planner.costs.exchange.load_prices([NVLINK, NVLINK])
    figures = {
        **facts,
        "command": "python -m dlrm_autoshard.probe.collect --out shards.jsonl --shards N, --exchanges, then --pack X",
        "updates": UPDATES,
        **errors,
    }
    fitted = {
        "cost_model": planner.costs.cost_model.to_json(),
        "comms": planner.costs.exchange.prices_SP.tolist(),
    }
    (SHIPPED / f"{machine}.json").write_text(json.dumps({**figures, **fitted}) + "\n")
    return figures


def fit(shards: Sequence[ShardSample], samples: Sequence[ShardSample | CommsSample]) -> tuple[Planner, dict[str, Any]]:
    """Returns a planner fitted to all samples, and the errors on a fifth of the shards of one fitted to the others."""
    order = np.random.default_rng(0).permutation(len(shards))
    held_out = [shards[i] for i in order[: len(shards) // 5]]
    trial, planner = Planner("auto", seed=0), Planner("auto", seed=0)
    trial.costs.learn([shards[i] for i in order[len(shards) // 5 :]], updates=UPDATES)
    predicted = trial.costs.cost_model.shard_ms(held_out)
    measured = np.array([(sample.fwd_compute_ms, sample.bwd_compute_ms) for sample in held_out])
    errors = np.abs(predicted / measured - 1).mean(axis=0)
    total = np.abs(predicted.sum(axis=1) / measured.sum(axis=1) - 1)
    planner.costs.learn(samples, updates=UPDATES)
    return planner, {
        "held_out_shards": len(held_out),
        "held_out_error": {"forward": float(errors[0]), "backward": float(errors[1]), "both": float(total.mean())},
        "held_out_error_median": float(np.median(total)),
    }


def refit(machine: str) -> dict[str, Any]:
    """Fits shipped costs again to their own samples."""
    record = json.loads((SHIPPED / f"{machine}.json").read_text())
    return fit_shipped(machine, {key: value for key, value in record.items() if key not in ("cost_model", "comms")})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shards.jsonl"))
    parser.add_argument("--shards", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=110.0)
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)))
    parser.add_argument("--device", choices=sorted(DRAWS), default="cpu")
    parser.add_argument("--exchanges", action="store_true", help="measure exchanges instead of shards")
    parser.add_argument("--pack", metavar="NAME", help="fit and write the shipped files under this name")
    parser.add_argument("--refit", metavar="NAME", help="fit the shipped samples of this name again")
    arguments = parser.parse_args()
    if arguments.exchanges:
        print(f"{collect_exchanges(arguments.out)} exchanges measured")
    elif arguments.pack:
        print(json.dumps(pack(arguments.out, arguments.pack), indent=1))
    elif arguments.refit:
        print(json.dumps(refit(arguments.refit), indent=1))
    else:
        if arguments.device == "cpu":
            os.sched_setaffinity(0, {arguments.core})
        missing = collect(arguments.out, arguments.shards, arguments.seconds, torch.device(arguments.device))
        print(f"{missing} measurements still missing")


if __name__ == "__main__":
    main()
