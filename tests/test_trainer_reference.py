"""The trainer on ranks against one process of plain PyTorch, written here from the papers and sharing no step code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.open import open_source
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, plan_file, tensors, trainer

STEPS = 22


def train(rank: int, world_size: int, folder: Path, runs: dict[str, Config]) -> dict[str, dict[str, Tensor]]:
    """Each run's tensors before ('start/...') and after its steps; the losses are in its run directory."""
    runtime = make_runtime(rank, world_size)
    results = {}
    for name, settings in runs.items():
        with trainer(settings, runtime, folder / name) as made:
            before = {f"start/{key}": value for key, value in tensors(made).items()}
            made.run()
            results[name] = before | tensors(made)
    return results


def reference(settings: Config, global_batch: int, weights: dict[str, Tensor]) -> tuple[list[float], dict[str, Tensor]]:
    """SGD on the mean loss of each global batch, from the weights `start/...`; nn.EmbeddingBag for the tables."""
    source = open_source(settings.data, settings.tables)
    weights = {
        key.removeprefix("start/"): nn.Parameter(value.clone())
        for key, value in weights.items()
        if key.startswith("start/")
    }
    samples, result = source.num_samples("train"), []
    starts = [(e, s) for e in range(settings.train.epochs) for s in range(0, samples, global_batch)]
    for epoch, start in starts[: settings.train.max_steps]:
        batch = source.read("train", epoch, start, min(start + global_batch, samples))
        per_table = batch.values_N.long().split(batch.lengths_TB.sum(1).tolist())
        pooled = []
        for table, ids, lengths in zip(source.tables, per_table, batch.lengths_TB.long(), strict=True):
            offsets = lengths.cumsum(0) - lengths
            weight = weights[f"tables.{table.name}.weight"]
            pooled.append(nn.functional.embedding_bag(ids, weight, offsets, mode=table.pooling))
        logits = dlrm(settings, weights, batch.dense_BF, dict(zip(source.tables, pooled, strict=True)))
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels_B)
        for weight in weights.values():
            weight.grad = None
        loss.backward()
        with torch.no_grad():
            for weight in weights.values():
                if weight.grad is not None:
                    weight -= 0.2 * weight.grad
        result.append(loss.item())
    return result, {key: value.detach() for key, value in weights.items()}


def dlrm(settings: Config, weights: dict[str, Tensor], dense: Tensor, pooled: dict[Any, Tensor]) -> Tensor:
    def mlp(x: Tensor, name: str, last_relu: bool) -> Tensor:
        layers = sum(key.startswith(f"dense.{name}.") for key in weights) // 2
        for layer in range(layers):
            x = x @ weights[f"dense.{name}.{2 * layer}.weight"].T + weights[f"dense.{name}.{2 * layer}.bias"]
            x = x.relu() if last_relu or layer < layers - 1 else x
        return x

    bottom = mlp(dense, "bottom_mlp", True)
    vectors = [bottom]
    seen: dict[int, int] = {}  # the tables of one dim share a stack of projections, in the tables' order
    for table in sorted(pooled, key=lambda table: table.embedding_dim):
        own = table.embedding_dim
        vector = pooled[table]
        if settings.model.interaction == "dot" and own != bottom.shape[1]:
            vector = vector @ weights[f"dense.projection.weights.{own}"][seen.setdefault(own, 0)]
            seen[own] += 1
        vectors.append(vector)
    x = torch.cat(vectors, 1)
    if settings.model.interaction == "dot":
        pairs = [(vectors[i] * vectors[j]).sum(1) for i in range(len(vectors)) for j in range(i)]
        x = torch.cat([bottom, torch.stack(pairs, 1)], 1)
    elif settings.model.interaction == "dcn":
        start = x
        for layer in range(settings.model.dcn_num_layers):
            down, up = (weights[f"dense.interaction.{part}.{layer}.weight"] for part in ("down", "up"))
            x = start * (x @ down.T @ up.T + weights[f"dense.interaction.up.{layer}.bias"]) + x
    return mlp(x, "over_mlp", False).squeeze(1)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_equals_one_process_of_plain_pytorch(world_size: int, tmp_path: Path) -> None:
    """Losses and weights, over more than one epoch whose last batch is uneven, whatever lives where."""
    ranks = {1: "0000", 2: "0110", 3: "2022", 4: "3133"}[world_size]  # 3 and 4: with ranks that own no table
    wanted: list[tuple[str, str, dict[str, str], str]] = [("dot", "sum", {}, ranks)]
    if world_size == 2:
        some = {"shop": "mean", "tag": "mean"}
        wanted += [("cat", "mean", {}, "1010"), ("dcn", "sum", {}, "1111"), ("dot", "sum", some, "1010")]
    if world_size == 3:
        wanted += [("dot", "mean", {"item": "sum"}, ranks)]
    runs = {}
    for number, (interaction, pooling, poolings, placement) in enumerate(wanted):
        runs[f"{number} {interaction}"] = config(
            model={
                "interaction": interaction,
                "dcn_low_rank_dim": 6,
                "dense_arch_layer_sizes": [12, 6 if interaction == "cat" else 8],  # 6: tables' dims are multiples of 4
            },
            tables={"pooling": pooling, "poolings": poolings, "optimizer": {"name": "sgd", "lr": 0.2}},
            data={"train_samples": 8 * world_size * 12 - 3},
            train={"epochs": 3, "max_steps": STEPS},
            autoshard={"placement": plan_file(tmp_path, placement, world_size)},
        )
    results = run_ranks(train, world_size, tmp_path, runs, timeout=90)
    for name, settings in runs.items():
        merged = {key: value for rank in results for key, value in rank[name].items()}
        expected_losses, expected = reference(settings, 8 * world_size, merged)
        seen = losses(tmp_path / name)
        assert [step for step, _ in seen] == list(range(1, STEPS + 1))
        assert [loss for _, loss in seen] == pytest.approx(expected_losses, abs=1e-5)
        moved = [float((value - merged[f"start/{key}"]).abs().max()) for key, value in expected.items()]
        assert min(moved) > 0 and max(moved) > 1e-2  # it did train
        assert len(expected) == sum(not key.startswith("start/") for key in merged)
        for key, value in expected.items():
            torch.testing.assert_close(merged[key], value, rtol=0, atol=1e-5, msg=key)
            for rank in results:  # the dense part is the same on all ranks, to the bit
                assert key.startswith("tables.") or torch.equal(rank[name][key], merged[key])


SAME: dict[str, dict[str, Any]] = {
    "placed otherwise": {"ranks": "1011"},
    "without overlap": {"ranks": "0110", "train": {"overlap": False}},
    "not profiled": {"ranks": "0110", "profile": {"enabled": False}},
    "profiled at each step, all on one rank": {"ranks": "1111", "profile": {"every_steps": 1, "warmup_steps": 0}},
}


def test_nothing_but_the_number_of_ranks_changes_a_bit(tmp_path: Path) -> None:
    """Placement, overlap and profiling leave every loss and every weight as it is, with each table optimizer."""
    runs: dict[str, Config] = {}
    for optimizer in ("rowwise_adagrad", "sgd"):
        for name, change in {"as it is": {"ranks": "0110"}, **SAME}.items():
            sections: dict[str, Any] = {
                "tables": {"optimizer": {"name": optimizer, "lr": 0.1}},
                "dense_optimizer": {"name": "adam", "lr": 0.01},
                "autoshard": {"placement": plan_file(tmp_path, change["ranks"], 2)},
                "data": {"train_samples": 197},
                **{key: value for key, value in change.items() if key != "ranks"},
            }
            runs[f"{optimizer}, {name}"] = config(**sections)
    results = run_ranks(train, 2, tmp_path, runs, timeout=90)
    for optimizer in ("rowwise_adagrad", "sgd"):
        first = f"{optimizer}, as it is"
        merged = {key: value for rank in results for key, value in rank[first].items()}
        assert len(losses(tmp_path / first)) == 13
        for name in SAME:
            other = f"{optimizer}, {name}"
            assert losses(tmp_path / other) == losses(tmp_path / first), name
            again = {key: value for rank in results for key, value in rank[other].items()}
            assert again.keys() == merged.keys()
            for key, value in merged.items():
                assert torch.equal(again[key], value), f"{name}: {key}"
