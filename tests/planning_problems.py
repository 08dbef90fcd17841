"""Small placement problems for the planner's tests: seeded tables, a simulated cluster, an exact optimum."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from dlrm_autoshard import Constraints, ShardingPlan, SimulatedCluster, StepProfile, TableConfig, TableStats, Topology
from dlrm_autoshard.planner.costs.replay import CommsSample, ShardSample, comms_of, shards_of
from dlrm_autoshard.planner.dreamshard.masked import masked_log_probs
from dlrm_autoshard.planner.dreamshard.mdp import NUM_FEATURES, Rollout
from dlrm_autoshard.planner.dreamshard.policy import DevicePolicy
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts

BATCH = 2048


def some_tables(count: int, seed: int = 0) -> tuple[list[TableConfig], list[TableStats]]:
    pool = synthetic_pool(count, seed=seed, batch_size=BATCH)
    return list(pool.tables), list(pool.stats)


def some_task(
    count: int,
    world_size: int,
    seed: int = 0,
    memory: Sequence[int] | None = None,
    constraints: Constraints = Constraints(),
    table_bytes: dict[str, int] | None = None,
) -> PlacementTask:
    tables, stats = some_tables(count, seed)
    topology = Topology(world_size, None if memory is None else tuple(memory))
    return PlacementTask.build(
        tables, stats, topology, batch_size=BATCH, constraints=constraints, table_bytes=table_bytes
    )


def measurer(cluster: SimulatedCluster) -> Callable[[PlacementTask, Sequence[ShardingPlan]], list[StepProfile]]:
    def measure(task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        return [cluster.profile(task.tables, task.stats, plan, task.batch_size) for plan in plans]

    return measure


def random_samples(cluster: SimulatedCluster, profiles: int, seed: int = 0) -> list[ShardSample | CommsSample]:
    """Returns samples of shards from random plans of random choices of 200 tables."""
    generator = np.random.default_rng(seed)
    tables, stats = some_tables(200, seed)
    samples: list[ShardSample | CommsSample] = []
    for _ in range(profiles):
        chosen = generator.choice(200, size=int(generator.integers(4, 40)), replace=False)
        world_size = int(generator.integers(2, 6))
        plan = ShardingPlan({tables[i].name: int(generator.integers(world_size)) for i in chosen}, world_size)
        profile = cluster.profile([tables[i] for i in chosen], [stats[i] for i in chosen], plan, BATCH)
        samples += [*shards_of(profile), comms_of(profile)]
    return samples


def step_log_probs(rollout: Rollout, policy: DevicePolicy) -> np.ndarray:
    """Returns [U, E, D] log-probabilities of all actions at each step of a rollout, under `policy` as it is now."""
    unit_UH = rollout.mdp.embed_units(policy)
    placed_UED1 = (rollout.actions[..., None] == np.arange(rollout.legal.shape[-1]))[..., None]
    added = placed_UED1 * unit_UH[:, None, None, :]
    before = added.cumsum(axis=0) - added  # what was on each device before the step
    unit = np.broadcast_to(unit_UH[:, None, None, :], before.shape)
    inputs = np.concatenate([rollout.inputs[..., :NUM_FEATURES], before, unit], axis=-1)
    return masked_log_probs(policy.logits(inputs)[0], rollout.legal)


def log_prob(rollout: Rollout, policy: DevicePolicy) -> np.ndarray:
    """Returns the [E] log-probability of each episode."""
    taken = np.take_along_axis(step_log_probs(rollout, policy), rollout.actions[..., None], axis=-1)
    return taken[..., 0].sum(axis=0)


def exact_optimum(costs: TaskCosts, devices: int) -> float:
    """Returns the least step cost over all placements on identical devices without memory limits, by enumeration."""
    units = len(costs.summary_UK)
    subsets = np.arange(2**units)
    inside = ((subsets[:, None] >> np.arange(units)) & 1).astype(np.float32)
    stages = costs.stage_ms(inside @ costs.summary_UK, np.zeros(len(subsets), dtype=np.int64))
    # Unit u goes to a device that is in use already or to the next empty one: each partition once.
    placements = np.zeros((1, devices), dtype=np.int64)
    for unit in range(units):
        grown = [placements + np.eye(devices, dtype=np.int64)[d] * (1 << unit) for d in range(devices)]
        fresh = [np.ones(len(placements), dtype=bool)]
        fresh += [placements[:, d - 1] > 0 for d in range(1, devices)]
        placements = np.concatenate([g[f] for g, f in zip(grown, fresh, strict=True)])
    best = np.inf
    for chunk in np.array_split(placements, max(1, len(placements) // 100_000)):
        best = min(best, float(stages[chunk].max(axis=1).sum(axis=1).min()))
    return best


def all_placements(units: int, devices: int) -> np.ndarray:
    return np.array(list(itertools.product(range(devices), repeat=units)))
