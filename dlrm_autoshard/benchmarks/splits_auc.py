"""AUC under row-wise Adagrad by parts (`per_part`: each keeps its own sums of squares): all tables halved.

auc = auc_of("movielens", "by parts", seed=0, folder=Path("runs/splits"))
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Literal

from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.config import SHIPPED, load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.plan import ShardingPlan

RANKS, LIMIT_SECONDS = 2, 900
Adagrad = Literal["row-wise", "by parts", "elementwise"]
"""A sum of squares a row; a row's half, which lie on both ranks; a column."""


def auc_of(config: str, adagrad: Adagrad, seed: int, folder: Path, quick: bool = False) -> float:
    """AUC of the shipped config's job on two ranks. seed: of all that is drawn at the start, weights before all; data
    and order are the same."""
    name, halved = f"{config}-{adagrad.replace(' ', '-')}-{seed}", adagrad == "by parts"
    loaded = load_config(SHIPPED / f"{config}.yaml")
    tables = open_source(loaded.data, loaded.tables).tables
    if halved:
        middles = {table.name: table.embedding_dim // 2 for table in tables}
        parts = [t.part(*at).name for t in tables for at in ((0, middles[t.name]), (middles[t.name], t.embedding_dim))]
    else:
        parts = [table.name for table in tables]
    shutil.rmtree(folder / name, ignore_errors=True)  # an earlier benchmark's, which this job would not write over
    folder.mkdir(parents=True, exist_ok=True)
    plan = folder / f"{name}.json"
    ShardingPlan({part: i % RANKS for i, part in enumerate(parts)}, RANKS).save(plan)
    settings = [
        f"run.name={name}", f"run.dir={folder}", f"run.seed={seed}", f"tables.optimizer.per_part={str(halved).lower()}",
        f"tables.optimizer.name={'adagrad' if adagrad == 'elementwise' else 'rowwise_adagrad'}",
        "autoshard.enabled=false", f"autoshard.placement={plan}", "checkpoint.enabled=false",
        *(["train.epochs=1", "train.max_steps=20"] if quick else []),
    ]  # fmt: skip
    command = [sys.executable, "-m", "dlrm_autoshard", "train", config, "--ranks", str(RANKS), *settings]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS)
    if ended.returncode:
        raise BenchError(f"training {name} failed: {(ended.stderr or ended.stdout).strip().splitlines()[-1]}")
    result = json.loads((folder / name / "result.json").read_text())
    return float(result["metrics"]["auc"])
