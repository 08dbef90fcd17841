"""Replicas of the dense part are one model: at the start, after every step, in evaluation and after a restart."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from dlrm_autoshard.config import Config
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.errors import DataError
from dlrm_autoshard.data.value_check import check_labels
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.ranks.agreement import DisagreementError
from dlrm_autoshard.model.dlrm import DenseArch
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.agreement import agree, agree_on_dense, check_shared
from dlrm_autoshard.training.state import TrainError
from tests.ranks import run_ranks
from tests.trainers import config, losses, make_runtime, records, tensors, trainer


class Normed(DenseArch):
    """Dropout and BatchNorm; a bottom without parameters; weights that differ from rank to rank as they are made."""

    def __init__(self, num_dense: int, tables: Sequence[TableConfig], dropout: float = 0.3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(num_dense + sum(table.embedding_dim for table in tables))
        self.dropout = nn.Dropout(dropout)
        self.register_buffer("mask", torch.arange(6.0).view(2, 3).T > 2)  # neither numbers nor row by row
        self.register_buffer("nothing", torch.zeros(0))
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(2, 3))
        self.register_buffer("minus_infinity", torch.full((2, 2), -torch.inf).triu(1))
        self.last = nn.Linear(self.norm.num_features, 1)
        with torch.no_grad():
            self.last.bias.add_(random.random())  # not from torch's generator: another on every rank

    def bottom(self, dense_BF: Tensor) -> Tensor:
        return dense_BF

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        if self.training:
            self.seen = 0.9 * self.seen + bottom_BD.detach().mean()  # another tensor in its place, unlike BatchNorm
        logits: Tensor = self.last(self.dropout(self.norm(torch.cat([bottom_BD, pooled_BD], 1)))).squeeze(1)
        if not self.training:
            logits = logits + self.seen[0, 0]
        return logits


class Drawing:
    """A callback that draws: at every start anew."""

    def __init__(self, run_dir: Path, config: Config) -> None:
        random.random(), np.random.random(), torch.rand(1)

    def scalars(self, step: int, values: Mapping[str, float]) -> None: ...

    def finish(self, result: Mapping[str, Any]) -> None: ...


def job(steps: int | None = None, **sections: Any) -> Config:
    made = config(
        data={"test_samples": 60},
        model={"factory": f"{Path(__file__)}:Normed"},
        train={"epochs": 2, "max_steps": steps},
        checkpoint={"enabled": True, "every_steps": 5},
        **sections,
    )
    return made.model_copy(update={"callbacks": [f"{Path(__file__)}:Drawing"]})


def interrupt(rank: int, world_size: int, folder: Path) -> list[list[str]]:
    runtime = make_runtime(rank, world_size)
    with trainer(job(), runtime, folder / "whole") as made:
        replicas = runtime.all_gather({name: value for name, value in tensors(made).items() if "tables" not in name})
        assert all(torch.equal(replicas[0][name], value) for name, value in replicas[1].items())
        assert any(name.startswith("dense_buffers.norm.running_var") for name in replicas[0])
        made.run()
        assert made.job.dense.module.training
        drawn = [[str(random.random()), str(np.random.random()), str(torch.rand(1))]]
    with trainer(job(12), runtime, folder / "pieces") as made:
        made.run()
    with trainer(job(), runtime, folder / "pieces") as made:
        made.run()
        drawn.append([str(random.random()), str(np.random.random()), str(torch.rand(1))])
    return drawn


def test_interruption_changes_no_bit_of_dropout_batchnorm_or_random_numbers(tmp_path: Path) -> None:
    results = run_ranks(interrupt, 2, tmp_path, timeout=90)
    assert all(whole == pieces for whole, pieces in results)
    assert results[0][0] != results[1][0]  # each rank has its own stream
    assert losses(tmp_path / "pieces") == losses(tmp_path / "whole")
    evaluations = [
        [(line["step"], line["logloss"]) for line in records(tmp_path / run) if line["split"] == "test"]
        for run in ("pieces", "whole")
    ]
    assert evaluations[0][0][0] == 12, "of where the first piece ended"
    assert evaluations[0][1:] == evaluations[1] and len(evaluations[1]) == 2


def evaluate_twice(rank: int, world_size: int, folder: Path) -> bool:
    with trainer(job(6), make_runtime(rank, world_size), folder) as made:
        made.run()
        before = tensors(made)
        metrics, made.evaluations.metrics = dict(made.evaluations.metrics), {}
        made.run()  # no step is left, so the test split alone
        same = all(torch.equal(value, before[name]) for name, value in tensors(made).items())
        return same and metrics == dict(made.evaluations.metrics)


def test_evaluation_draws_nothing_and_changes_nothing(tmp_path: Path) -> None:
    assert run_ranks(evaluate_twice, 2, tmp_path) == [True, True]


def drift(rank: int, world_size: int, folder: Path) -> str:
    with trainer(config(train={"epochs": 2}), make_runtime(rank, world_size), folder) as made:
        begin = made.job.bags.ahead

        def begin_apart(*given: Any) -> Any:
            if rank == 1 and made.job.position.epoch == 1:
                made.job.dense.flat.data[3] *= 1 + 2**-23  # one bit of one weight
            return begin(*given)

        made.job.bags.ahead = begin_apart  # type: ignore[method-assign, assignment]
        with pytest.raises(TrainError) as caught:
            made.run()
        return str(caught.value)


def test_replicas_that_drift_end_the_job_with_the_step(tmp_path: Path) -> None:
    for message in run_ranks(drift, 2, tmp_path):
        assert "dense weights of rank(s) 1 differ from rank 0's after step 16" in message


def drift_unseen(rank: int, world_size: int, folder: Path) -> tuple[str, list[str]]:
    """As above, in a job that logs less often than it writes checkpoints."""
    settings = config(train={"log_every_steps": 50}, checkpoint={"enabled": True, "every_steps": 4})
    with trainer(settings, make_runtime(rank, world_size), folder) as made:
        run = made.job.step.run

        def run_apart(*given: Any, **options: Any) -> None:
            if rank == 1 and made.job.position.step == 6:
                made.job.dense.flat.data[3] *= 1 + 2**-23
            run(*given, **options)

        made.job.step.run = run_apart  # type: ignore[method-assign]
        with pytest.raises(TrainError) as caught:
            made.run()
        return str(caught.value), sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_a_checkpoint_that_a_drift_is_named_beside_is_of_before_it(tmp_path: Path) -> None:
    for message, checkpoints in run_ranks(drift_unseen, 2, tmp_path):
        assert "differ from rank 0's after step 7" in message and "step_00000004" in message
        assert checkpoints == ["step_00000000", "step_00000004"]


def make_apart(rank: int, world_size: int, folder: Path) -> list[str]:
    """Models of other layers, of none at all, and of the same ones in another order."""
    runtime, messages = make_runtime(rank, world_size), []
    orders: list[list[list[str]]] = [[["a", "b"], ["a"]], [["a"], ["a", "b"]], [["a", "b"], ["b", "a"]]]
    for order in orders:
        module = torch.nn.ModuleDict({name: torch.nn.Linear(3, 3) for name in order[rank]})
        dense = DataParallelDense(module, config().dense_optimizer, runtime.group, runtime.device)
        with pytest.raises(DisagreementError) as caught:
            agree_on_dense(dense, runtime)
        messages.append(str(caught.value))
    return messages


def test_models_that_differ_in_layers_or_in_their_order_do_not_start(tmp_path: Path) -> None:
    for lacks, has_more, other_order in run_ranks(make_apart, 2, tmp_path):
        assert "the model of rank 1 has dense.b.weight as None" in lacks
        assert "the model of rank 1 has dense.b.weight as torch.float32 [3, 3], rank 0's as None" in has_more
        assert "the model of rank 1 has dense.b.weight where rank 0's has dense.a.weight" in other_order


def start_apart(rank: int, world_size: int, folder: Path) -> list[str]:
    runtime = make_runtime(rank, world_size)
    messages = []
    with pytest.raises(DisagreementError) as caught:
        agree(config(dense_optimizer={"lr": 0.1 + rank}), runtime)
    messages.append(str(caught.value))
    agree(config(), runtime)
    own = folder / f"host{rank}"
    own.mkdir()
    with pytest.raises(DisagreementError) as caught:
        check_shared(own, runtime)
    messages.append(str(caught.value))
    check_shared(folder, runtime)
    return messages


def test_ranks_of_other_configs_or_without_a_shared_run_directory_do_not_start(tmp_path: Path) -> None:
    for other_config, not_shared in run_ranks(start_apart, 2, tmp_path):
        assert "rank 1 on '" in other_config and "dense_optimizer.lr 1.1, rank 0 has 0.1" in other_config
        assert "rank 1 on host '" in not_shared and "does not see" in not_shared and "run.dir" in not_shared
    assert not [path for path in tmp_path.iterdir() if path.is_file()]


@pytest.mark.parametrize("label", [2.0, -1.0, float("nan"), 0.5])
def test_labels_other_than_0_and_1_are_refused(label: float) -> None:
    labels_B = torch.tensor([0.0, 1.0, label, 1.0])
    batch = Batch(torch.zeros(4, 0), torch.zeros(0, 4, dtype=torch.int32), torch.zeros(0), labels_B, 4, 4)
    with pytest.raises(DataError, match=rf"sample 2 of x has label {label:g}: row 2 of y\."):
        check_labels(batch, lambda sample: f"sample {sample} of x", lambda sample: f"row {sample} of y")
