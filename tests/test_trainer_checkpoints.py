"""What a job does with its checkpoints: damaged ones, later ones, ones that cannot be written."""

from __future__ import annotations

import errno
import json
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from dlrm_autoshard.config import Config
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.training.checkpoints.folder import run_and_checkpoint
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError, bytes_digest
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, records, tensors, trainer


def job(steps: int, **checkpoint: Any) -> Config:
    return config(train={"max_steps": steps}, checkpoint={"enabled": True, "every_steps": 5, **checkpoint})


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def fall_back(rank: int, world_size: int, folder: Path, damaged: str) -> tuple[str, dict[str, Tensor], list[str]]:
    """Trains to step 10, damages the newest checkpoint, continues: what is said when asked to, what is done when not,
    and what is loaded of an older one that is asked for."""
    runtime = make_runtime(rank, world_size)
    checkpoints = folder / "checkpoints"
    with trainer(job(10), runtime, folder) as made:
        made.run()
    runtime.barrier()
    if rank == 0:
        flip(checkpoints / "step_00000010" / damaged)
    runtime.barrier()
    with pytest.raises(CheckpointError) as caught, trainer(job(12), runtime, folder, fall_back=False):
        pass
    with trainer(job(12), runtime, folder) as made:
        assert made.job.position.step == 5
        loaded, notes = tensors(made), made.job.notes
        made.run()
    return str(caught.value), loaded, notes


@pytest.mark.parametrize("damaged", ["rank_00001.bin", "manifest.json", "extra.json"])
def test_the_newest_whole_checkpoint_is_offered_and_on_restarts_taken(damaged: str, tmp_path: Path) -> None:
    for message, _, notes in run_ranks(fall_back, 2, tmp_path, damaged, timeout=90):
        assert f"step_00000010/{damaged}'" in message
        assert message.endswith(f"--resume {tmp_path / 'checkpoints/step_00000005'}")
        assert damaged in notes[0] and "Continuing from the one before it" in notes[0]
        assert "step_00000010' is of a later step; set aside as" in notes[1]
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 13))
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000010", "step_00000010.set_aside", "step_00000012"]


def signed(record: dict[str, Any]) -> bytes:
    """A manifest with the right digest of these contents."""
    text = json.dumps(record, sort_keys=True)
    return json.dumps({"digest": bytes_digest(text.encode()), **record}).encode()


def wrong_values(rank: int, world_size: int, folder: Path) -> list[str]:
    """Values nobody wrote, in manifests whose digest is right."""
    runtime = make_runtime(rank, world_size)
    with trainer(job(5), runtime, folder) as made:
        made.run()
    file = folder / "checkpoints/step_00000005/manifest.json"
    whole = file.read_bytes()
    record = json.loads(whole)
    del record["digest"]
    messages = []
    for key, value in [("epoch", -1), ("step", 10**9), ("sample", "x"), ("plan", 3), ("table_updates", True)]:
        file.write_bytes(signed({**record, "state": {**record["state"], key: value}}))
        with pytest.raises(CheckpointError) as caught, trainer(job(6), runtime, folder, fall_back=False):
            pass
        messages.append(str(caught.value))
    file.write_bytes(signed({**record, "schema": 99}))
    with pytest.raises(CheckpointError) as caught, trainer(job(6), runtime, folder, fall_back=False):
        pass
    return [*messages, str(caught.value)]


def test_state_of_wrong_types_or_values_is_refused_by_key(tmp_path: Path) -> None:
    [messages] = run_ranks(wrong_values, 1, tmp_path)
    keys = ["state.epoch", "state.step", "state.sample", "state.plan", "state.table_updates", "schema is 99"]
    for key, message in zip(keys, messages, strict=True):
        assert key in message and "manifest.json" in message


def start_from_an_older_one(rank: int, world_size: int, folder: Path) -> list[str]:
    runtime = make_runtime(rank, world_size)
    with trainer(job(10, initial=False), runtime, folder) as made:
        made.run()
    asked = folder / "checkpoints/step_00000005"
    with trainer(job(7), runtime, folder, checkpoint=asked, fall_back=False) as made:
        assert made.job.position.step == 5
        made.run()
        return made.job.notes


def test_an_older_checkpoint_can_be_asked_for_and_later_ones_are_set_aside(tmp_path: Path) -> None:
    [notes] = run_ranks(start_from_an_older_one, 1, tmp_path)
    assert len(notes) == 1 and "step_00000010" in notes[0]
    kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert kept == ["step_00000005", "step_00000007", "step_00000010.set_aside"]  # and none of step 0
    assert run_and_checkpoint(str(tmp_path / "checkpoints/step_00000005")) == (
        str(tmp_path),
        tmp_path / "checkpoints/step_00000005",
    )
    assert run_and_checkpoint(str(tmp_path)) == (str(tmp_path), None)
    assert run_and_checkpoint("") == ("", None) and run_and_checkpoint(None) == (None, None)


def start_that_fails(rank: int, world_size: int, folder: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """A finished run's files before and after somebody has asked to go on from step 5, choosing by a split without
    samples."""
    runtime = make_runtime(rank, world_size)
    with trainer(job(10), runtime, folder) as made:
        made.run()
        made.write_report()
    before = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    asked = folder / "checkpoints/step_00000005"
    with pytest.raises(UserError, match="no val"), trainer(job(12, keep_best="auc"), runtime, folder, checkpoint=asked):
        pass
    after = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return before, after


def test_a_start_that_fails_leaves_the_run_as_it_was(tmp_path: Path) -> None:
    [(before, after)] = run_ranks(start_that_fails, 1, tmp_path)
    assert "result.json" in before and after == before


def save_steps(rank: int, world_size: int, folder: Path) -> list[int]:
    """Steps that are saved by a job whose training ends early, within an epoch, at a step that has a checkpoint."""
    steps: list[int] = []
    made_with = config(
        data={"val_samples": 60},
        train={"eval_every_steps": 3, "early_stopping": {"metric": "logloss", "patience": 1}},
        checkpoint={"enabled": True, "every_steps": 3},
        tables={"optimizer": {"name": "sgd", "lr": 10.0}},
    )
    with trainer(made_with, make_runtime(rank, world_size), folder) as made:
        save = made.job.checkpoints.save

        def count(*arguments: Any) -> Path:
            steps.append(arguments[1].step)
            return save(*arguments)

        made.job.checkpoints.save = count  # type: ignore[method-assign, assignment]
        assert made.run().steps == steps[-1] < 30
    return steps


def test_no_step_is_saved_twice(tmp_path: Path) -> None:
    """The second would take the place of the first, which at some moment was not there any more, nor this one yet."""
    [steps] = run_ranks(save_steps, 1, tmp_path)
    assert len(steps) > 1 and steps == sorted(set(steps))


def train_on_a_full_disk(rank: int, world_size: int, folder: Path, asynchronous: bool) -> None:
    """No file larger than 8 KiB can be written, which the tables of rank 1 are."""
    made_with = job(12, on_error="warn", asynchronous=asynchronous)
    with trainer(made_with, make_runtime(rank, world_size), folder) as made:
        if rank == 1:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
        made.run()
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def train_while_no_byte_is_free(rank: int, world_size: int, folder: Path) -> tuple[int, list[str]]:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with trainer(job(12, on_error="warn"), make_runtime(rank, world_size), folder) as made:
        os.fsync = full  # type: ignore[assignment]
        return made.run().steps, made.log.journal.finish(made.job.embeddings.plan, made.log.seconds)


def test_training_goes_on_where_no_record_can_be_written(tmp_path: Path) -> None:
    remedy = "No space left on device: free some disk space, or write to another disk."
    said = [f"no result.json and no report.html: {remedy}"]
    assert run_ranks(train_while_no_byte_is_free, 1, tmp_path) == [(12, said)]
    assert not list((tmp_path / "checkpoints").iterdir())


@pytest.mark.parametrize("asynchronous", [False, True])
def test_training_goes_on_where_no_checkpoint_can_be_written(asynchronous: bool, tmp_path: Path) -> None:
    run_ranks(train_on_a_full_disk, 2, tmp_path, asynchronous)
    assert [step for step, _ in losses(tmp_path)] == list(range(1, 13))
    assert not list((tmp_path / "checkpoints").iterdir())
    assert records(tmp_path)[-1]["step"] == 12
