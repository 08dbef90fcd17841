"""A table of 1.5 times what each rank has room for trains on two ranks, and takes no more memory than there is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.tables import Shard, TableConfig
from dlrm_autoshard.training.checkpoints.manifest import Manifest, SavedState, read_manifest
from dlrm_autoshard.training.checkpoints.saved_model import saved_model
from dlrm_autoshard.training.checkpoints.saved_weights import SavedWeights
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors, write_tensors
from tests.ranks import run_ranks
from tests.small_embeddings import global_batch, make, own_tensors, resident, train_step, world
from tests.split_jobs import WHOLE, job, predicted, train
from tests.split_plans import whole
from tests.trainers import TABLES, losses


def test_it_is_planned_trained_resumed_evaluated_and_exported_with_no_setting(tmp_path: Path) -> None:
    table = TableConfig("big", 20_000, 16)
    data = {"data": {"tables": [{"name": "big", "num_embeddings": 20_000, "embedding_dim": 16}, *TABLES]}}
    optimizer = {"tables": {"optimizer": {"name": "rowwise_adagrad", "lr": 0.1}}}
    room = (table.weight_bytes + table.optimizer_bytes("rowwise_adagrad")) / 1.5 / 2**30
    planning = {"enabled": True, "memory_gib": room, "measure_plans": 0, "reshard": {"enabled": False}}
    saved = {"checkpoint": {"enabled": True}}
    made = {**data, **optimizer, **saved}
    unsplit = job(tmp_path, "whole", {"big": 0, **WHOLE}, 2, **made)
    once, twice = (job(tmp_path, "split", None, 2, autoshard=planning, train={"epochs": n}, **made) for n in (1, 2))
    by_rank = run_ranks(train, 2, [(unsplit, tmp_path / "whole"), (once, tmp_path / "split")], timeout=200)
    again = run_ranks(train, 2, [(twice, tmp_path / "split")], timeout=200)
    assert RunRecord.load(tmp_path / "split").last.plan.row_split_tables == ("big",)
    expected, found = whole([rank[0] for rank in by_rank]), whole([rank[0] for rank in again])
    for name, value in expected.items():
        if name.startswith("tables."):
            torch.testing.assert_close(found[name], value, rtol=1e-4, atol=1e-6)
    assert np.allclose(losses(tmp_path / "split"), losses(tmp_path / "whole"), rtol=1e-5)
    (tmp_path / "split" / "config.yaml").write_text(twice.to_yaml())
    with saved_model(tmp_path / "split") as model:
        assert torch.equal(model.bags.sharded.storage.tensors(Shard("big"))["weight"], found["tables.big.weight"])
        weights = SavedWeights.open(max((tmp_path / "split" / "checkpoints").glob("step_*")), model.data.source.tables)
    assert torch.equal(dict(weights.tensors())["tables.big.weight"], found["tables.big.weight"])
    assert np.allclose(predicted(tmp_path / "split", 1), predicted(tmp_path / "split", 2), atol=1e-6)


MIB, ROWS = 1 << 20, 96 << 12
BUDGET = 64
"""MiB for tables on each rank; the table takes 96."""
HALVES = ShardingPlan({f"big[rows 0:{ROWS // 2}]": 0, f"big[rows {ROWS // 2}:{ROWS}]": 1}, 2)
OTHERS = ShardingPlan({f"big[rows 0:{ROWS * 5 // 8}]": 0, f"big[rows {ROWS * 5 // 8}:{ROWS}]": 1}, 2)


def peak_of(phase: Callable[[], object]) -> int:
    """Resident bytes of this process at the most, while the phase runs."""
    Path("/proc/self/clear_refs").write_text("5")
    phase()
    [kib] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kib) * 1024


def phases(rank: int, world_size: int, folder: str) -> dict[str, int]:
    """MiB beyond what the process has before, at the most of each phase."""
    tables = [TableConfig("big", ROWS, 64)]
    warm = make(rank, ShardingPlan({"t": 0}, 2), "rowwise_adagrad", "fp32", [TableConfig("t", 100, 64)])
    train_step(warm, global_batch(0, world_size, [TableConfig("t", 100, 64)])[rank])
    before, path = resident(), Path(folder) / "step_00000001"
    path.mkdir(exist_ok=True)
    embeddings = None
    tensors: dict[str, Tensor] = {}

    def start() -> None:
        nonlocal embeddings
        embeddings = make(rank, HALVES, "rowwise_adagrad", "fp32", tables)

    found = {"start": peak_of(start)}
    assert embeddings is not None
    found["step"] = peak_of(lambda: train_step(embeddings, global_batch(1, world_size, tables)[rank]))
    found["move"] = peak_of(lambda: reshard(embeddings, OTHERS, group=world(), chunk_bytes=MIB))
    for name in embeddings.plan.shards_on(rank):
        tensors |= {f"tables.{name}.{key}": value for key, value in embeddings.storage.tensors(name).items()}
    saved: list[object] = [None, None]

    def save() -> None:
        torch.distributed.all_gather_object(saved, write_tensors(path / f"rank_{rank:05d}.bin", tensors))

    found["checkpoint"] = peak_of(save)
    if rank == 0:
        files = {file.name: file.stat().st_size for file in path.glob("*.bin")}
        merged = {key: value for own in saved for key, value in own.items()}  # type: ignore[attr-defined]
        manifest = Manifest.of(SavedState(step=1, plan=OTHERS.to_json()), files, "", merged)
        (path / "manifest.json").write_bytes(manifest.to_bytes())
    torch.distributed.barrier()
    tensors.clear()
    reshard(embeddings, HALVES, group=world(), chunk_bytes=MIB)
    sums = {name: float(value.double().sum()) for name, value in own_tensors(embeddings).items()}

    def load() -> None:
        held = embeddings.plan.shards_on(rank)
        views = {f"tables.{n}.{key}": v for n in held for key, v in embeddings.storage.tensors(n).items()}
        for value in views.values():
            value.detach().zero_()
        read_tensors(path, read_manifest(path), views)

    found["resume"] = peak_of(load)
    assert sums == {name: float(value.double().sum()) for name, value in own_tensors(embeddings).items()}
    return {name: (peak - before) // MIB for name, peak in found.items()}


def test_each_phase_takes_no_more_than_the_budget_and_a_few_chunks(tmp_path: Path) -> None:
    chunks = {"move": 4, "checkpoint": 16, "resume": 4 * 16}
    for peaks in run_ranks(phases, 2, str(tmp_path), timeout=120):
        assert all(peak <= BUDGET + chunks.get(name, 0) for name, peak in peaks.items()), peaks
