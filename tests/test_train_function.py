"""`dlrm_autoshard.train` in a process that goes on afterwards: a notebook's, a scheduler's, a rank of torchrun's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests.jobs import REPOSITORY, TINY_CONFIG

ALONE = """
import json, os, random, signal, threading, time
import numpy, torch
import dlrm_autoshard

dlrm_autoshard.train  # loaded: what libraries do as they are imported is theirs
CONFIG = json.loads(os.environ["CONFIG"])

def process():
    drawn = [random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()]
    handlers = [str(signal.getsignal(n)) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    own = {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}  # torch's import
    facts = {"cores": str(os.sched_getaffinity(0)), "threads": torch.get_num_threads(), "random": hash(str(drawn))}
    return facts | {"handlers": str(handlers), **own}

torch.set_num_threads(2)
before, found = process(), []
for overrides in [(), ("train.max_steps=3",), ("run.threads_per_rank=9999",), ("data.tables.0.num_embeddings=x",)]:
    try:
        called = time.time()
        result = dlrm_autoshard.train(CONFIG, *overrides)
        found.append([result.steps, dict(result.metrics), str(result.run_dir), time.time() - called])
    except dlrm_autoshard.UserError as error:
        found.append(str(error))
    assert {*process().items()} == {*before.items()}, {*process().items()} ^ {*before.items()}
assert "max_steps" not in CONFIG["train"]
resumed = dlrm_autoshard.train(CONFIG, "train.epochs=2", resume=found[0][2])
found.append([resumed.steps, dict(resumed.metrics), str(resumed.run_dir)])
thread = threading.Thread(target=lambda: found.append(dlrm_autoshard.train("job.yaml").steps))
thread.start(); thread.join()
try:
    dlrm_autoshard.train("no_such")
except dlrm_autoshard.UserError as error:
    found.append(str(error))
print("FOUND", json.dumps(found))
"""

RANK = """
import json, os
import dlrm_autoshard

found = []
for steps in (2, 3):
    result = dlrm_autoshard.train("job.yaml", f"train.max_steps={steps}")
    found.append([result.steps, dict(result.metrics), result.run_dir.name])
try:
    dlrm_autoshard.train("job.yaml", "train.batch_size=0")
except dlrm_autoshard.UserError as error:
    found.append(str(error))
open(f"found_{os.environ['RANK']}.json", "w").write(json.dumps(found))
"""


def run(folder: Path, code: str, *launcher: str) -> str:
    """What it prints. The job is in job.yaml, and in CONFIG."""
    config = yaml.safe_load(TINY_CONFIG)
    config["data"]["test_samples"] = 200
    (folder / "job.yaml").write_text(yaml.safe_dump(config))
    (folder / "code.py").write_text(code)
    config["run"]["pin_cores"] = True
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "CONFIG": json.dumps(config)}
    command = [sys.executable, *launcher, "code.py"]
    ended = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def test_a_notebook_trains_again_and_again_and_is_as_it_was(tmp_path: Path) -> None:
    said = run(tmp_path, ALONE)
    found: list[Any] = json.loads(said.split("FOUND ")[1])
    whole, short, threads, wrong, resumed, in_thread, unknown = found
    assert whole[0] == 5 and whole[1]["logloss"] < 1 and (tmp_path / whole[2] / "report.html").exists()
    assert short[0] == 3 and short[2] != whole[2]
    seconds = json.loads((tmp_path / short[2] / "result.json").read_text())["seconds"]
    assert 0 <= seconds["joining"] < short[3]  # of the call's seconds, not of the process's
    assert "run.threads_per_rank is 9999" in threads and "data.tables.0.num_embeddings" in wrong
    assert resumed[0] == 10 and Path(resumed[2]).name == Path(whole[2]).name
    assert in_thread == 5 and "no file 'no_such'" in unknown


def test_ranks_of_torchrun_train_twice_in_two_runs(tmp_path: Path) -> None:
    run(tmp_path, RANK, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    first, second = (json.loads((tmp_path / f"found_{rank}.json").read_text()) for rank in range(2))
    assert first == second
    (steps, metrics, run_dir), (more, _, other), wrong = first
    assert (steps, more) == (2, 3) and metrics["logloss"] < 1 and run_dir != other
    assert "train.batch_size" in wrong
