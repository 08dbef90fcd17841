"""Padding is no sample: a dense part with BatchNorm learns of the last, uneven batch what plain PyTorch does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dlrm_autoshard import plug_in
from dlrm_autoshard.config import Config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.training.start_checks import check_batch_norm
from tests.ranks import run_ranks
from tests.trainers import TABLES, config, losses, make_runtime, tensors, trainer

TOWER = """
import torch
from dlrm_autoshard import DenseArch


class Tower(DenseArch):
    def __init__(self, num_dense, tables):
        super().__init__()
        self.first = torch.nn.Linear(num_dense, 6)
        self.norm = torch.nn.BatchNorm1d(6)
        width = 6 + sum(table.embedding_dim for table in tables)
        self.both = torch.nn.BatchNorm1d(width)
        self.last = torch.nn.Linear(width, 1)

    def bottom(self, dense):
        return self.norm(self.first(dense))

    def top(self, bottom, pooled):
        return self.last(self.both(torch.cat([bottom, pooled], 1))).squeeze(1)
"""
BATCH = 8


def train(rank: int, world_size: int, folder: Path, settings: Config) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with trainer(settings, make_runtime(rank, world_size), folder / "run") as made:
        before = tensors(made)
        made.run()
        return before, tensors(made)


def reference(settings: Config, world_size: int, weights: dict[str, Tensor]) -> tuple[list[float], nn.Module]:
    """One process; each rank's samples of a batch are normalised by themselves."""
    source = open_source(settings.data, settings.tables)
    order = sorted(range(len(source.tables)), key=lambda table: source.tables[table].embedding_dim)
    make = plug_in.load(str(settings.model.factory), "model.factory")
    model = make(source.num_dense, [source.tables[table] for table in order])
    state = {name.split(".", 1)[1]: value for name, value in weights.items() if not name.startswith("tables.")}
    model.load_state_dict(state)
    bags = [
        nn.EmbeddingBag.from_pretrained(weights[f"tables.{t.name}.weight"].clone(), freeze=False, mode="sum")
        for t in source.tables
    ]
    optimizer = torch.optim.SGD([*model.parameters(), *(bag.weight for bag in bags)], lr=0.2)
    samples, found = source.num_samples("train"), []
    for start in range(0, samples, BATCH * world_size):
        size = min(BATCH * world_size, samples - start)
        share, loss = -(-size // world_size), torch.zeros(())
        kept = None
        for rank in range(world_size):
            first, last = (start + min(size, number * share) for number in (rank, rank + 1))
            if first == last:
                continue
            batch = source.read("train", 0, first, last)
            ids = batch.values_N.long().split(batch.lengths_TB.sum(1).tolist())
            pooled = [
                bag(own, lengths.cumsum(0) - lengths)
                for bag, own, lengths in zip(bags, ids, batch.lengths_TB.long(), strict=True)
            ]
            logits = model.top(model.bottom(batch.dense_BF), torch.cat([pooled[table] for table in order], 1))
            loss = loss + nn.functional.binary_cross_entropy_with_logits(logits, batch.labels_B, reduction="sum") / size
            if kept is None:  # the running statistics are rank 0's
                kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, buffer in model.named_buffers():
            buffer.copy_((kept or {})[name])
        found.append(loss.item())
    return found, model


@pytest.mark.parametrize("world_size, left", [(2, 5), (3, 8), (4, 6)])
def test_the_last_batch_is_normalised_by_its_real_samples(world_size: int, left: int, tmp_path: Path) -> None:
    """6 samples on 4 ranks: the last has padding alone."""
    (tmp_path / "tower.py").write_text(TOWER)
    settings = config(
        tmp_path,
        data={"train_samples": 3 * BATCH * world_size + left},
        model={"factory": f"{tmp_path / 'tower.py'}:Tower"},
    )
    by_rank = run_ranks(train, world_size, tmp_path, settings, timeout=90)
    before = {name: value for start, _ in by_rank for name, value in start.items()} | by_rank[0][0]
    expected, model = reference(settings, world_size, before)
    assert [loss for _, loss in losses(tmp_path / "run")] == pytest.approx(expected, abs=1e-5)
    after = by_rank[0][1]
    for name, value in model.state_dict().items():
        kind = "dense" if f"dense.{name}" in after else "dense_buffers"
        torch.testing.assert_close(after[f"{kind}.{name}"], value, rtol=0, atol=1e-5, msg=name)
    assert len(TABLES) == 4 and len(expected) == 4


def test_a_batch_that_leaves_a_rank_one_sample_is_said_before_training() -> None:
    """BatchNorm of one sample is an error of torch's, at the end of the first epoch."""
    norm = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    for samples, first, ranks, said in ((99, 0, 2, "rank 1"), (97, 0, 1, "rank 0"), (100, 3, 1, "rank 0")):
        with pytest.raises(UserError, match=said):
            check_batch_norm(norm, samples, first, BATCH * ranks, ranks)
        check_batch_norm(nn.Linear(2, 2), samples, first, BATCH * ranks, ranks)
    check_batch_norm(norm, 100, 0, BATCH, 1)
    check_batch_norm(norm, 96, 32, BATCH * 2, 2)
