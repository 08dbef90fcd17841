"""Ranks of a custom training loop that are not given the same: told at construction, on every rank, and none waits."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlrm_autoshard.autoshard.autoshard import Autoshard
from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.ranks.groups import by_nccl, device_for, new_group, timeout_of
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig
from tests.ranks import run_ranks

ITEM, USER = TableConfig("item", 60, 8), TableConfig("user", 100, 8)
GIVEN: dict[str, Any] = {"tables": (ITEM, USER), "optimizer": SGD(lr=0.5)}
OTHERWISE: list[tuple[dict[str, Any], str]] = [
    ({"tables": (USER, ITEM)}, "table 0 is 'item' (60 rows of 8, fp32, sum) on rank 0, but 'user' "),
    ({"tables": (ITEM, replace(USER, num_embeddings=90))}, "table 1 is 'user' (100 rows of 8"),
    ({"tables": (ITEM, replace(USER, embedding_dim=4))}, "but 'user' (100 rows of 4, fp32, sum) on rank 1"),
    ({"tables": (ITEM, replace(USER, pooling="mean"))}, "but 'user' (100 rows of 8, fp32, mean) on rank 1"),
    ({"tables": (ITEM,)}, "but not there on rank 1"),
    ({"tables": (replace(ITEM, dtype="fp16"), replace(USER, dtype="fp16"))}, "60 rows of 8, fp16"),
    ({"optimizer": SGD(lr=0.4)}, "the optimizer's lr is 0.5 on rank 0, but 0.4 on rank 1"),
    ({"optimizer": Adagrad(lr=0.5)}, "the optimizer's name is sgd on rank 0, but adagrad on rank 1"),
    ({"plan": ShardingPlan({"item": 1, "user": 0}, 2)}, "the plan's rank of 'item' is 0 on rank 0, but 1 on rank 1"),
    ({"features": {"item": ["bought", "seen"]}}, "features['item'] is not there on rank 0, but bought, seen"),
    ({"seed": 3}, "seed is 0 on rank 0, but 3 on rank 1"),
    ({"exchange_dtype": "bf16"}, "exchange_dtype is fp32 on rank 0, but bf16 on rank 1"),
    ({"exchange_dtype": "fp8"}, "exchange_dtype is 'fp8'; it must be one of"),
    ({"tables": ()}, "there are no tables"),
]  # fmt: skip


def made_otherwise(rank: int, world_size: int) -> list[str]:
    said = []
    for other, _ in OTHERWISE:
        with pytest.raises(UserError) as caught:
            ShardedEmbeddingBags(**(GIVEN | (other if rank == world_size - 1 else {})))
        said.append(str(caught.value))
    bags = ShardedEmbeddingBags(**GIVEN)  # nobody is left waiting
    assert len(bags.runtime.all_gather(rank)) == world_size
    return said


def test_tables_or_settings_that_differ_are_named_on_all_ranks() -> None:
    for said in run_ranks(made_otherwise, 2, timeout=60):
        for text, (_, expected) in zip(said, OTHERWISE, strict=True):
            assert expected in text


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"every_steps": 7}, "autoshard.reshard.every_steps is 5 on rank 0, but 7 on rank 1"),
    ({"sample_every": 3}, "Autoshard's sample_every is not there on rank 0, but 3 on rank 1"),
    ({"total_steps": 100}, "Autoshard's total_steps is not there on rank 0, but 100"),
    ({"pinned": {"item": 1}}, "autoshard.pinned.item is not there on rank 0, but 1 on rank 1"),
    ({"run_dir": "elsewhere"}, "Autoshard's run_dir is "),
    ({"enabled": False}, "autoshard.enabled is True on rank 0, but False on rank 1"),
    ({"pinnd": {}}, "unknown key 'autoshard.pinnd'"),
]


def driven_otherwise(rank: int, world_size: int, run_dir: Path) -> list[str]:
    bags, said = ShardedEmbeddingBags(**GIVEN), []
    for other, _ in ARGUMENTS:
        given: dict[str, Any] = {"run_dir": run_dir, "every_steps": 5}
        with pytest.raises(UserError) as caught:
            Autoshard(bags, **(given | (other if rank == 1 else {})))
        said.append(str(caught.value))
    assert not run_dir.exists()
    return said


def test_arguments_of_autoshard_that_differ_are_named_on_all_ranks(tmp_path: Path) -> None:
    for said in run_ranks(driven_otherwise, 2, tmp_path / "mine", timeout=60):
        for text, (_, expected) in zip(said, ARGUMENTS, strict=True):
            assert expected in text


# The groups that we make ---------------------------------------------------------------------------------------------


def timeouts(rank: int, world_size: int) -> list[timedelta]:
    group = new_group(timeout=timedelta(seconds=77))
    runtime = ShardedEmbeddingBags(**GIVEN, group=group).runtime
    return [timeout_of(one) for one in (runtime.group, runtime.control, runtime.id_group)]


def test_our_groups_wait_as_long_as_the_one_they_are_made_for() -> None:
    assert run_ranks(timeouts, 2) == [[timedelta(seconds=77)] * 3] * 2


def group(**names: str) -> Any:
    """Stands for a process group by the names of its backends, each with a timeout of its own."""
    waits = {device: timedelta(seconds=10 + number) for number, device in enumerate(names)}

    def backend(device: torch.device) -> Any:
        options = SimpleNamespace(_timeout=waits[device.type])
        return SimpleNamespace(name=lambda: names[device.type], options=options)

    return SimpleNamespace(_device_types=[torch.device(name) for name in names], _get_backend=backend)


def test_a_group_with_nccl_is_known_however_it_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    nccl, both, gloo = group(cuda="nccl"), group(cpu="gloo", cuda="nccl"), group(cpu="gloo", cuda="gloo")
    assert [by_nccl(one) for one in (nccl, both, gloo)] == [True, True, False]
    assert timeout_of(both) == timedelta(seconds=10)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    on_gpu, on_cpu = torch.device("cuda", 3), torch.device("cpu")
    assert [device_for(one, None) for one in (nccl, both, gloo)] == [on_gpu, on_gpu, on_cpu]
    assert device_for(gloo, "cuda") == on_gpu, "with its number: else a tensor there looks like one elsewhere"
    assert device_for(both, "cpu") == on_cpu and device_for(nccl, "cuda:1") == torch.device("cuda", 1)
    with pytest.raises(UserError, match="device is 'cpu', but the process group carries only tensors of 'cuda'"):
        device_for(nccl, "cpu")
