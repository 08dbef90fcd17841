"""Sequences: our step against TorchRec's EmbeddingCollection on two ranks, and against plain PyTorch on one.

Two tables of 200,000 rows, dim 64, histories of 50 Zipf-distributed ids, 512 samples a rank, row-wise Adagrad: lookup,
exchange, backward and update, with a given gradient. TorchRec runs pipelined over gloo in each of its shardings; the
fastest counts. It has no CPU kernel for sending rows once (`jagged_unique_indices`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.benchmarks.steps_interleaved import interleaved, slowest_rank
from dlrm_autoshard.benchmarks.workloads import TABLE_LR, drawn, make_groups
from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import EmbeddingBags
from dlrm_autoshard.distributed.ranks.runtime import keep_freed_memory
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.plan import Topology, round_robin
from dlrm_autoshard.tables import TableConfig

TITLE = "sequences: a step over TorchRec's EmbeddingCollection, over plain PyTorch, and rows once each"
ROUGH_TIME = "5 min"
STEPS = 3  # of a variant before the next one's turn
BATCH, LENGTH, DIM, ROWS, ALPHA = 512, 50, 64, 200_000, 1.05
TABLES = (TableConfig("clicks", ROWS, DIM), TableConfig("likes", ROWS, DIM))
NAMES = [table.name for table in TABLES]
FEATURES = Features.of(TABLES, {}, NAMES)
OURS = {  # rows once each, through shared memory
    "ours": (None, True), "ours, TCP": (None, False),
    "ours, as they came": (False, True), "ours, as they came, TCP": (False, False),
    "ours, once": (True, True), "ours, once, TCP": (True, False),
}  # fmt: skip
THEIRS = ("table_wise", "column_wise", "row_wise")
Step = Callable[[], object]


def run(quick: bool) -> dict[str, Any]:
    found, missing = Findings(), find_torchrec()
    ranks = on_pinned_ranks(_two_ranks, 2, missing is None, 4 if quick else 16)
    variants = [name for name in ranks[0] if name != "bytes" and not name.endswith(" cpu")]
    seconds = {variant: slowest_rank(ranks, variant) for variant in variants}
    for variant, own in seconds.items():
        found.put(f"2 ranks: {variant}, ms a step", round(1e3 * median(own), 1))
    theirs = [variant for variant in seconds if variant not in OURS]
    for link, end, target in (("shared memory", "", ">= 1.8"), ("TCP", ", TCP", ">= 1.4")):
        if theirs:
            best = seconds[min(theirs, key=lambda variant: median(seconds[variant]))]
            found.put(
                f"2 ranks, {link}: over TorchRec's fastest", paired_ratio(best, seconds[f"ours{end}"]), target, digits=2
            )
        came, once = seconds[f"ours, as they came{end}"], seconds[f"ours, once{end}"]
        found.put(f"2 ranks, {link}: speed, rows once each over as they came", paired_ratio(came, once), digits=2)
    sent = {once: sum(rank["bytes"][once] for rank in ranks) for once in (False, True)}
    found.put("bytes exchanged, rows once each over as they came", round(sent[True] / sent[False], 3), "<= 0.6")
    alone = on_pinned_ranks(_one_rank, 1, 4 if quick else 16)[0]
    found.put(
        "1 rank: time over nn.Embedding with row-wise Adagrad",
        paired_ratio(alone["ours"], alone["plain"]), "<= 0.8", digits=2,
    )  # fmt: skip
    if missing is not None:
        found.notes.append(f"Without TorchRec: {missing}.")
    return vars(found)


def batches_of(rank: int, alpha: float = ALPHA, count: int = 8) -> list[Batch]:
    """Returns batches with histories of exactly LENGTH ids in every table."""
    source = drawn(TABLES, [LENGTH] * len(TABLES), alpha, train_samples=10**6)
    ids = [source.read("train", 0, first * BATCH, (first + 2) * BATCH) for first in range(2 * rank, 99, 4)[:count]]
    lengths_TB, made = torch.full((len(TABLES), BATCH), LENGTH, dtype=torch.int32), list[Batch]()
    for batch in ids:  # lengths are drawn, so twice the samples have enough
        by_table = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
        values_N = torch.cat([own[: BATCH * LENGTH] for own in by_table])
        made.append(Batch(torch.zeros(BATCH, 0), lengths_TB, values_N, torch.zeros(BATCH), BATCH, BATCH))
    return made


def gradient_of(batch: Batch) -> Tensor:
    """Returns the gradient [N, DIM] of each table's vectors, equal in all steps."""
    return 1e-3 * torch.randn(len(batch.values_N) // len(TABLES), DIM, generator=torch.Generator().manual_seed(0))


def our_steps(
    rank: int, world_size: int, batches: list[Batch], *, rows_once: bool | None, shared_memory: bool
) -> tuple[Step, ShardedEmbeddings]:
    """Returns our step, which sends the next batch's ids ahead, and its tables."""
    group, id_group, control = make_groups()
    cpu, turns, gradient_ND = torch.device("cpu"), itertools.cycle(batches), gradient_of(batches[0])
    embeddings = ShardedEmbeddings(
        FEATURES,
        round_robin(NAMES, Topology(world_size)),
        TablesConfig(optimizer=TableOptimizerConfig(name="rowwise_adagrad", lr=TABLE_LR)),
        rank=rank,
        group=group,
        id_group=id_group,
        device=cpu,
        shared_memory=shared_memory,
        rows_once=rows_once,
    )
    bags = EmbeddingBags(embeddings, StageClock(cpu, control), average=False)
    ahead = bags.ahead(turns, lambda batch: batch)

    def step() -> None:
        _, ids = next(ahead)
        lookup = bags.look_up(ids)
        lookup.wait()
        torch.autograd.backward([lookup.sequences[name].values for name in NAMES], [gradient_ND] * len(NAMES))

    return step, embeddings


def their_steps(batches: list[Batch], kind: str) -> Step:
    """Returns TorchRec's step, in its pipeline."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode
    from torchrec import EmbeddingCollection, EmbeddingConfig
    from torchrec.distributed.embedding import EmbeddingCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
    from torchrec.distributed.planner.types import ParameterConstraints
    from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

    configs = [
        EmbeddingConfig(name=t.name, embedding_dim=t.embedding_dim, num_embeddings=ROWS, feature_names=[t.name])
        for t in TABLES
    ]
    fused = {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": TABLE_LR, "eps": 1e-8,
        "bounds_check_mode": BoundsCheckMode.NONE,
    }  # fmt: skip
    sharder = EmbeddingCollectionSharder(fused_params=fused)
    model = _Theirs(EmbeddingCollection(tables=configs, device=torch.device("meta")), gradient_of(batches[0]))
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        batch_size=BATCH,
        constraints={
            name: ParameterConstraints(
                sharding_types=[kind], compute_kernels=["fused"], pooling_factors=[LENGTH], min_partition=DIM // 2
            )
            for name in NAMES
        },
    )
    world, cpu = dist.group.WORLD, torch.device("cpu")
    assert world is not None
    plan = planner.collective_plan(model, [sharder], world)  # type: ignore[list-item, unused-ignore]
    parallel = DistributedModelParallel(model, device=cpu, plan=plan, sharders=[sharder])  # type: ignore[list-item, unused-ignore]
    pipeline = TrainPipelineSparseDist(parallel, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.0), cpu)
    fresh = (
        KeyedJaggedTensor(NAMES, batch.values_N, lengths=batch.lengths_TB.flatten())
        for batch in itertools.cycle(batches)
    )
    return lambda: pipeline.progress(fresh)


class _Theirs(nn.Module):
    """TorchRec's module with a loss that has the given gradient."""

    def __init__(self, collection: nn.Module, gradient_ND: Tensor) -> None:
        super().__init__()
        self.collection, self._gradient_ND = collection, gradient_ND

    def forward(self, ids: Any) -> tuple[Tensor, Tensor]:
        found = self.collection(ids)
        values = [found[name].values() for name in NAMES]
        loss: Tensor = _GivenGradient.apply(self._gradient_ND, *values)
        return loss, loss.detach()


class _GivenGradient(torch.autograd.Function):
    """A loss of zero whose given gradient takes no time to compute."""

    @staticmethod
    def forward(ctx: Any, gradient_ND: Tensor, *values: Tensor) -> Tensor:
        ctx.gradient_ND, ctx.count = gradient_ND, len(values)
        return gradient_ND.new_zeros(())

    @staticmethod
    def backward(ctx: Any, loss: Tensor) -> tuple[Tensor | None, ...]:
        return None, *[ctx.gradient_ND] * ctx.count


def plain_steps(batches: list[Batch]) -> Step:
    """Returns a step of nn.Embedding with sparse gradients and row-wise Adagrad on the rows that they touch."""
    tables = [nn.Embedding(ROWS, DIM, sparse=True) for _ in TABLES]
    sums = [torch.zeros(ROWS, 1) for _ in TABLES]
    turns, gradient_ND = itertools.cycle(batches), gradient_of(batches[0])

    def step() -> None:
        values = [table(ids) for table, ids in zip(tables, next(turns).values_N.chunk(len(TABLES)), strict=True)]
        torch.autograd.backward(values, [gradient_ND] * len(values))
        for table, own in zip(tables, sums, strict=True):
            assert table.weight.grad is not None
            gradient, table.weight.grad = table.weight.grad.coalesce(), None
            rows, values_UD = gradient.indices()[0], gradient.values()
            own.index_add_(0, rows, values_UD.square().mean(1, keepdim=True))
            change = values_UD.mul_(-TABLE_LR).div_(own.index_select(0, rows).sqrt_().add_(1e-8))
            with torch.no_grad():
                table.weight.index_add_(0, rows, change)

    return step


def _two_ranks(rank: int, world_size: int, with_torchrec: bool, rounds: int) -> dict[str, Any]:
    keep_freed_memory()
    batches, variants = batches_of(rank), dict[str, Step]()
    sent = dict[bool, int]()
    for variant, (rows_once, shared_memory) in OURS.items():
        variants[variant], embeddings = our_steps(
            rank, world_size, batches, rows_once=rows_once, shared_memory=shared_memory
        )
        if rows_once is not None:
            sent[rows_once] = sum(exchanged(embeddings.rows_once.asked(batch).sent) for batch in batches)
    for kind in THEIRS if with_torchrec and find_torchrec() is None else ():
        variants[f"TorchRec, {kind}"] = their_steps(batches, kind)
    return {**interleaved(variants, turn=STEPS, rounds=rounds), "bytes": sent}


def exchanged(sent: Batch) -> int:
    """Returns bytes of lengths, ids, vectors and gradients, with the half that stays on the rank."""
    return sent.lengths_TB.nbytes + sent.values_N.nbytes + 2 * 4 * DIM * len(sent.values_N)


def _one_rank(rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    keep_freed_memory()
    batches = batches_of(rank)
    ours, _ = our_steps(rank, world_size, batches, rows_once=None, shared_memory=True)
    return interleaved({"ours": ours, "plain": plain_steps(batches)}, turn=STEPS, rounds=rounds)
