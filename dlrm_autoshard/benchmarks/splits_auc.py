"""What row-wise Adagrad by parts (`per_part`: each keeps its own sums of squares) does to the AUC: all tables halved.

auc = auc_of("movielens", halved=True, folder=Path("runs/splits"))
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.config import SHIPPED, load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.plan import ShardingPlan

RANKS, LIMIT_SECONDS = 2, 900


def auc_of(config: str, halved: bool, folder: Path, quick: bool = False) -> float:
    """Of the shipped config's job on two ranks, with row-wise Adagrad: tables whole, or each in two halves by columns,
    on both ranks. Seeds, data and order are the same."""
    name = f"{config}-{'halved' if halved else 'whole'}"
    loaded = load_config(SHIPPED / f"{config}.yaml")
    tables = open_source(loaded.data, loaded.tables).tables
    if halved:
        middles = {table.name: table.embedding_dim // 2 for table in tables}
        parts = [t.part(*at).name for t in tables for at in ((0, middles[t.name]), (middles[t.name], t.embedding_dim))]
    else:
        parts = [table.name for table in tables]
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / f"{name}.json"
    ShardingPlan({part: i % RANKS for i, part in enumerate(parts)}, RANKS).save(plan)
    settings = [
        f"run.name={name}", f"run.dir={folder}", f"tables.optimizer.per_part={str(halved).lower()}",
        "autoshard.enabled=false", f"autoshard.placement={plan}", "checkpoint.enabled=false",
        *(["train.epochs=1", "train.max_steps=20"] if quick else []),
    ]  # fmt: skip
    command = [sys.executable, "-m", "dlrm_autoshard", "train", config, "--ranks", str(RANKS), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if ended.returncode:
        raise BenchError(f"training {name} failed: {(ended.stderr or ended.stdout).strip().splitlines()[-1]}")
    result = json.loads((folder / name / "result.json").read_text())
    return float(result["metrics"]["auc"])
