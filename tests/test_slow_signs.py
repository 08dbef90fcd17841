"""What dense parts, the same work on every rank, and shared cores tell of ranks: whose tables are costly, who is
slow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dlrm_autoshard.costs import StepProfile
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.simulator import SimulatedCluster
from dlrm_autoshard.tables import TableConfig, TableStats

TABLES = [TableConfig(f"t{i}", 10_000 * (i + 1), 16 + 16 * (i % 4)) for i in range(12)]
STATS = [TableStats(1.0 + 3 * (i % 5), batch_size=1024) for i in range(12)]
TASK = PlacementTask.build(TABLES, STATS, Topology(2), batch_size=1024)
EVEN = ShardingPlan({table.name: i % 2 for i, table in enumerate(TABLES)}, 2)
SPARED = ShardingPlan({table.name: int(i % 6 == 1) for i, table in enumerate(TABLES)}, 2)
EMPTIED = ShardingPlan({table.name: 0 for table in TABLES}, 2)


class Job:
    """Profiles as intervals have them: by default 3% of noise in tables' times, 4% in the dense parts'."""

    def __init__(self, seed: int, noise: float = 0.03) -> None:
        self.planner, self._cluster = Planner(), SimulatedCluster(seed, noise=noise)
        self._noise, self._tables_noise = np.random.default_rng(seed), noise

    def interval(
        self, plan: ShardingPlan, *, tables: float = 1.0, dense: float | None = 1.0, core: float | None = None
    ) -> None:
        """tables, dense: times longer that rank 1 takes. core: part of the time that it has its core; rank 0: all."""
        seen = self._cluster.profile(TABLES, STATS, plan, 1024)
        first, second = seen.ranks
        slow = {stage: getattr(second, stage) * tables for stage in ("fwd_compute_ms", "bwd_compute_ms")}
        ranks, noise = (first, replace(second, **slow)), self._tables_noise
        profile: StepProfile = replace(seen, ranks=ranks, source="measured", noise=noise)
        if dense is not None:
            ms = 8.0 * np.array([1.0, dense]) * np.exp(0.04 * self._noise.standard_normal(2))
            profile = replace(profile, dense_ms=tuple(ms.tolist()))
        if core is not None:
            profile = replace(profile, core_shares=(0.99, core))
        self.planner.costs.observe(profile)

    @property
    def slowness(self) -> float:
        """Of rank 1, beside rank 0."""
        first, second = self.planner.rank_slowness(2)
        return float(second / first)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_is_slow_where_its_dense_part_is_and_its_tables_are_costly_where_it_is_not(seed: int) -> None:
    """From the first interval on, with nothing to compare it with."""
    starved, costly = Job(seed), Job(seed)
    starved.interval(EVEN, tables=2.0, dense=1.8)
    costly.interval(EVEN, tables=2.0, dense=1.0)
    assert 1.5 < starved.slowness < 2.3
    assert costly.slowness == pytest.approx(1.0, abs=0.1)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_without_tables_is_known_to_have_recovered(seed: int) -> None:
    """Nothing of it is measured but its dense part: it was taken for slow as long as the job ran."""
    job = Job(seed)
    for _ in range(3):
        job.interval(EVEN)
    for _ in range(2):
        job.interval(EVEN, tables=3.0, dense=2.6)
    assert job.slowness > 2.0
    job.interval(EMPTIED, dense=2.6)
    assert job.slowness > 2.0
    for _ in range(2):
        job.interval(EMPTIED)
    assert job.slowness == pytest.approx(1.0, abs=0.15)


@pytest.mark.parametrize("seed", range(5))
def test_a_rank_that_shares_its_core_is_slow_however_its_steps_scatter(seed: int) -> None:
    """With half a core taken steps of one interval differed by half, and shares by 0.06: the steps alone say less."""
    job, blind = Job(seed, noise=0.3), Job(seed, noise=0.3)
    for _ in range(3):
        job.interval(EVEN, core=1.0)
        blind.interval(EVEN)
    job.interval(EVEN, tables=1.6, dense=1.4, core=0.58)
    blind.interval(EVEN, tables=1.6, dense=1.4)
    assert blind.slowness < 1.5 < job.slowness < 2.4
    for _ in range(2):
        job.interval(EVEN, core=0.99)
    assert job.slowness == pytest.approx(1.0, abs=0.15)


def test_a_core_of_its_own_makes_no_rank_fast() -> None:
    """There are other reasons to be slow than to share it, and a share that is not low tells of none."""
    job, other = Job(0), Job(0)
    job.interval(EVEN, tables=2.0, dense=1.8, core=0.99)
    other.interval(EVEN, tables=2.0, dense=1.8)
    assert job.slowness == pytest.approx(other.slowness, rel=1e-9) and job.slowness > 1.5


@pytest.mark.parametrize("seed", range(4))
def test_where_all_ranks_share_cores_alike_none_is_slow(seed: int) -> None:
    """More ranks than cores."""
    planner, noise = Planner(), np.random.default_rng(seed)
    for _ in range(3):
        seen = SimulatedCluster(seed, noise=0.03).profile(TABLES, STATS, EVEN, 1024)
        shares = tuple((0.5 + 0.02 * noise.standard_normal(2)).tolist())
        planner.costs.observe(replace(seen, source="measured", noise=0.03, core_shares=shares))
    first, second = planner.rank_slowness(2)
    assert second / first == pytest.approx(1.0, abs=0.03)


def test_noise_of_dense_parts_makes_no_rank_slow_and_begins_no_era() -> None:
    for seed in range(5):
        job = Job(seed)
        for _ in range(12):
            job.interval(EVEN)
            assert job.slowness == pytest.approx(1.0, abs=0.06)
        assert job.planner.costs.corrections.eras == [0] * 12


def test_what_is_known_of_both_survives_a_checkpoint() -> None:
    job, other = Job(0), Planner()
    job.interval(EVEN, core=1.0)
    job.interval(SPARED, tables=2.0, dense=1.8, core=0.6)
    other.load_state_dict(job.planner.state_dict())
    assert other.rank_slowness(2) == pytest.approx(job.planner.rank_slowness(2), rel=1e-6)


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5])
def test_a_share_that_no_rank_can_have_is_refused(share: float) -> None:
    """In a damaged state: of 0 for all ranks nobody can say who has more."""
    seen = SimulatedCluster(0).profile(TABLES, STATS, EVEN, 1024)
    record = replace(seen, core_shares=(0.9, 0.9)).to_json()
    assert StepProfile.from_json(record).core_shares == (0.9, 0.9)
    with pytest.raises(FormatError, match="core_shares"):
        StepProfile.from_json({**record, "core_shares": [share, share]})


def test_of_many_ranks_those_furthest_from_the_middle_are_looked_at() -> None:
    """300 ranks, of which one is slow and owns nothing."""
    ranks, slow = 300, 123
    plan = ShardingPlan({table.name: i for i, table in enumerate(TABLES)}, ranks)
    seen = SimulatedCluster(0, noise=0.03).profile(TABLES, STATS, plan, 1200)
    dense = 8.0 * np.exp(0.02 * np.random.default_rng(0).standard_normal(ranks))
    dense[slow] *= 3
    planner = Planner()
    planner.costs.observe(replace(seen, source="measured", noise=0.03, dense_ms=tuple(dense.tolist())))
    slowness_W = planner.rank_slowness(ranks)
    assert slowness_W[slow] > 2 * np.median(slowness_W) and (np.delete(slowness_W, slow) < 1.3).all()
