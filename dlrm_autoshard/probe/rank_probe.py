"""Measures whole plans on the running ranks, as StepProfiles (source 'probe').

probe = RankProbe.at_start(runtime, task, "rowwise_adagrad")        # on every rank
result = probe.on_rank_zero(lambda: planner.plan(task, measure=probe.measure))

Every stage is timed by itself; none is the difference of two timings, which could come out negative.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.costs import RankCost, StepProfile, rank_costs, stages_W4, step_cost_ms
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.distributed.lookup.filled_bags import FilledBags, made_up_bags
from dlrm_autoshard.distributed.lookup.shared_memory import connect
from dlrm_autoshard.distributed.ranks.free_memory import free_host_memory
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.estimates import ROUNDS
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.kept_memory import KeptMemory
from dlrm_autoshard.probe.shard_probe import ShardProbe, ShardTime, now, relative_spread
from dlrm_autoshard.tables import Shard, TableConfig, TableOptimizer, TableStats, part_of

T = TypeVar("T")

_STOP, _PLANS, _SHARDS = 0, 1, 2  # requests of rank 0 to the others
_NO_REQUEST: tuple[int, list[Any]] | None = None
_ROUNDS_SECONDS = 1.5
"""Only the first round starts after this many seconds. Plans are measured interleaved, so that a slow phase of the
machine hits all of them, and the median counts."""

SECONDS_PER_SHARD = 0.03
"""Minimum seconds for measuring a shard. Short, because the machine may be slow just then: shards that matter are
measured again at other times."""

START_BUFFER_GIB, MID_RUN_BUFFER_GIB = 0.25, 0.125
"""GiB of throwaway weights on CPU. Half of a table of 1e6 rows of 128 columns took 0.605 of the whole in 1 GiB, and
0.62 and 0.59 in these; new memory is slow to get, and training waits for it mid-run."""

_TENSORS = 5
"""Buffers as large as the larger of sent and received data: both, the arriving data, and their reordered copies."""


class ProbeError(UserError):
    """A plan could not be measured; the message names the rank and the reason."""


class RankProbe:
    """Measures plans and single shards on the running ranks; made on every rank with equal arguments.

    Rank 0 measures inside `on_rank_zero` while the others serve it. batch_size: global, a multiple of the number of
    ranks.

    All ranks measure at once and compete for memory bandwidth as in training. Exchanges are real, and each starts
    behind a barrier, so that waiting for a slow rank never counts as communication.
    """

    def __init__(
        self,
        runtime: Runtime,
        tables: Sequence[TableConfig],
        stats: Sequence[TableStats],
        batch_size: int,
        probe: ShardProbe,
        exchange_dtype: ExchangeDtypes | None = None,
        exchange_repeats: int = 5,
        shared_memory: bool = True,
    ) -> None:
        """shared_memory: exchange through it between ranks of a host, as lookups do; otherwise through the group."""
        self.tables, self.stats, self.batch_size = tuple(tables), tuple(stats), batch_size
        self._pairs = {table.name: (table, stat) for table, stat in zip(tables, stats, strict=True)}
        self._runtime, self._dtypes = runtime, exchange_dtype or ExchangeDtypes()
        self._exchange_repeats = exchange_repeats
        self._probe = probe
        self._memory = KeptMemory(0)
        self._link = connect(runtime.group) if shared_memory and runtime.device.type == "cpu" else None

    @staticmethod
    def at_start(
        runtime: Runtime,
        task: PlacementTask,
        optimizer: TableOptimizer,
        exchange_dtype: ExchangeDtypes | None = None,
        shared_memory: bool = True,
        buffer_gib: float = START_BUFFER_GIB,
    ) -> RankProbe:
        """Makes a probe that is fast enough for a job's start: smaller buffers, fewer repetitions."""
        if runtime.device.type == "cuda":  # far beyond its cache, but within free memory together with optimizer state
            buffer_gib = min(4.0, torch.cuda.mem_get_info(runtime.device)[0] / 2**30 / 4)
        shards = ShardProbe(
            optimizer,
            runtime.device,
            buffer_gib=buffer_gib,
            warmup_seconds=0.03,
            repeats=3,
            seconds_per_shard=SECONDS_PER_SHARD,
        )
        return RankProbe(
            runtime,
            task.tables,
            task.stats,
            task.batch_size,
            shards,
            exchange_dtype,
            shared_memory=shared_memory,
        )

    def on_rank_zero(self, function: Callable[[], T]) -> T | None:
        """Runs `function` on rank 0, where it may call `measure` and `measure_shards`; returns None elsewhere.

        If it raises, the other ranks stop serving and rank 0 passes the exception on.
        """
        if self._runtime.rank:
            self._serve()
            return None
        try:
            return function()
        finally:
            self._ask(_STOP, [])

    def measure(self, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        """Returns each plan's profile, measured by all ranks together. Call on rank 0."""
        deadline = time.perf_counter() + _ROUNDS_SECONDS
        rounds: list[list[StepProfile]] = []
        while not rounds or (len(rounds) < ROUNDS and time.perf_counter() < deadline):
            self._ask(_PLANS, [plan.to_json() for plan in plans])
            rounds.append([self._measure_plan(plan) for plan in plans])
        return [median_profile(profiles) for profiles in zip(*rounds, strict=True)]

    def measure_shards(self, shards: Sequence[Sequence[Shard]]) -> list[ShardTime]:
        """Returns times of sets of tables or shards, distributed over ranks that measure at the same time. Call on rank
        0."""
        pairs = [[part_of(one, self._pairs) for one in shard] for shard in shards]
        self._ask(_SHARDS, pairs)
        return self._measure_shards(pairs)

    # -- every rank --------------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            request, asked = self._runtime.broadcast(_NO_REQUEST)
            if request == _STOP:
                return
            # A ProbeError reaches rank 0 as well, which decides what to do; this rank goes on serving.
            with contextlib.suppress(ProbeError):
                if request == _PLANS:
                    for plan in asked:
                        self._measure_plan(ShardingPlan.from_json(plan))
                else:
                    self._measure_shards(asked)

    def _ask(self, request: int, asked: list[Any]) -> None:
        self._runtime.broadcast((request, asked))

    def _measure_plan(self, plan: ShardingPlan) -> StepProfile:
        runtime = self._runtime
        profile = StepProfile(plan, self.tables, self.stats, self.batch_size, (), "probe")
        # Starts behind a barrier, so that all ranks compute at the same time as in a step.
        runtime.barrier()
        pairs = zip(*profile.shards, strict=True)
        mine, failure = self._try_shard([pair for pair in pairs if plan.rank_of[pair[0].name] == runtime.rank])
        prepared, no_room = _tried(lambda: self._prepared(plan))
        failure, forward, backward = failure or no_room, [0.0], [0.0]
        all_can = not any(runtime.all_gather(failure is not None))  # else the others would wait for a failed rank
        if all_can and prepared is not None:
            forward, backward = self._timed(*prepared)
        rows = self._gather(
            [mine.fwd_compute_ms, np.median(forward), np.median(backward), mine.bwd_compute_ms, mine.noise], failure
        )
        ranks = tuple(RankCost(*row[:4]) for row in rows)
        return replace(profile, ranks=ranks, noise=max(row[4] for row in rows))

    def _measure_shards(self, shards: Sequence[Sequence[tuple[TableConfig, TableStats]]]) -> list[ShardTime]:
        world_size = self._runtime.world_size
        measured: list[ShardTime] = []
        for first in range(0, len(shards), world_size):
            self._runtime.barrier()
            dealt = shards[first : first + world_size]
            own = dealt[self._runtime.rank] if self._runtime.rank < len(dealt) else []
            mine, failure = self._try_shard(own)
            rows = self._gather([mine.fwd_compute_ms, mine.bwd_compute_ms, mine.noise, mine.repeats], failure)
            measured += [ShardTime(row[0], row[1], row[2], int(row[3])) for row in rows[: len(dealt)]]
        return measured

    def _try_shard(self, shard: Sequence[tuple[TableConfig, TableStats]]) -> tuple[ShardTime, Exception | None]:
        """Measures a shard and returns a failure (mostly of memory), which must not leave others waiting in a
        collective."""
        tables, stats = [table for table, _ in shard], [stat for _, stat in shard]
        wholes = [self._pairs[table.shard.table][0] for table in tables]
        time, failure = _tried(lambda: self._probe.measure(tables, stats, self.batch_size, wholes))
        return time or ShardTime(), failure

    def _gather(self, row: Sequence[float], failure: Exception | None) -> list[list[float]]:
        """Returns every rank's figures on every rank; ProbeError on all if one failed."""
        reports = self._runtime.all_gather(([float(value) for value in row], None if failure is None else str(failure)))
        for rank, (_, reason) in enumerate(reports):
            if reason is not None:
                raise ProbeError(
                    f"rank {rank} could not measure its shard: {reason.rstrip('.')}. Set autoshard.measure_plans=0 to "
                    "start without measuring."
                )
        return [figures for figures, _ in reports]

    def measure_exchange(self, plan: ShardingPlan) -> tuple[list[float], list[float]]:
        """Returns ms of real exchanges of vectors and of gradients, by the training step's code. Collective."""
        return self._timed(*self._prepared(plan))

    def _prepared(self, plan: ShardingPlan) -> tuple[Exchange | FilledBags, Tensor, Tensor]:
        """Returns the exchange and the vectors and gradients to send. Allocates all memory before any rank starts. If
        some ids travel once each, their vectors do too."""
        runtime = self._runtime
        counts = [max(1, round(stat.features)) for stat in self.stats]
        features = Features.alike(self.tables, counts)
        exchange = Exchange(
            features, plan, runtime.rank, runtime.group, runtime.id_group, runtime.device, self._dtypes, self._link
        )
        like = torch.empty(0, device=runtime.device)
        shapes = (self.batch_size, exchange.local_dim), (self.batch_size // runtime.world_size, exchange.total_dim)
        most = _TENSORS * max(map(math.prod, shapes))
        if runtime.device.type == "cpu":
            self._keep(like.element_size() * most)
            exchange.empty = self._memory.empty
        else:
            like.new_empty(most)  # the device's allocator keeps it for the tensors to come
        vectors, gradient = (exchange.empty(like, math.prod(shape)).zero_().view(shape) for shape in shapes)
        if all(stat.features >= 1 for stat in self.stats) or runtime.world_size == 1 or runtime.device.type != "cpu":
            return exchange, vectors, gradient
        size, shares = len(gradient), [min(1.0, s.features / n) for s, n in zip(self.stats, counts, strict=True)]
        different = [max(1, round(share * size)) for share, n in zip(shares, counts, strict=True) for _ in range(n)]
        return made_up_bags(exchange, different, size), vectors, gradient

    def _timed(
        self, exchange: Exchange | FilledBags, vectors: Tensor, gradient: Tensor
    ) -> tuple[list[float], list[float]]:
        if self._runtime.world_size == 1:
            return [0.0], [0.0]
        forward = self._time_collective(lambda: exchange.in_output_order(exchange.send_pooled(vectors).wait()))
        backward = self._time_collective(lambda: exchange.send_gradients(gradient).wait())
        return forward, backward

    def _keep(self, num_bytes: int) -> None:
        """Makes room for `num_bytes`, at most this rank's share of a quarter of the free memory."""
        self._memory.take_back()
        if num_bytes > len(self._memory):
            self._memory = KeptMemory(0)  # the old one goes first
            self._memory = KeptMemory(min(num_bytes, free_host_memory() // (4 * self._runtime.world_size)))

    def _time_collective(self, collective: Callable[[], object]) -> list[float]:
        """Returns ms of each repetition, after two to warm up."""
        times, used = [], self._memory.used
        for _ in range(2 + self._exchange_repeats):
            self._memory.take_back(used)
            self._runtime.barrier()
            start = now(self._runtime.device)
            collective()
            times.append(1e3 * (now(self._runtime.device) - start))
        return times[2:]


def _tried(attempt: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return attempt(), None
    except (RuntimeError, ValueError, MemoryError, OSError) as error:
        return None, error


def median_profile(profiles: Sequence[StepProfile]) -> StepProfile:
    """Combines profiles of one plan: the median of every stage of every rank.

    Noise is the spread of steps, or between these profiles if that is larger.
    """
    ranks = rank_costs(np.median([stages_W4(p.ranks) for p in profiles], axis=0))
    again = relative_spread([step_cost_ms(profile.ranks) for profile in profiles])
    return replace(profiles[0], ranks=ranks, noise=max(again, float(np.median([p.noise for p in profiles]))))
