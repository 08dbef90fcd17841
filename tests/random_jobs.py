"""Random small jobs on sharded tables beside plain PyTorch in float64, and by how much the two differ.

differences = run_ranks(worst_differences, 3, [0, 1, 2], str(tmp_path))      # of jobs 0, 1 and 2
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags
from dlrm_autoshard.distributed.lookup import embeddings
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, RowwiseAdagrad
from dlrm_autoshard.formats.step_names import step_name
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Pooling, TableConfig
from dlrm_autoshard.training.checkpoints.digest import ALGORITHM
from dlrm_autoshard.training.checkpoints.manifest import Manifest, SavedState, read_manifest
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors, write_tensors

LR, EPS, STEPS = 0.1, 1e-8, 3
OPTIMIZERS = {"sgd": SGD(lr=LR), "adagrad": Adagrad(lr=LR, eps=EPS), "rowwise_adagrad": RowwiseAdagrad(lr=LR, eps=EPS)}


@dataclass(frozen=True)
class Job:
    """phases: of each, its number of ranks, and its plans: it moves from one to the next, after STEPS of each. A phase
    goes on from a checkpoint of the one before it. batch: samples over all ranks. table_of: each feature's. over_tcp:
    no shared memory."""

    tables: tuple[TableConfig, ...]
    optimizer: str
    weighted: bool
    most_ids: int
    phases: tuple[tuple[int, tuple[ShardingPlan, ...]], ...]
    batch: int
    table_of: tuple[int, ...]
    over_tcp: bool

    @staticmethod
    def drawn(seed: int, most_ranks: int) -> Job:
        draw = np.random.default_rng(seed)
        poolings: list[Pooling] = [["sum"], ["mean"], ["sum", "mean"]][draw.integers(3)]  # type: ignore[assignment]
        tables = tuple(
            TableConfig(
                f"t{i}", int(draw.integers(2, 120)), 4 * int(draw.integers(1, 6)), pooling=draw.choice(poolings).item()
            )
            for i in range(draw.integers(1, 4))
        )
        optimizer = str(draw.choice(list(OPTIMIZERS)))
        phases = []
        for _ in range(draw.integers(1, 3)):
            ranks = int(draw.integers(1, most_ranks + 1))
            columns = optimizer != "rowwise_adagrad"
            plans = tuple(_plan(draw, tables, ranks, columns) for _ in range(draw.integers(1, 4)))
            phases.append((ranks, plans))
        samples = int(draw.integers(1, 7)) * 6  # divides by 1, 2 and 3 ranks
        table_of = tuple(i for i in range(len(tables)) for _ in range(1 + int(draw.integers(3) == 0)))
        weighted = poolings == ["sum"] and bool(draw.integers(2))
        return Job(
            tables, optimizer, weighted, int(draw.integers(1, 9)), tuple(phases), samples, table_of, seed % 3 == 0
        )

    def ids(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Lengths [F, samples] with empty bags, ids and weights of the global batch."""
        draw = np.random.default_rng([step, len(self.tables), self.batch])
        lengths = draw.integers(0, self.most_ids + 1, (len(self.table_of), self.batch))
        rows = [self.tables[table].num_embeddings for table in self.table_of]
        ids = [draw.integers(0, most, int(n)) for most, n in zip(rows, lengths.sum(1), strict=True)]
        weights = draw.random(int(lengths.sum())) + 0.5
        return torch.tensor(lengths, dtype=torch.int32), torch.tensor(np.concatenate(ids)), torch.tensor(weights)


def _plan(draw: np.random.Generator, tables: tuple[TableConfig, ...], ranks: int, columns: bool) -> ShardingPlan:
    """Each table whole, by columns, by rows, or a grid that need not be regular."""
    rank_of = {}
    for table in tables:
        kind = draw.integers(4)
        bands = _cut(draw, table.num_embeddings, 1) if kind >= 2 else [(0, table.num_embeddings)]
        for rows in bands:
            cuts = _cut(draw, table.embedding_dim, 4) if kind in (1, 3) and columns else [(0, table.embedding_dim)]
            for part in cuts:
                rank_of[table.row_range(*rows).part(*part).name] = int(draw.integers(ranks))
    return ShardingPlan(rank_of, ranks)


def _cut(draw: np.random.Generator, size: int, unit: int) -> list[tuple[int, int]]:
    cuts = {int(draw.integers(0, size // unit)) * unit for _ in range(draw.integers(1, 4))} - {0}
    return list(itertools.pairwise([0, *sorted(cuts), size]))


def loss_of(pooled_BD: Tensor) -> Tensor:
    """One whose gradients are positive, so that no sum of them is far smaller than its terms."""
    return (pooled_BD**2 / 4 + pooled_BD * 2).sum() / 50


class Plain:
    """The job's tables in float64: dense gradients, optimizers written down."""

    def __init__(self, job: Job, weights: dict[str, Tensor]) -> None:
        self.job = job
        self.weights = [weights[table.name].double() for table in job.tables]
        self.sums = [torch.zeros_like(w if job.optimizer == "adagrad" else w[:, 0]) for w in self.weights]

    def step(self, step: int) -> Tensor:
        lengths, ids, id_weights = self.job.ids(step)
        pooled, leaves = [], [weight.requires_grad_() for weight in self.weights]
        counts = lengths.sum(1).tolist()
        for number, own, ids_N, of_ids in zip(
            self.job.table_of, lengths, ids.split(counts), id_weights.split(counts), strict=True
        ):
            table = self.job.tables[number]
            rows = leaves[number][ids_N] * (of_ids[:, None] if self.job.weighted else 1.0)
            sample = torch.repeat_interleave(torch.arange(len(own)), own)
            summed = torch.zeros(len(own), table.embedding_dim, dtype=torch.float64).index_add(0, sample, rows)
            pooled.append(summed / own.clamp(min=1)[:, None] if table.pooling == "mean" else summed)
        pooled_BD = torch.cat(pooled, 1)
        gradients = torch.autograd.grad(loss_of(pooled_BD), leaves, allow_unused=True)
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            assert gradient is not None
            self.weights[i] = weight.detach() - LR * self._scaled(i, gradient)
        return pooled_BD.detach()

    def _scaled(self, table: int, gradient: Tensor) -> Tensor:
        if self.job.optimizer == "sgd":
            return gradient
        squares = gradient**2
        self.sums[table] += squares if self.job.optimizer == "adagrad" else squares.mean(1)
        root = self.sums[table].sqrt()
        return gradient / ((root if root.dim() == 2 else root[:, None]) + EPS)


def worst_differences(rank: int, world_size: int, seeds: list[int], folder: str) -> list[float]:
    """Of each job, the largest difference of a pooled vector, a weight or an optimizer's state from plain PyTorch's, as
    a part of the largest element of its tensor; on this rank."""
    groups: dict[int, Any] = {ranks: dist.new_group(list(range(ranks))) for ranks in range(1, world_size + 1)}
    found = []
    for seed in seeds:
        job = Job.drawn(seed, world_size)
        with pytest.MonkeyPatch.context() as patch:
            if job.over_tcp:
                patch.setattr(embeddings, "connect", lambda group: None)
            found.append(_difference(rank, job, groups, Path(folder) / f"job_{seed}"))
    return found


def _difference(rank: int, job: Job, groups: dict[int, dist.ProcessGroup], folder: Path) -> float:
    worst, step, plain = 0.0, 0, None
    saved: Path | None = None
    for ranks, plans in job.phases:
        if rank < ranks:
            bags = ShardedEmbeddingBags(
                job.tables, optimizer=OPTIMIZERS[job.optimizer], plan=plans[0], group=groups[ranks], average=False,
                features=features_of(job),
            )  # fmt: skip
            if saved is not None:
                read_tensors(saved, read_manifest(saved), _named(bags))
            if plain is None:
                plain = Plain(job, initial_of(job))
            for i, plan in enumerate(plans):
                if i:
                    bags.move_to(plan, checksums=True)
                for at in range(step + i * STEPS, step + (i + 1) * STEPS):
                    worst = max(worst, _step(bags, job, plain, at, rank, ranks))
            worst = max(worst, _of_state(bags, job, plain))
        else:
            plain = plain or Plain(job, initial_of(job))
            for at in range(step, step + len(plans) * STEPS):
                plain.step(at)
        step += len(plans) * STEPS
        saved = folder / step_name(step)
        _save(bags if rank < ranks else None, saved, rank, plans[-1], step)
    return worst


def features_of(job: Job) -> dict[str, list[str]]:
    """Of tables that several features look up, their names."""
    counts = [job.table_of.count(number) for number in range(len(job.tables))]
    return {t.name: [f"{t.name}_{i}" for i in range(n)] for t, n in zip(job.tables, counts, strict=True) if n > 1}


def initial_of(job: Job) -> dict[str, Tensor]:
    found = {}
    for table in job.tables:
        found[table.name] = torch.empty(table.num_embeddings, table.embedding_dim)
        initialise(found[table.name], table.name, seed=0)
    return found


def _step(bags: ShardedEmbeddingBags, job: Job, plain: Plain, step: int, rank: int, ranks: int) -> float:
    lengths, ids, weights = job.ids(step)
    own = slice(rank * job.batch // ranks, (rank + 1) * job.batch // ranks)
    mask = torch.zeros_like(lengths, dtype=torch.bool)
    mask[:, own] = True
    chosen = mask.flatten().repeat_interleave(lengths.flatten())
    pooled = bags(lengths[:, own].contiguous(), ids[chosen], weights[chosen].float() if job.weighted else None)
    loss_of(pooled).backward()
    return _relative(pooled, plain.step(step)[own])


def _relative(found: Tensor, expected: Tensor) -> float:
    return float((found.detach() - expected).abs().max() / max(float(expected.abs().max()), 1e-3))


def _named(bags: ShardedEmbeddingBags) -> dict[str, Tensor]:
    return {f"tables.{name}": value for name, value in bags.own_tensors().items()}


def _of_state(bags: ShardedEmbeddingBags, job: Job, plain: Plain) -> float:
    worst = 0.0
    for shard in bags.sharded.local_shards:
        number = [table.name for table in job.tables].index(shard.shard.table)
        rows, columns = slice(*shard.rows), slice(*shard.columns)
        tensors, sums = bags.sharded.storage.tensors(shard.name), plain.sums[number][rows]
        worst = max(worst, _relative(tensors["weight"], plain.weights[number].detach()[rows, columns]))
        if "momentum1" in tensors:
            worst = max(worst, _relative(tensors["momentum1"], sums[:, columns] if sums.dim() == 2 else sums))
    return worst


def _save(bags: ShardedEmbeddingBags | None, folder: Path, rank: int, plan: ShardingPlan, step: int) -> None:
    """A checkpoint's files, by all ranks; those that have no part in the phase wait for them."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {} if bags is None else write_tensors(folder / f"rank_{rank:05d}.bin", _named(bags))
    everyone: list[dict] = [{}] * dist.get_world_size()  # type: ignore[type-arg]
    dist.all_gather_object(everyone, saved)
    if rank == 0:
        files = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
        state, merged = SavedState(step=step, plan=plan.to_json()), {k: v for own in everyone for k, v in own.items()}
        (folder / "manifest.json").write_bytes(Manifest.of(state, ALGORITHM, files, "", merged).to_bytes())
    dist.barrier()
