"""Sequences from each source: empty and null lists, lists that are too long, and ids that are no rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.loader import Loader
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.sequences import said_of_cuts

TOWER = f"{Path(__file__).parents[1] / 'launch/examples/attention.py'}:Attention"
LISTS: list[list[int] | None] = [[1, 2, 3, 4], [], None, [5], [6, 7, 8]]
CUT = [[3, 4], [], [], [5], [7, 8]]
SOURCE = """
import torch
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.tables import TableConfig
class Clicks:
    num_dense = 0
    def __init__(self, tables, lists):
        self.tables, self.lists = (TableConfig("item", 9, 4), TableConfig("clicks", 9, 4)), [own or [] for own in lists]
    def num_samples(self, split):
        return len(self.lists) if split == "train" else 0
    def read(self, split, epoch, first, last):
        own = self.lists[first:last]
        lengths = torch.tensor([[1] * len(own), [len(ids) for ids in own]], dtype=torch.int32)
        values = torch.tensor([0] * len(own) + [i for ids in own for i in ids])
        return Batch(torch.zeros(len(own), 0), lengths, values, torch.zeros(len(own)), len(own), len(own))
"""


def parquet(folder: Path, lists: list[list[int] | None], **data: Any) -> dict[str, Any]:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {
        "label": pa.array([0] * len(lists)), "item": pa.array([0] * len(lists)),
        "clicks": pa.array(lists, pa.list_(pa.int64())),
    }  # fmt: skip
    pq.write_table(pa.table(columns), folder / "clicks.parquet")
    tables = [{"column": name, "num_embeddings": 9, "hash": False} for name in ("item", "clicks")]
    return {
        "source": "parquet", "train": [str(folder / "clicks.parquet")], "labels": {"label": 1.0}, "tables": tables,
        "shuffle": False, **data,
    }  # fmt: skip


def custom(folder: Path, lists: list[list[int] | None], **data: Any) -> dict[str, Any]:
    (folder / "clicks.py").write_text(SOURCE)
    return {"source": "custom", "factory": f"{folder / 'clicks.py'}:Clicks", "options": {"lists": lists}, **data}


def config_of(data: dict[str, Any]) -> Config:
    return parse_config(
        {
            "data": data,
            "tables": {"sequences": {"clicks": {"max_length": 2}}},
            "model": {"factory": TOWER, "options": {"candidate": "item"}},
        }
    )


def read(config: Config) -> Batch:
    source = open_source(config.data, config.tables)
    return next(iter(Loader(source, "train", 0, 8, 0, 1, on_bad_id=config.data.on_bad_id)))


def clicks_of(batch: Batch) -> list[list[int]]:
    lengths = batch.lengths_TB[1]
    return [ids.tolist() for ids in batch.values_N[int(batch.lengths_TB[0].sum()) :].split(lengths.tolist())]


@pytest.mark.parametrize("source", [parquet, custom])
def test_empty_null_and_too_long_lists_are_sequences(source: Any, tmp_path: Path) -> None:
    config = config_of(source(tmp_path, LISTS))
    assert clicks_of(read(config))[: len(LISTS)] == CUT
    said = said_of_cuts(open_source(config.data, config.tables))
    assert len(said) == 1 and "sequence 'clicks'" in said[0] and "2 of" in said[0], said


@pytest.mark.parametrize("source", [parquet, custom])
@pytest.mark.parametrize("bad", [9, -1])
def test_an_id_that_is_no_row_is_named_or_repaired_wherever_it_stands_in_its_list(
    source: Any, bad: int, tmp_path: Path
) -> None:
    """It is one where the list would be cut, too: what is wrong with the data does not depend on max_length."""
    lists = [[1], [bad, 2, 3], [4]]
    with pytest.raises(DataError, match=rf"table 'clicks' has 9 rows \(ids 0 to 8\), but sample 1 .*has id {bad}"):
        read(config_of(source(tmp_path, lists)))
    repaired = read(config_of(source(tmp_path, [[1], [2, bad], [4]], on_bad_id="clip")))
    assert clicks_of(repaired)[1] == [2, min(max(bad, 0), 8)]


@pytest.mark.parametrize("source", [parquet, custom])
def test_a_batch_without_any_id_of_a_sequence_is_one(source: Any, tmp_path: Path) -> None:
    batch = read(config_of(source(tmp_path, [[], None, []])))
    assert batch.lengths_TB[1].tolist()[:3] == [0, 0, 0] and torch.equal(
        batch.values_N, torch.zeros_like(batch.values_N)
    )
