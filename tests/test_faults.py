"""Ranks that are stopped, hang, die or are cut off: the job ends in time, in a sentence that names who and where."""

from __future__ import annotations

import os
import platform
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from dlrm_autoshard.distributed.ranks import heartbeats
from dlrm_autoshard.distributed.ranks.heartbeats import Heartbeats
from tests.jobs import CONFIG, TRAIN, started, steps_saved, torchrun, until

pytestmark = pytest.mark.alone

TIMEOUT = 6  # seconds, configured in the jobs that hang
HOST = re.escape(platform.node())


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG + f"run: {{name: job, dir: {tmp_path / 'runs'}, collective_timeout_seconds: {TIMEOUT}}}\n")
    return path


def long(config: Path, *settings: str) -> list[str]:
    return ["--config", str(config), "train.epochs=1000", "checkpoint.every_steps=50", *settings]


@pytest.mark.parametrize(("ranks", "told", "number"), [(2, [1], signal.SIGINT), (3, [0, 2], signal.SIGTERM)])
def test_a_signal_to_any_ranks_stops_all_after_the_same_step_with_one_checkpoint(
    ranks: int, told: list[int], number: signal.Signals, config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "job"
    with started(torchrun(ranks, *long(config)), tmp_path) as job:
        until(lambda: (run / "checkpoints/step_00000050").exists())
        members, before = job.ranks(), set(steps_saved(run))
        asked = time.monotonic()
        for rank in told:
            members[rank].send_signal(number)
        until(lambda: not any(member.is_running() for member in members.values()), 30)
        print(f"{number.name} to exit of all ranks: {time.monotonic() - asked:.1f} s")
        job.ends_within(30)
        said = job.said()
    last = steps_saved(run)[-1]
    assert last not in before and len(set(steps_saved(run)) - before - {last}) <= 1
    line = rf"^\[rank \d\] stopped by {number.name} after step {last}\. --resume continues from"
    assert len(re.findall(line, said, re.MULTILINE)) == 1, said
    assert "dlrm_autoshard/" not in said, "no traceback of ours"


def test_a_signal_to_one_rank_before_training_stops_all(config: Path, tmp_path: Path) -> None:
    """While rank 0 plans and the others wait for it."""
    planning = ["autoshard.enabled=true", "autoshard.budget_seconds=60", "autoshard.algorithm=dreamshard"]
    with started(torchrun(2, *long(config, *planning)), tmp_path) as job:
        until(lambda: (tmp_path / "runs" / "job" / "job.json").exists())
        time.sleep(0.5)
        job.ranks()[1].send_signal(signal.SIGTERM)
        job.ends_within(40)
        assert re.search(r"\[rank \d\] stopped by SIGTERM before training began\.", job.said()), job.said()
        assert "dlrm_autoshard/" not in job.said()


@pytest.mark.parametrize("moment", ["training", "sampled steps", "planning"])
def test_a_rank_that_hangs_is_named_within_the_timeout(moment: str, config: Path, tmp_path: Path) -> None:
    settings = {
        "training": [],
        "sampled steps": ["profile.enabled=true", "profile.every_steps=1", "profile.warmup_steps=0"],
        "planning": ["autoshard.enabled=true", "autoshard.budget_seconds=60", "autoshard.algorithm=dreamshard"],
    }[moment]
    run = tmp_path / "runs" / "job"
    with started(torchrun(3, *long(config, *settings)), tmp_path) as job:
        until(lambda: (run / ("job.json" if moment == "planning" else "checkpoints/step_00000050")).exists())
        time.sleep(0.3)
        job.ranks()[1].send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        job.ends_within(TIMEOUT + 15)
        print(f"SIGSTOP while {moment} to the end, timeout {TIMEOUT} s: {time.monotonic() - stopped:.1f} s")
        where = "before the first step" if moment == "planning" else r"at step \d+"
        named = (
            rf"\[rank [02]\] rank 1 on {HOST} hangs or is cut off: no sign of life from it for \d+ s, the last {where}"
        )
        said = job.said()
    assert len(re.findall(named, said)) == 1, said
    assert "dlrm_autoshard/" not in said, "no traceback of ours"


def test_a_rank_that_hangs_in_its_own_code_is_named_with_the_place(config: Path, tmp_path: Path) -> None:
    """Alive, but stuck where no exchange is: the others wait for it, and not it for them."""
    source = tmp_path / "stuck.py"
    source.write_text(
        "import os, time\nimport dlrm_autoshard.distributed.lookup.embeddings as e\n"
        "lookup = e.ShardedEmbeddings.lookup\n"
        "def stuck(self, *a, **k):\n    if self.updates == 30 and os.environ['RANK'] == '2':\n        time.sleep(99)\n"
        "    return lookup(self, *a, **k)\ne.ShardedEmbeddings.lookup = stuck\n"
    )
    factory = "import dlrm_autoshard.model.dlrm\nimport stuck\n"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nif 'train.py' in ' '.join(sys.orig_argv) and 'RANK' in __import__('os').environ:\n"
        + "".join(f"    {line}\n" for line in factory.splitlines())
    )
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '.')}"
    with started(torchrun(3, *long(config)), tmp_path, PYTHONPATH=path) as job:
        job.ends_within(TIMEOUT + 60)
        said = job.said()
    assert re.search(rf"\[rank [01]\] rank 2 on {HOST} hangs at step 30, in stuck\.py:6 \(stuck\)", said), said


def test_a_restart_goes_on_from_its_newest_checkpoint_whatever_its_first_start_resumed(
    config: Path, tmp_path: Path
) -> None:
    run = tmp_path / "runs" / "job"
    with started([sys.executable, TRAIN, *long(config, "train.max_steps=100")], tmp_path) as job:
        assert job.ends_within(90) == 0, job.said()
    resume = f"--resume={run / 'checkpoints/step_00000050'}"
    with started(torchrun(2, *long(config, "train.max_steps=500", resume), restarts=1), tmp_path) as job:
        until(lambda: steps_saved(run)[-1:] > [200])
        assert 50 not in steps_saved(run)  # nothing that the restart could resume
        job.ranks()[1].send_signal(signal.SIGKILL)
        assert job.ends_within(90) == 0, job.said()
        steps = [int(step) for step in re.findall(r"resumed at step (\d+)", job.said())]
    assert steps[0] == 50 and steps[1] > 200


@pytest.mark.parametrize("store_is", ["torchrun's", "rank 0's"])
def test_a_rank_that_hangs_is_replaced_by_torchruns_restart(store_is: str, config: Path, tmp_path: Path) -> None:
    """Also the one that keeps the job's store, which rank 0 does on several machines."""
    run = tmp_path / "runs" / "job"
    command = torchrun(2, *long(config, "train.max_steps=300"), restarts=1)
    with started(command, tmp_path, TORCH_DISABLE_SHARE_RDZV_TCP_STORE=str(int(store_is == "rank 0's"))) as job:
        until(lambda: (run / "checkpoints/step_00000050").exists())
        job.ranks()[0].send_signal(signal.SIGSTOP)
        assert job.ends_within(TIMEOUT + 60) == 0, job.said()
        assert "rank 0 on" in job.said() and "resumed at step" in job.said()


def test_ranks_that_are_stopped_together_for_longer_than_the_timeout_go_on(config: Path, tmp_path: Path) -> None:
    """As a scheduler suspends a job in mid-step, and lets it go on later."""
    run = tmp_path / "runs" / "job"
    only_steps = ["data.train_samples=10000000", "train.log_every_steps=1000", "checkpoint.every_steps=1000"]
    with started(torchrun(2, *long(config, *only_steps)), tmp_path) as job:
        until(lambda: (run / "checkpoints/step_00001000").exists())
        time.sleep(0.3)
        members = job.ranks().values()
        for member in members:
            member.send_signal(signal.SIGSTOP)
        time.sleep(TIMEOUT + 2)
        before = steps_saved(run)[-1]
        for member in members:
            member.send_signal(signal.SIGCONT)
        until(lambda: job.process.poll() is not None or steps_saved(run)[-1] > before + 1000)
        assert job.process.poll() is None, job.said()


def test_ranks_outlive_no_torchrun(config: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "job"
    with started(torchrun(2, *long(config)), tmp_path) as job:
        until(lambda: (run / "checkpoints/step_00000050").exists())
        members = job.ranks()
        job.process.kill()
        until(lambda: not any(member.is_running() for member in members.values()), 20)
        assert "stopped by SIGTERM after step" in job.said()


class _LostStore:
    """A store that answers once, when a rank starts; torchrun, which kept it, is gone then."""

    def __init__(self) -> None:
        self.asked = 0

    def clone(self) -> _LostStore:
        return self

    def set(self, key: str, value: str) -> None:
        self.asked += 1
        if self.asked > 1:
            raise RuntimeError("Broken pipe")


def test_a_rank_that_loses_the_store_before_it_sees_that_torchrun_is_gone_is_asked_to_stop_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It could end without a checkpoint, where torchrun was killed between its looks at the one and the other."""
    store, asked = _LostStore(), list[int]()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job")
    monkeypatch.setattr(heartbeats, "_INTERVAL", 0.1)
    monkeypatch.setattr(heartbeats.os, "getppid", lambda: 1 if store.asked > 1 else 4_000_000)
    monkeypatch.setattr(heartbeats.os, "kill", lambda process, number: asked.append(number))
    monkeypatch.setattr(Heartbeats, "_end", lambda self, cause: None)
    with Heartbeats(store, 1, 2, timeout_seconds=10):  # type: ignore[arg-type]
        until(lambda: bool(asked), 5)
    assert asked == [signal.SIGTERM]
