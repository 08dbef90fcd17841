"""Made-up records for the report's tests: no run was timed for these figures.

`make_profile(work=[1.0, 2.0])` is an epoch in which rank 1 has twice the embedding work; `write_run` lays a run
directory out as the trainer does.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dlrm_autoshard.costs import STAGES, WAITS, RankCost, StageTime
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.facts import RankInterval, rank_file
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import SCHEMA
from dlrm_autoshard.records.run import RESULT
from dlrm_autoshard.tables import TableConfig, TableStats

BASE_MS = {
    "data_wait": 0.1, "input_dist": 0.8, "fwd_compute": 5.0, "fwd_comms": 1.2, "dense_fwd": 3.0, "dense_bwd": 4.0,
    "bwd_comms": 1.1, "bwd_compute": 7.0, "grad_allreduce": 0.6, "dense_optim": 0.4, "other": 0.3,
}  # fmt: skip
COMPUTES = ("fwd_compute", "dense_fwd", "dense_bwd", "bwd_compute", "dense_optim")
WAIT_ENDS = {  # the wait before a collective takes up the differences of the stages since the one before
    "input_dist_wait": ("data_wait", "other", "dense_optim"),
    "fwd_comms_wait": ("input_dist", "fwd_compute"),
    "bwd_comms_wait": ("fwd_comms", "dense_fwd", "dense_bwd"),
    "grad_allreduce_wait": ("bwd_comms", "bwd_compute", "grad_allreduce"),
}


def make_tables(count: int, seed: int = 0) -> tuple[list[TableConfig], list[TableStats]]:
    draw = random.Random(seed)
    tables = [TableConfig(f"cat_{i}", draw.randint(100, 10**6), draw.choice([16, 32, 64])) for i in range(count)]
    return tables, [TableStats(round(draw.uniform(0.5, 30), 3), mean_reuse=draw.uniform(1, 9)) for _ in tables]


def make_ranks(
    plan: ShardingPlan,
    tables: Sequence[TableConfig],
    work: Sequence[float],
    cpu_share: Sequence[float | None] | None = None,
    epoch: int = 0,
    steps: int = 100,
    seed: int = 0,
) -> list[RankInterval]:
    """Embedding compute is stretched by `work`, all compute by 1 / cpu_share; faster ranks wait."""
    draw = random.Random(seed + 1000 * epoch)
    shares = list(cpu_share or [0.99] * plan.world_size)
    own = []
    for rank in range(plan.world_size):
        times = {name: ms * draw.uniform(0.99, 1.01) for name, ms in BASE_MS.items()}
        for name in ("fwd_compute", "bwd_compute"):
            times[name] *= work[rank]
        for name in COMPUTES:
            times[name] /= shares[rank] or 1.0
        own.append(times)
    ranks = []
    for rank, times in enumerate(own):
        waits = {
            wait: max(sum(other[s] for s in stages) for other in own) - sum(times[s] for s in stages)
            for wait, stages in WAIT_ENDS.items()
        }
        stages = {n: StageTime(ms, ms * 1.2, ms * 0.05, 20) for n, ms in {**times, **waits}.items()}
        owned = plan.shards_on(rank)
        step = sum(times.values()) + sum(waits.values())
        ranks.append(
            RankInterval(
                epoch, epoch * steps, (epoch + 1) * steps, rank, f"host{rank // 8}", "cpu", owned,
                sum(t.weight_bytes + t.optimizer_bytes("rowwise_adagrad") for t in tables if t.name in owned),
                stages, step, 1024 / step * 1000, shares[rank],
                2**29 + sum(t.weight_bytes for t in tables if t.name in owned),
            )
        )  # fmt: skip
    assert set(stages) == set(STAGES) | set(WAITS)
    return ranks


def make_profile(
    work: Sequence[float] = (1.0, 2.0),
    cpu_share: Sequence[float | None] | None = None,
    num_tables: int = 12,
    epoch: int = 0,
    predicted: bool = True,
    seed: int = 0,
) -> IntervalProfile:
    tables, stats = make_tables(num_tables, seed)
    plan = ShardingPlan({t.name: i % len(work) for i, t in enumerate(tables)}, len(work))
    ranks = make_ranks(plan, tables, work, cpu_share, epoch, seed=seed)
    guesses = [RankCost(4.6 * w, 1.2, 1.1, 7.3 * w) for w in work] if predicted else None
    return IntervalProfile.gather(ranks, plan, tables, stats, 1024 * len(work), guesses)


def write_run(
    run_dir: Path,
    ranks: int = 2,
    epochs: int = 3,
    tables: int = 12,
    drift: float = 0.1,
    starved_epoch: int | None = None,
) -> Path:
    """Writes a run whose last rank starts with twice the work; two decisions take it away."""
    configs, stats = make_tables(tables)
    draw = random.Random(7)
    lines: dict[Path, list[str]] = defaultdict(list)

    def add(path: Path, record: Mapping[str, Any]) -> None:
        lines[path].append(json.dumps({"schema": SCHEMA, **record}, separators=(",", ":")) + "\n")

    rank_of = {t.name: draw.randrange(ranks) for t in configs}
    run_dir.mkdir(parents=True, exist_ok=True)
    (run_dir / "config.yaml").write_text(
        f"run: {{name: {run_dir.name}, dir: {run_dir.parent}}}\ndata: {{source: synthetic, tables: []}}\n"
        f"train: {{batch_size: 1024, epochs: {epochs}}}\nautoshard: {{enabled: true}}\n"
    )
    for epoch in range(epochs):
        worst = max(1.05, 2.0 - 0.5 * epoch)
        work = [1.0 + 0.02 * draw.random() for _ in range(ranks - 1)] + [worst]
        shares = [0.99] * ranks
        if epoch == starved_epoch:
            shares[0] = 0.5
        plan = ShardingPlan(rank_of, ranks)
        records = make_ranks(plan, configs, work, shares, epoch)
        for record in records:
            add(rank_file(run_dir, record.rank), record.to_json())
        predicted = [RankCost(5.2 * w, 1.2, 1.1, 6.6 * w) for w in work] if epoch else None
        profile = IntervalProfile.gather(records, plan, configs, stats, 1024 * ranks, predicted)
        add(epochs_file(run_dir), profile.to_json())
        plan.save(run_dir / "plan" / f"epoch_{epoch:05d}.json")
        for step in range(epoch * 100 + 25, epoch * 100 + 101, 25):
            loss = 0.7 / (1 + step / 400)
            add(
                run_dir / "metrics.jsonl",
                {"step": step, "epoch": epoch, "split": "train", "logloss": loss, "throughput": 30_000.0},
            )
        add(
            run_dir / "metrics.jsonl",
            {"step": (epoch + 1) * 100, "epoch": epoch, "split": "val", "auc": 0.8 - 0.2 / (epoch + 1), "logloss": loss,
             "ne": 0.9, "calibration": 1.01},
        )  # fmt: skip
        moved = worst > 1.1
        add(
            run_dir / "decisions.jsonl",
            {
                "epoch": epoch, "step": (epoch + 1) * 100, "action": "moved" if moved else "kept",
                "text": "moved 3 tables, 41 MiB, 0.31 s: predicted -14.8%" if moved
                else "kept: best candidate 1.2% faster, below min_gain 2%",
                "predicted_gain": 0.148 if moved else 0.012, "measured_gain": 0.139 if moved else None,
                "measured_low": 0.112 if moved else None, "measured_high": 0.166 if moved else None, "doubt": None,
                "moves": [{"shard": "cat_1", "from_rank": 1, "to_rank": 0, "bytes": 41 * 2**20}] if moved else [],
                "bytes_moved": 41 * 2**20 if moved else 0, "move_seconds": 0.31 if moved else 0.0,
                "paid_back_after_steps": 80 if moved else None, "error_before": 0.2 / (epoch + 1),
                "error_after": 0.1 / (epoch + 1), "throughput_before": 30_000.0,
            },
        )  # fmt: skip
        if moved:
            for name in draw.sample(list(rank_of), max(1, int(tables * drift))):
                rank_of[name] = draw.randrange(ranks)
    (run_dir / "costs").mkdir()
    for path, written in lines.items():
        path.write_text("".join(written))
    (run_dir / RESULT).write_text("{}\n")
    return run_dir
