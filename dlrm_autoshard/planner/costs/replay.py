"""Measured costs to learn from: shards timed at start-up, and whole steps from training.

buffer.add([ShardSample(tables, stats, 4096, fwd_compute_ms=1.2, bwd_compute_ms=2.9)])
buffer.add_profile(profile)             # a StepProfile of real steps; newer ones count more
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.formats.numbers import Amount, BatchSize, Count
from dlrm_autoshard.tables import StatsRecord, TableConfig, TableRecord, TableStats

DECAY = 0.8
MOST_SAMPLES, MOST_PROFILES = 20_000, 64


class ShardRecord(TypedDict):
    """`ShardSample` as JSON."""

    tables: list[TableRecord]
    stats: list[StatsRecord]
    batch_size: BatchSize
    fwd_compute_ms: Amount
    bwd_compute_ms: Amount
    noise: NotRequired[Amount]
    moment: NotRequired[Count]  # written by older versions and read by nobody, like the next
    rank: NotRequired[Count | None]


class CommsRecord(TypedDict):
    """`CommsSample` as JSON."""

    dims: list[Count | Amount]
    batch_size: BatchSize
    fwd_comms_ms: list[Amount]
    bwd_comms_ms: list[Amount]
    noise: NotRequired[Amount]
    hosts: NotRequired[list[Count] | None]


@dataclass(frozen=True)
class ShardSample:
    """The measured computation of one fused shard. batch_size: samples looked up per table (the global batch).
    noise: relative spread of repeated measurements."""

    tables: tuple[TableConfig, ...]
    stats: tuple[TableStats, ...]
    batch_size: int
    fwd_compute_ms: float
    bwd_compute_ms: float
    noise: float = 0.0

    def to_json(self) -> dict[str, Any]:
        tables = [table.to_json() for table in self.tables]
        return {**vars(self), "tables": tables, "stats": [stat.to_json() for stat in self.stats]}

    @staticmethod
    def from_json(record: Any) -> ShardSample:
        sample: dict[str, Any] = {**checked(ShardRecord, record)}
        sample.pop("moment", None)
        sample.pop("rank", None)
        tables = tuple(TableConfig.from_json(table) for table in sample["tables"])
        stats = tuple(TableStats.from_json(stat) for stat in sample["stats"])
        if len(tables) != len(stats):
            raise FormatError(f"a shard has {len(tables)} tables, and statistics of {len(stats)}.")
        return ShardSample(**sample | {"tables": tables, "stats": stats})


@dataclass(frozen=True)
class CommsSample:
    """A measured exchange on each rank, without waiting. dims: sum of embedding dims per rank. hosts: each rank's
    host; None: one host."""

    dims: tuple[float, ...]
    batch_size: int
    fwd_comms_ms: tuple[float, ...]
    bwd_comms_ms: tuple[float, ...]
    noise: float = 0.0
    hosts: tuple[int, ...] | None = None

    @property
    def world_size(self) -> int:
        return len(self.dims)

    def to_json(self) -> dict[str, Any]:
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(record: Any) -> CommsSample:
        sample: dict[str, Any] = {**checked(CommsRecord, record)}
        keys = ("dims", "fwd_comms_ms", "bwd_comms_ms", "hosts")
        lists = {key: tuple(sample[key]) for key in keys if sample.get(key) is not None}
        if len({len(by_rank) for by_rank in lists.values()}) != 1:
            raise FormatError("an exchange's dims, times and hosts are not of the same ranks.")
        return CommsSample(**sample | lists)


def shards_of(profile: StepProfile) -> list[ShardSample]:
    """Returns one sample per rank that owns tables."""
    samples, shards = [], list(zip(*profile.shards, strict=True))
    for rank in range(profile.plan.world_size):
        own = [pair for pair in shards if profile.plan.rank_of[pair[0].name] == rank]
        if own:
            tables, stats = zip(*own, strict=True)
            cost = profile.ranks[rank]
            samples.append(
                ShardSample(tables, stats, profile.batch_size, cost.fwd_compute_ms, cost.bwd_compute_ms, profile.noise)
            )
    return samples


def comms_of(profile: StepProfile) -> CommsSample:
    """Returns a profile's exchanges as a sample."""
    dims: list[float] = [0] * profile.plan.world_size
    for shard, stat in zip(*profile.shards, strict=True):
        dims[profile.plan.rank_of[shard.name]] += shard.embedding_dim * stat.features
    return CommsSample(
        dims=tuple(dims),
        batch_size=profile.batch_size,
        fwd_comms_ms=tuple(cost.fwd_comms_ms for cost in profile.ranks),
        bwd_comms_ms=tuple(cost.bwd_comms_ms for cost in profile.ranks),
        noise=profile.noise,
        hosts=profile.hosts,
    )


class ReplayBuffer:
    """A bounded store of measurements, oldest first.

    Start-up samples are kept while there is room: they are clean and cover many table sets. Each training profile, and
    each plan, counts 0.8 of its successor, because data and machines drift.
    """

    def __init__(self) -> None:
        self.shards: list[ShardSample] = []
        self.comms: list[CommsSample] = []
        self.profiles: list[StepProfile] = []

    def add(self, samples: Iterable[ShardSample | CommsSample]) -> None:
        for sample in samples:
            if isinstance(sample, CommsSample):
                self.comms.append(sample)
            else:
                self.shards.append(sample)
        del self.shards[:-MOST_SAMPLES], self.comms[:-MOST_SAMPLES]

    def add_profile(self, profile: StepProfile) -> None:
        self.profiles.append(profile)
        if len(self.profiles) > MOST_PROFILES:  # of the older half, that of which there is most goes
            older = [one.plan.fingerprint for one in self.profiles[: MOST_PROFILES // 2]]
            del self.profiles[older.index(max(older, key=older.count))]

    def weighted_profiles(self) -> Iterator[tuple[StepProfile, float]]:
        """Returns profiles with their weights. Those of the newest plan sum to 1, of the one before to 0.8, and so
        on, because repeated measurements of the live plan tell nothing new about others."""
        plans = [profile.plan.fingerprint for profile in self.profiles]
        newest_first = list(dict.fromkeys(reversed(plans)))
        for number, (profile, plan) in enumerate(zip(self.profiles, plans, strict=True)):
            plan_age, age = newest_first.index(plan), plans[number + 1 :].count(plan)
            yield profile, DECAY ** (plan_age + age) * (1 - DECAY) / (1 - DECAY ** plans.count(plan))

    def to_json(self) -> dict[str, Any]:
        return {
            "shards": [sample.to_json() for sample in self.shards],
            "comms": [sample.to_json() for sample in self.comms],
            "profiles": [profile.to_json() for profile in self.profiles],
        }

    @staticmethod
    def from_json(record: Mapping[str, Any]) -> ReplayBuffer:
        buffer = ReplayBuffer()
        buffer.shards = [ShardSample.from_json(sample) for sample in record["shards"]]
        buffer.comms = [CommsSample.from_json(sample) for sample in record["comms"]]
        buffer.profiles = [StepProfile.from_json(profile) for profile in record["profiles"]]
        return buffer
