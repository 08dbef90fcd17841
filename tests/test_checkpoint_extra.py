"""A checkpoint's JSON with right digests and wrong content, as faulty disks do not make it but people and programs do:
it is a sentence that names the checkpoint, on every rank; or it is loaded."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.checkpoints.manifest import (
    EXTRA,
    MANIFEST,
    CheckpointError,
    Manifest,
    _digest,
    bytes_digest,
    read_extra,
    read_manifest,
)
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
from dlrm_autoshard.training.trainer import Trainer
from tests.mutations import mutated
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, plan_file, tensors, trainer

IN_CI = 60  # a minute takes 600


def rewritten(checkpoint: Path, extra: bytes, manifest: bytes) -> None:
    """As if a job had written it so. manifest: without its digest."""
    (checkpoint / EXTRA).write_bytes(extra)
    try:
        record = json.loads(manifest)
        (checkpoint / MANIFEST).write_text(json.dumps({**record, "digest": _digest(record)}))
    except (ValueError, TypeError, RecursionError):  # not an object
        (checkpoint / MANIFEST).write_bytes(manifest)


def with_extra(manifest: bytes, extra: bytes) -> bytes:
    record = json.loads(manifest)
    record = {**record, "extra": bytes_digest(extra), "files": {**record["files"], EXTRA: len(extra)}}
    return json.dumps(record).encode()


def changed(content: bytes, manifest: bytes, number: int) -> tuple[bytes, bytes]:
    """Three in four times what extra.json holds, else the manifest."""
    draw = random.Random(number)
    if number % 4:
        extra = mutated(content, draw, is_json=True)
        return extra, with_extra(manifest, extra)
    return content, mutated(manifest, draw, is_json=True)


def manifest_of(checkpoint: Path) -> bytes:
    record = json.loads((checkpoint / MANIFEST).read_text())
    return json.dumps({key: value for key, value in record.items() if key != "digest"}).encode()


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
        newest = made.job.checkpoints.latest()
        assert newest is not None
        content, manifest, said = (newest / EXTRA).read_bytes(), manifest_of(newest), []
        dist.barrier()
        for number in range(count):
            if rank == 0:
                rewritten(newest, *changed(content, manifest, number))
            dist.barrier()
            said.append(attempt(made, newest))
            dist.barrier()
        if rank == 0:
            rewritten(newest, content, manifest)
        dist.barrier()
        assert attempt(made, newest) == "", "what the job itself has written"
        assert all((value == before[name]).all() for name, value in tensors(made).items())
        json.dumps(made.job.intervals.state_dict())
    return said


def attempt(made: Trainer, checkpoint: Path) -> str:
    try:
        made.job.state.resume(checkpoint)
    except CheckpointError as error:
        return str(error)
    return ""


def exported(checkpoint: Path, tables: Sequence[TableConfig]) -> str:
    try:
        for _, _ in SavedWeights.open(checkpoint, tables).tensors():
            pass
    except CheckpointError as error:
        return str(error)
    return ""


def test_whatever_it_holds_is_loaded_or_a_sentence_on_every_rank(tmp_path: Path) -> None:
    first, second = run_ranks(load_all, 2, tmp_path, IN_CI, timeout=150)
    assert first == second, "ranks agree"
    assert sum(sentence != "" for sentence in first) > IN_CI // 4
    for sentence in filter(None, first):
        assert "checkpoint" in sentence and len(sentence) < 2000 and "Traceback" not in sentence
    newest = max((tmp_path / "run" / "checkpoints").glob("step_*"))
    content, manifest = (newest / EXTRA).read_bytes(), manifest_of(newest)
    source = open_source(settings(tmp_path).data, settings(tmp_path).tables)
    for number in range(0, 4 * IN_CI, 4):
        rewritten(newest, *changed(content, manifest, number))
        assert len(exported(newest, source.tables)) < 2000


@pytest.mark.parametrize("content", [b"", b"[" * 100_000, b"9" * 5000, b"\xff", b"{", b"1e999999, "])
def test_what_is_no_json_is_a_sentence(content: bytes, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_00000001"
    checkpoint.mkdir()
    (checkpoint / EXTRA).write_bytes(content)
    manifest = Manifest.model_validate(
        {"schema": 4, "state": {"step": 1}, "algorithm": "xxh3_64", "files": {EXTRA: len(content)},
         "extra": bytes_digest(content), "tensors": {}}
    )  # fmt: skip
    (checkpoint / MANIFEST).write_bytes(manifest.to_bytes())
    with pytest.raises(UserError, match="holds JSON that no job writes"):
        read_extra(checkpoint, read_manifest(checkpoint))
