"""A checkpoint knows no splits: whoever wrote which rows and columns of a table, and whoever wants which."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dlrm_autoshard.distributed.bags import assembled
from dlrm_autoshard.plan import ShardingPlan, shard_tables
from dlrm_autoshard.tables import Shard, TableConfig
from dlrm_autoshard.training.checkpoints import tensor_file
from dlrm_autoshard.training.checkpoints.manifest import (
    SCHEMA,
    DamagedCheckpoint,
    Manifest,
    SavedState,
    SavedTensor,
    read_manifest,
)
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors, write_tensors
from tests.split_plans import plans_of

TABLES = (TableConfig("user", 37, 16), TableConfig("item", 11, 44))


def values_of(plan: ShardingPlan, rank: int, rows: dict[str, Tensor]) -> dict[str, Tensor]:
    """What `rank` holds of tables whose elements say where they are, and a number a row and part."""
    found: dict[str, Tensor] = {}
    for table in shard_tables(TABLES, plan):
        if plan.rank_of[table.name] == rank:
            number = torch.arange(*table.rows)[:, None] * 1000.0 + torch.arange(*table.columns)
            found[f"tables.{table.name}.weight"] = number
            found[f"tables.{table.name}.momentum1"] = rows[table.name]
    return found


def saved_by(plan: ShardingPlan, folder: Path, rows: dict[str, Tensor]) -> Manifest:
    folder.mkdir()
    saved: dict[str, SavedTensor] = {}
    for rank in range(plan.world_size):
        saved |= write_tensors(folder / f"rank_{rank:05d}.bin", values_of(plan, rank, rows))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    manifest = Manifest.of(SavedState(step=3, plan=plan.to_json()), files, "", saved)
    (folder / "manifest.json").write_bytes(manifest.to_bytes())
    return read_manifest(folder)


@settings(max_examples=60, deadline=None)
@given(plans_of(TABLES, 3, 4), plans_of(TABLES, 2, 4), st.sampled_from([52, 64, 400, 1 << 20]))
def test_any_columns_are_read_from_whatever_columns_were_written(
    tmp_path_factory: pytest.TempPathFactory, wrote: ShardingPlan, wants: ShardingPlan, chunk: int
) -> None:
    assert_read(tmp_path_factory, wrote, wants, chunk)


@settings(max_examples=60, deadline=None)
@given(plans_of(TABLES, 3, 3, rows=True), plans_of(TABLES, 2, 3, rows=True), st.sampled_from([52, 64, 400, 1 << 20]))
def test_any_rows_and_columns_are_read_from_whatever_were_written(
    tmp_path_factory: pytest.TempPathFactory, wrote: ShardingPlan, wants: ShardingPlan, chunk: int
) -> None:
    assert_read(tmp_path_factory, wrote, wants, chunk)


def assert_read(tmp_path_factory: pytest.TempPathFactory, wrote: ShardingPlan, wants: ShardingPlan, chunk: int) -> None:
    """chunk: bytes, which end within rows."""
    folder = tmp_path_factory.mktemp("run") / "step_00000003"
    draw = np.random.default_rng(0)
    rows = {table.name: torch.tensor(draw.random(table.num_embeddings), dtype=torch.float32)
            for table in shard_tables(TABLES, wrote)}  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_file, "CHUNK", chunk)
        manifest = saved_by(wrote, folder, rows)
    assert manifest.shapes() == {
        name: shape
        for table in TABLES
        for name, shape in (
            (f"tables.{table.name}.weight", (table.num_embeddings, table.embedding_dim)),
            (f"tables.{table.name}.momentum1", (table.num_embeddings,)),
        )
    }
    for rank in range(wants.world_size):
        expected = values_of(wants, rank, {table.name: mean_of(rows, table) for table in shard_tables(TABLES, wants)})
        found = {name: torch.full_like(value, -1.0) for name, value in expected.items()}
        read_tensors(folder, manifest, found)
        for name, value in expected.items():
            if name.endswith("weight"):
                assert torch.equal(found[name], value)
            else:
                torch.testing.assert_close(found[name], value)
    again = {name: torch.zeros_like(value) for name, value in values_of(wrote, 0, rows).items()}
    read_tensors(folder, manifest, again)
    assert all(torch.equal(value, again[name]) for name, value in values_of(wrote, 0, rows).items())


def mean_of(rows: dict[str, Tensor], wanted: TableConfig) -> Tensor:
    """By columns, of the parts that have some of it."""
    total = torch.zeros(wanted.num_embeddings, dtype=torch.float64)
    held = Shard.of(wanted.shard.table, wanted.columns, wanted.rows)
    for name, value in rows.items():
        shard = Shard(name)
        if (common := shard & held) is not None and common.columns is not None:
            of_part = value[common.within(Shard.of(shard.table, shard.columns, shard.rows or (0, len(value))))[0]]
            total[common.within(held)[0]] += of_part.double() * (common.columns[1] - common.columns[0])
    return (total / wanted.embedding_dim).float()


@settings(max_examples=60, deadline=None)
@given(plans_of(TABLES, 3, 3, rows=True), plans_of(TABLES, 2, 3, rows=True))
def test_a_modules_state_is_put_together_from_any_parts(wrote: ShardingPlan, wants: ShardingPlan) -> None:
    draw = np.random.default_rng(0)
    parts = shard_tables(TABLES, wrote)
    rows = {part.name: torch.tensor(draw.random(part.num_embeddings), dtype=torch.float32) for part in parts}
    saved = {key: value for rank in range(3) for key, value in values_of(wrote, rank, rows).items()}
    saved = {key.removeprefix("tables."): value for key, value in saved.items()}
    for wanted in shard_tables(TABLES, wants):
        weight = torch.arange(*wanted.rows)[:, None] * 1000.0 + torch.arange(*wanted.columns)
        for name, expected in (("weight", weight), ("momentum1", mean_of(rows, wanted))):
            found = assembled(saved, f"{wanted.name}.{name}", torch.full_like(expected, -1.0))
            torch.testing.assert_close(found, expected)


def test_a_checkpoint_without_splits_is_written_as_before(tmp_path: Path) -> None:
    plan = ShardingPlan({"user": 0, "item": 1}, 2)
    rows = {table.name: torch.zeros(table.num_embeddings) for table in TABLES}
    saved_by(plan, tmp_path / "step_00000003", rows)
    record = json.loads((tmp_path / "step_00000003" / "manifest.json").read_text())
    chunks = [chunk for tensor in record["tensors"].values() for chunk in tensor["chunks"]]
    assert record["schema"] == SCHEMA and chunks and not any("columns" in chunk for chunk in chunks)


def test_columns_that_nobody_wrote_are_named(tmp_path: Path) -> None:
    plan = ShardingPlan({"user": 0, "item[0:8]": 0, "item[8:44]": 1}, 2)
    rows = {table.name: torch.zeros(table.num_embeddings) for table in shard_tables(TABLES, plan)}
    manifest = saved_by(plan, tmp_path / "step_00000003", rows)
    assert json.loads((tmp_path / "step_00000003" / "manifest.json").read_text())["schema"] == SCHEMA
    item = manifest.tensors["tables.item.weight"]
    lost = item.model_copy(update={"chunks": [chunk for chunk in item.chunks if chunk.columns != [0, 8]]})
    manifest = manifest.model_copy(update={"tensors": {**manifest.tensors, "tables.item.weight": lost}})
    with pytest.raises(DamagedCheckpoint, match=r"'tables\.item.weight' lacks 8 of columns 0 to 44"):
        read_tensors(tmp_path / "step_00000003", manifest, {"tables.item.weight": torch.zeros(11, 44)})
