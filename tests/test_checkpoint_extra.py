"""extra.json with right digests and wrong content, as a faulty disk does not make it but people and programs do: it is
a sentence that names the file, on every rank, and the checkpoint before it is offered; or it is loaded."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.train.checkpoints.manifest import (
    EXTRA,
    MANIFEST,
    DamagedCheckpoint,
    Manifest,
    bytes_digest,
    read_extra,
    read_manifest,
)
from dlrm_autoshard.train.trainer import Trainer
from tests.mutations import mutated
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, plan_file, tensors, trainer

IN_CI = 60  # a minute takes 600


def rewritten(checkpoint: Path, extra: bytes) -> None:
    """As if a job had written it so."""
    (checkpoint / EXTRA).write_bytes(extra)
    record = json.loads((checkpoint / MANIFEST).read_text())
    record = {**record, "extra": bytes_digest(extra), "files": {**record["files"], EXTRA: len(extra)}}
    record.pop("digest")
    (checkpoint / MANIFEST).write_bytes(Manifest.model_validate(record).to_bytes())


def settings(folder: Path) -> Any:
    autoshard = {"enabled": True, "placement": plan_file(folder, "0001", 2), "cache_dir": None}
    return config(
        folder,
        data={"val_samples": 60},
        train={"epochs": 3},
        checkpoint={"enabled": True, "keep": 3, "keep_best": "auc"},
        autoshard={**autoshard, "reshard": {"min_gain": 0.5}},
    )


def load_all(rank: int, world_size: int, folder: Path, count: int) -> list[str]:
    """What each of these says of one checkpoint; "" where it is loaded."""
    with trainer(settings(folder), make_runtime(rank, world_size), folder / "run") as made:
        made.run()
        before = tensors(made)
        newest = made.checkpoints.latest()
        assert newest is not None
        content, said = (newest / EXTRA).read_bytes(), []
        dist.barrier()
        for number in range(count):
            if rank == 0:
                rewritten(newest, mutated(content, random.Random(number), is_json=True))
            dist.barrier()
            said.append(attempt(made, newest))
            dist.barrier()
        if rank == 0:
            rewritten(newest, content)
        dist.barrier()
        assert attempt(made, newest) == "", "what the job itself has written"
        assert all((value == before[name]).all() for name, value in tensors(made).items())
        json.dumps(made.intervals.state_dict())
    return said


def attempt(made: Trainer, checkpoint: Path) -> str:
    try:
        made.state.resume(checkpoint)
    except DamagedCheckpoint as error:
        return str(error)
    return ""


def test_whatever_it_holds_is_loaded_or_a_sentence_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(load_all, 2, tmp_path, IN_CI, timeout=150)
    assert first == second, "ranks agree"
    assert sum(sentence != "" for sentence in first) > IN_CI // 4
    for sentence in filter(None, first):
        assert EXTRA in sentence and len(sentence) < 1000 and "Traceback" not in sentence


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"9" * 5000, b"\xff", b"{", b"1e999999, "])
def test_what_is_no_json_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    (checkpoint / EXTRA).write_bytes(content)
    manifest = Manifest.model_validate(
        {"schema": 4, "state": {"step": 1}, "algorithm": "crc32", "files": {EXTRA: len(content)},
         "extra": bytes_digest(content), "tensors": {}}
    )  # fmt: skip
    (checkpoint / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(UserError, match="holds no JSON that a job writes"):
        read_extra(checkpoint, read_manifest(checkpoint))
