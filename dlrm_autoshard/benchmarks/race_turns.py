"""The steps of the race's jobs once more, in turns within one job: what their plans were worth, whatever else differed.

    seconds, gains = steps_in_turns(world, folder, ["planned", "loop"])  # {"loop": [s of each round], ...}, {412: 0.1}
    in_typical_round(seconds)                                            # {"loop": 18.4, ...}

Whole jobs one after the other differ by up to a third under one plan, as the machine does; turns of a second don't.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from statistics import median

import numpy as np

from dlrm_autoshard.benchmarks.paired import paired_ratio
from dlrm_autoshard.benchmarks.plans_in_turns import Turn, plans_in_turns
from dlrm_autoshard.benchmarks.race_worlds import NUM_DENSE, RANKS, Replayed, World
from dlrm_autoshard.benchmarks.workloads import Workload
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig

ROUNDS = 20


@dataclass(frozen=True)
class Phase(Workload):
    """A world's tables, and the batches of one phase of its data, as the race's jobs read them from `folder`."""

    shapes: tuple[TableConfig, ...] = ()
    folder: str = ""
    phase: int = 0

    @cached_property
    def tables(self) -> tuple[TableConfig, ...]:
        return self.shapes

    def batches(self, rank: int = 0, world_size: int = 1) -> list[Batch]:
        samples, size = self.num_batches * self.batch_size, self.batch_size // world_size
        shapes = [[t.name, t.num_embeddings, t.embedding_dim] for t in self.tables]
        source = Replayed(TablesConfig(), self.folder, shapes, [self.phase], samples)
        firsts = range(rank * size, samples, self.batch_size)
        return [replace(source.read("train", 0, at, at + size), global_size=self.batch_size) for at in firsts]


def steps_in_turns(world: World, folder: Path, arms: Sequence[str]) -> tuple[dict[str, list[float]], dict[int, float]]:
    """Seconds that each arm's steps took under the plans it had, by round; and by the step of each of the loop's moves,
    the part of a step time that it saved, of what came after it. Its jobs have ended, and `folder/data` is there. What
    else they took (start-up, planning, deciding, moving) their wall clock has."""
    plans = {arm: plans_by_step(world, folder, arm) for arm in arms}
    spent = {arm: steps_by_plan(world, plans[arm]) for arm in arms}
    moves = moves_in(world, plans.get("loop", {}))
    seconds, gains = {arm: np.zeros(ROUNDS) for arm in arms}, dict[int, float]()
    for phase in range(world.phases):
        turns = {name: turn for steps in spent.values() for (at, name), (turn, _) in steps.items() if at == phase}
        turns |= {turn.name: turn for at, *pair in moves.values() if at == phase for turn in pair}
        rates = plans_in_turns(_workload(world, folder, phase), turns, ROUNDS)
        for arm, steps in spent.items():
            for (at, name), (_, count) in steps.items():
                if at == phase:
                    seconds[arm] += count * world.scale.batch * RANKS / np.array(rates[name])
        for step, (at, before, after) in moves.items():
            if at == phase:
                gains[step] = 1 - paired_ratio(rates[before.name], rates[after.name]).median
    return {arm: values.tolist() for arm, values in seconds.items()}, gains


def in_typical_round(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Returns one figure for each arm: the first one's median, and of the others that times the median of what they
    took beside the first in the same round, which saw the same machine."""
    first = next(iter(seconds.values()))
    return {arm: median(first) * paired_ratio(own, first).median for arm, own in seconds.items()}


def plans_by_step(world: World, folder: Path, arm: str) -> dict[int, ShardingPlan]:
    """By the step from which the job was under it."""
    if arm == "clairvoyant":
        schedule = json.loads((folder / arm / "schedule.json").read_text())
        return {int(e) * world.scale.steps: ShardingPlan.load(Path(path)) for e, path in schedule.items()}
    kept = sorted((folder / arm / "job" / "plan").glob("step_*.json"))
    return {int(path.stem.removeprefix("step_")): ShardingPlan.load(path) for path in kept}


def steps_by_plan(world: World, plans: Mapping[int, ShardingPlan]) -> dict[tuple[int, str], tuple[Turn, int]]:
    """Turns and numbers of steps, by the phase of the data and the turn's name."""
    bounds = sorted({*plans, *range(0, world.total_steps + 1, world.scale.steps)})
    found: dict[tuple[int, str], tuple[Turn, int]] = {}
    for first, last in itertools.pairwise(bounds):
        phase, turn = _at(world, first, plans[max(step for step in plans if step <= first)])
        found[phase, turn.name] = turn, last - first + found.get((phase, turn.name), (turn, 0))[1]
    return found


def moves_in(world: World, plans: Mapping[int, ShardingPlan]) -> dict[int, tuple[int, Turn, Turn]]:
    """By step: the phase, and the turns of the plan that was left and of the one that was taken, as it was then."""
    found: dict[int, tuple[int, Turn, Turn]] = {}
    for before, step in itertools.pairwise(sorted(plans)):
        if step < world.total_steps:
            (phase, left), (_, taken) = (_at(world, step, plans[of]) for of in (before, step))
            found[step] = phase, left, taken
    return found


def _at(world: World, step: int, plan: ShardingPlan) -> tuple[int, Turn]:
    epoch = step // world.scale.steps
    return world.phase_of(epoch), Turn(plan, epoch in world.busy_epochs)


def _workload(world: World, folder: Path, phase: int) -> Phase:
    return Phase(
        name=f"{world.name}, phase {phase}",
        rows=tuple(t.num_embeddings for t in world.tables),
        pooling=tuple(world.pooling(phase).tolist()),
        bottom=(64,),
        top=(64, 1),
        num_batches=world.scale.distinct,
        batch_size=world.scale.batch * RANKS,
        num_dense=NUM_DENSE,
        interaction="cat",
        shapes=world.tables,
        folder=str(folder / "data"),
        phase=phase,
    )
