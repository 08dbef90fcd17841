"""Random small jobs beside plain PyTorch in float64, and by how much the two differ: tables whole, by rows, columns and
on every rank, with optimizers of their own, pooled and in order, moved, and loaded on other ranks.

differences = run_ranks(worst_differences, 3, [0, 1, 2], str(tmp_path))      # of jobs 0, 1 and 2
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dlrm_autoshard.distributed.tables.optimizers import SGD, Adagrad, Frozen, RowwiseAdagrad
from dlrm_autoshard.formats.step_names import step_name
from dlrm_autoshard.optimizers import TableOptimizerConfig
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Pooling, TableConfig
from dlrm_autoshard.training.checkpoints.manifest import Manifest, SavedState, read_manifest
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors, write_tensors

LR, EPS, STEPS = 0.1, 1e-8, 3
OPTIMIZERS = {"sgd": SGD(lr=LR), "adagrad": Adagrad(lr=LR, eps=EPS), "rowwise_adagrad": RowwiseAdagrad(lr=LR, eps=EPS)}
OF_ONE_TABLE = (SGD(lr=LR / 2), Adagrad(lr=LR / 3, eps=EPS), RowwiseAdagrad(lr=LR / 4, eps=EPS), Frozen())


@dataclass(frozen=True)
class Job:
    """phases: of each, its number of ranks, its plans, from one to the next of which it moves after STEPS, and the
    tables that every rank has a copy of. A phase goes on from a checkpoint of the one before it. batch: samples over
    all ranks. table_of: each feature's. sequences: numbers of features that are not pooled. over_tcp: no shared memory.
    dedup: tables whose pooled features send each id once.
    """

    tables: tuple[TableConfig, ...]
    optimizer: str
    weighted: bool
    most_ids: int
    phases: tuple[tuple[int, tuple[ShardingPlan, ...], tuple[str, ...]], ...]
    batch: int
    table_of: tuple[int, ...]
    sequences: tuple[int, ...]
    over_tcp: bool
    dedup: tuple[str, ...] = ()

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
        weighted = poolings == ["sum"] and bool(draw.integers(2))
        kinds = np.random.default_rng([seed, 1])
        if kinds.integers(2):
            own = [OF_ONE_TABLE[i] if i < len(OF_ONE_TABLE) else None for i in kinds.integers(0, 8, len(tables))]
            tables = tuple(replace(table, optimizer=one) for table, one in zip(tables, own, strict=True))
        table_of = tuple(i for i in range(len(tables)) for _ in range(1 + int(draw.integers(3) == 0)))
        sums = [number for number, table in enumerate(table_of) if tables[table].pooling == "sum" and not weighted]
        sequences = tuple(number for number in sums if kinds.integers(5) == 0)
        in_order = {tables[table_of[number]].name for number in sequences}
        phases = []
        for _ in range(draw.integers(1, 3)):
            ranks = int(draw.integers(1, most_ranks + 1))
            may_copy = [t.name for t in tables if t.optimizer is None and t.name not in in_order and ranks > 1]
            copied = tuple(name for name in may_copy if kinds.integers(3) == 0)[: len(tables) - 1]
            placed = [table for table in tables if table.name not in copied]
            plans = tuple(_plan(draw, placed, ranks, optimizer, in_order) for _ in range(draw.integers(1, 4)))
            phases.append((ranks, plans, copied))
        once = np.random.default_rng([seed, 2])
        dedup = tuple(table.name for table in tables if once.integers(2))
        samples = int(draw.integers(1, 7)) * 6  # divides by 1, 2 and 3 ranks
        most_ids = int(draw.integers(1, 9))
        return Job(
            tables, optimizer, weighted, 1 if dedup and once.integers(2) else most_ids, tuple(phases), samples,
            table_of, sequences, seed % 3 == 0, dedup,
        )  # fmt: skip

    def optimizer_of(self, table: int) -> TableOptimizerConfig:
        """Returns the table's own optimizer, or the job's."""
        return self.tables[table].optimizer or OPTIMIZERS[self.optimizer]

    def ids(self, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns lengths [F, samples], with empty bags, ids and weights of the global batch."""
        draw = np.random.default_rng([step, len(self.tables), self.batch])
        lengths = draw.integers(0, self.most_ids + 1, (len(self.table_of), self.batch))
        rows = [self.tables[table].num_embeddings for table in self.table_of]
        ids = [draw.integers(0, most, int(n)) for most, n in zip(rows, lengths.sum(1), strict=True)]
        weights = draw.random(int(lengths.sum())) + 0.5
        return torch.tensor(lengths, dtype=torch.int32), torch.tensor(np.concatenate(ids)), torch.tensor(weights)


def _plan(
    draw: np.random.Generator, tables: Sequence[TableConfig], ranks: int, optimizer: str, in_order: set[str]
) -> ShardingPlan:
    """Draws a plan: each table whole, by columns, by rows, or in a grid that may be irregular."""
    rank_of = {}
    for table in tables:
        kind, own = draw.integers(4), optimizer if table.optimizer is None else table.optimizer.name
        columns = "rowwise_adagrad" not in (own, optimizer)
        by_rows = kind >= 2 and table.name not in in_order  # a sequence needs all rows on one rank
        bands = _cut(draw, table.num_embeddings, 1) if by_rows else [(0, table.num_embeddings)]
        for rows in bands:
            cuts = _cut(draw, table.embedding_dim, 4) if kind in (1, 3) and columns else [(0, table.embedding_dim)]
            for part in cuts:
                rank_of[table.row_range(*rows).part(*part).name] = int(draw.integers(ranks))
    return ShardingPlan(rank_of, ranks)


def _cut(draw: np.random.Generator, size: int, unit: int) -> list[tuple[int, int]]:
    cuts = {int(draw.integers(0, size // unit)) * unit for _ in range(draw.integers(1, 4))} - {0}
    return list(itertools.pairwise([0, *sorted(cuts), size]))


def loss_of(vectors: Tensor) -> Tensor:
    """Returns a loss with positive gradients, so that no sum of them is far smaller than its terms."""
    return (vectors**2 / 4 + vectors * 2).sum() / 50


class Plain:
    """The job's tables in float64, with dense gradients and optimizers written out."""

    def __init__(self, job: Job, weights: dict[str, Tensor]) -> None:
        self.job = job
        self.weights = [weights[table.name].double() for table in job.tables]
        self.sums = [
            torch.zeros_like(weight if job.optimizer_of(i).name == "adagrad" else weight[:, 0])
            for i, weight in enumerate(self.weights)
        ]

    def step(self, step: int) -> tuple[Tensor, list[Tensor]]:
        """Returns the pooled vectors of all samples, and those of each sequence: [N, dim], sample by sample."""
        lengths, ids, id_weights = self.job.ids(step)
        pooled, sequences, leaves = [], [], [weight.requires_grad_() for weight in self.weights]
        counts = lengths.sum(1).tolist()
        by_feature = zip(self.job.table_of, lengths, ids.split(counts), id_weights.split(counts), strict=True)
        for feature, (number, own, ids_N, of_ids) in enumerate(by_feature):
            table = self.job.tables[number]
            rows = leaves[number][ids_N] * (of_ids[:, None] if self.job.weighted else 1.0)
            if feature in self.job.sequences:
                sequences.append(rows)
                continue
            sample = torch.repeat_interleave(torch.arange(len(own)), own)
            summed = torch.zeros(len(own), table.embedding_dim, dtype=torch.float64).index_add(0, sample, rows)
            pooled.append(summed / own.clamp(min=1)[:, None] if table.pooling == "mean" else summed)
        pooled_BD = torch.cat(pooled, 1) if pooled else torch.zeros(self.job.batch, 0, dtype=torch.float64)
        total = sum((loss_of(own) for own in sequences), loss_of(pooled_BD))
        gradients = torch.autograd.grad(total, leaves, allow_unused=True)
        for i, (weight, gradient) in enumerate(zip(self.weights, gradients, strict=True)):
            assert gradient is not None
            self.weights[i] = weight.detach() - self._update(i, gradient)
        return pooled_BD.detach(), [own.detach() for own in sequences]

    def _update(self, table: int, gradient: Tensor) -> Tensor:
        optimizer = self.job.optimizer_of(table)
        if optimizer.name == "frozen":
            return torch.zeros_like(gradient)
        if optimizer.name == "sgd":
            return optimizer.lr * gradient
        squares = gradient**2
        self.sums[table] += squares if optimizer.name == "adagrad" else squares.mean(1)
        root = self.sums[table].sqrt()
        return optimizer.lr * gradient / ((root if root.dim() == 2 else root[:, None]) + EPS)


def worst_differences(rank: int, world_size: int, seeds: list[int], folder: str) -> list[float]:
    """Returns each job's largest difference from plain PyTorch on this rank: of a pooled vector, a weight or a state,
    relative to the largest element of its tensor."""
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
    for ranks, plans, copied in job.phases:
        if rank < ranks:
            bags = ShardedEmbeddingBags(
                job.tables, optimizer=OPTIMIZERS[job.optimizer], plan=plans[0], group=groups[ranks], average=False,
                features=features_of(job), replicate=copied, sequences=[names_of(job)[n] for n in job.sequences],
                dedup=job.dedup,
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


def names_of(job: Job) -> list[str]:
    """Returns each feature's name: its table's, where no other feature looks that up."""
    places = [job.table_of[:number].count(table) for number, table in enumerate(job.table_of)]
    several = [job.table_of.count(table) > 1 for table in job.table_of]
    return [
        f"{job.tables[table].name}_{place}" if shared else job.tables[table].name
        for table, place, shared in zip(job.table_of, places, several, strict=True)
    ]


def features_of(job: Job) -> dict[str, list[str]]:
    """Returns the features of each table that several look up."""
    names = names_of(job)
    looked_up = {t.name: [names[n] for n, of in enumerate(job.table_of) if of == i] for i, t in enumerate(job.tables)}
    return {table: own for table, own in looked_up.items() if len(own) > 1}


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
    found = bags(lengths[:, own].contiguous(), ids[chosen], weights[chosen].float() if job.weighted else None)
    pooled, sequences = found if job.sequences else (found, {})
    total = sum((loss_of(own.values) for own in sequences.values()), loss_of(pooled))
    total.backward()
    pooled_BD, by_sequence = plain.step(step)
    worst = _relative(pooled, pooled_BD[own])
    names = names_of(job)
    for number, vectors in zip(job.sequences, by_sequence, strict=True):
        here = mask[number].repeat_interleave(lengths[number])
        assert torch.equal(sequences[names[number]].lengths.long(), lengths[number, own].long())
        worst = max(worst, _relative(sequences[names[number]].values, vectors[here]))
    return worst


def _relative(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return float("inf")
    if not found.numel():
        return 0.0
    return float((found.detach() - expected).abs().max() / max(float(expected.abs().max()), 1e-3))


def _named(bags: ShardedEmbeddingBags) -> dict[str, Tensor]:
    return {f"tables.{name}": value for name, value in bags.own_tensors().items()}


def _of_state(bags: ShardedEmbeddingBags, job: Job, plain: Plain) -> float:
    """Returns the optimizer state of this rank's shards and copies."""
    worst = 0.0
    by_name = {table.name: i for i, table in enumerate(job.tables)}
    copies = bags.replicas
    for table in () if copies is None else copies.tables:
        assert copies is not None
        tensors, number = copies.tensors(table.name), by_name[table.name]
        worst = max(worst, _relative(tensors["weight"], plain.weights[number].detach()))
        if "momentum1" in tensors:
            worst = max(worst, _relative(tensors["momentum1"], plain.sums[number]))
    for shard in bags.sharded.local_shards:
        number = by_name[shard.shard.table]
        rows, columns = slice(*shard.rows), slice(*shard.columns)
        tensors, sums = bags.sharded.storage.tensors(shard.shard), plain.sums[number][rows]
        worst = max(worst, _relative(tensors["weight"], plain.weights[number].detach()[rows, columns]))
        if "momentum1" in tensors:
            worst = max(worst, _relative(tensors["momentum1"], sums[:, columns] if sums.dim() == 2 else sums))
    return worst


def _save(bags: ShardedEmbeddingBags | None, folder: Path, rank: int, plan: ShardingPlan, step: int) -> None:
    """Writes a checkpoint from all ranks of the phase; the others wait for it."""
    folder.mkdir(parents=True, exist_ok=True)
    saved = {} if bags is None else write_tensors(folder / f"rank_{rank:05d}.bin", _named(bags))
    everyone: list[dict] = [{}] * dist.get_world_size()  # type: ignore[type-arg]
    dist.all_gather_object(everyone, saved)
    if rank == 0:
        files = {path.name: path.stat().st_size for path in folder.glob("*.bin")}
        state, merged = SavedState(step=step, plan=plan.to_json()), {k: v for own in everyone for k, v in own.items()}
        (folder / "manifest.json").write_bytes(Manifest.of(state, files, "", merged).to_bytes())
    dist.barrier()
