"""Three ranks on one host, one on another behind a slow uplink: resharding learns that crossing is dear.

    python -m dlrm_autoshard.benchmarks.loop_netem CONFIG      # one rank of a job, under torchrun's environment

A table on the far rank sends its vectors up the slow link to three ranks; a table on the others sends its gradients of
one rank's samples up there. So every table that leaves the far rank saves two thirds of its traffic.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.loop_job import JobRun, fixed_plan, read_run
from dlrm_autoshard.benchmarks.slow_link import Link, cannot_make_link, slow_link
from dlrm_autoshard.config import load_config
from dlrm_autoshard.plan import ShardingPlan

TITLE = "a slow link to one of four ranks: throughput static, with resharding, and with its tables elsewhere"
ROUGH_TIME = "3 min"

HOSTS = (0, 0, 0, 1)
TABLES, DIM, MBIT_PER_S = 16, 64, 50.0


def run(quick: bool) -> dict[str, Any]:
    why_not = cannot_make_link()
    if why_not is not None:
        raise BenchError(f"loop-netem cannot run here: {why_not}")
    epochs, steps = (4, 30) if quick else (5, 60)
    names = [f"t{i}" for i in range(TABLES)]
    near = ShardingPlan({name: i % 3 for i, name in enumerate(names)}, len(HOSTS))
    with tempfile.TemporaryDirectory() as temporary, slow_link(MBIT_PER_S) as link:
        folder = Path(temporary)
        loop = train(link, folder / "loop", epochs, steps, {"enabled": True, "algorithm": "dim_greedy"})
        start, found = loop.epochs[0].plan, loop.final_plan
        fixed = {
            name: train(link, folder / name, 1, steps, fixed_plan(plan, folder)).throughput(0)
            for name, plan in (("static", start), ("found", found), ("near", near))
        }
        made_by = link.made_by
    best = max(fixed.values())
    return {
        "figures": {
            "static": fixed["static"],
            "in_loop_last_epoch": loop.throughput(epochs - 1),
            "in_loop_final_plan": fixed["found"],
            "none_behind_the_link": fixed["near"],
            "best_known": best,
            "of_best_known": fixed["found"] / best,
            "gain_over_static": fixed["found"] / fixed["static"] - 1,
            "tables_behind_the_link_at_first": len(start.tables_on(3)),
            "tables_behind_the_link_at_last": len(found.tables_on(3)),
            "reshards": loop.moves,
        },
        "targets": {"of_best_known": ">= 0.9", "gain_over_static": ">= 0.1"},
        "notes": [f"The link: {made_by}; four ranks share this machine's cores.", *loop.texts],
    }


def train(link: Link, folder: Path, epochs: int, steps: int, autoshard: dict[str, Any]) -> JobRun:
    folder.mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings(folder, epochs, steps, autoshard)))
    link.run([sys.executable, "-m", "dlrm_autoshard.benchmarks.loop_netem", str(config)], HOSTS, timeout=240)
    return read_run(folder / "run")


def settings(folder: Path, epochs: int, steps: int, autoshard: dict[str, Any], batch_size: int = 128) -> dict[str, Any]:
    tables = [{"name": f"t{i}", "num_embeddings": 20_000, "mean_pooling": 2.0} for i in range(TABLES)]
    return {
        "run": {"dir": str(folder), "name": "run", "device": "cpu", "pin_cores": False},
        "data": {
            "source": "synthetic",
            "tables": tables,
            "train_samples": len(HOSTS) * batch_size * steps,
            "test_samples": 0,
            "reuse_batches": 8,
        },
        "tables": {"embedding_dim": DIM},
        "model": {"dense_arch_layer_sizes": [DIM], "over_arch_layer_sizes": [32, 1]},
        "train": {"batch_size": batch_size, "epochs": epochs},
        "checkpoint": {"enabled": False},
        "profile": {"every_steps": 2, "warmup_steps": 2},
        "autoshard": {"measure_plans": 0, **autoshard},
    }


def main() -> None:
    from dlrm_autoshard.train.run_job import train as train_rank

    train_rank(load_config(Path(sys.argv[1])))


if __name__ == "__main__":
    main()
