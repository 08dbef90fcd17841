"""Summarises a race: each arm's seconds, ratios of arms by each clock, what resharding recovered, how well gains of
moves were predicted, and the targets.

summarise(done, arms, seeds=5)          # figures, targets, spread and notes, for a record
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import Ratio, median_with_interval, paired_ratio, ratio_of_means, with_interval
from dlrm_autoshard.benchmarks.plans_in_turns import recovered, share_of_gap
from dlrm_autoshard.benchmarks.race_arms import DECIDES_EVERY, PLANNING_SECONDS, Arms, Runs
from dlrm_autoshard.benchmarks.race_turns import ROUNDS
from dlrm_autoshard.benchmarks.slices import commits, origins

LEAST_GAIN = 0.05
"""Part of a job. Where a clairvoyant gains less, no share of it is asked for."""
BESIDE = 0.3
"""Cores that other work had beside a job, from which on that is said."""
CLOCKS = {
    "seconds": "",
    "unsaved_seconds": ", checkpoints left out",
    "steps_seconds": ", steps alone",
    "net_seconds": ", steps, deciding and moving",
    "planned_seconds": ", steps, planning, deciding and moving",
}
PLANNED_START, LATER = "start: planned, s", "start: planned more than round robin, s"
WORST = "worst run: loop on / loop off"
MISJUDGED = "gain predicted - measured of moves, points"
RATIOS = (
    ("loop on / loop off", "loop", "planned"),
    ("round robin / clairvoyant", "round_robin", "clairvoyant"),
    ("static / clairvoyant", "planned", "clairvoyant"),
    ("torchrec / loop on", "torchrec", "loop"),
)
HOW_MEASURED = (
    "seconds: from the process's start to the last step; interval: 95%, over seeds",
    "steps alone: the same plans over the same data in turns within one job, without start, decisions and moves; "
    "jobs one after the other differ by some percent under one plan. Deciding and moving of the jobs are added to "
    "that; planning with what was measured for it, which jobs without resharding do more of, is in figures of its "
    "own (it was added always, until 0.2.0)",
    f"turns: {ROUNDS} rounds, compared within each; before 6a4eff7 10 rounds, compared by medians",
    "gains are measured by the job itself, of the few steps before a move; in turns by the steps of both plans",
    "start: to the end of the first step, with the checkpoint before it; until 0.2.0 only till the model was built",
    "profiling: by how much sampled steps, which have barriers, took longer than the mean; steps alone have none",
    f"clairvoyants plan for up to {PLANNING_SECONDS:.0f} s since 9b1231b, for 20 before, which beside a busy core "
    "left a start too little to measure what spares it",
    f"loop on decides every {DECIDES_EVERY} steps (reshard.every_steps); all else is by default",
)


def summarise(done: Runs, arms: Arms, seeds: int) -> dict[str, Any]:
    """Figures, targets, spread, notes. seeds: those that have to have run; of a world more count where all arms have
    run that the first seed has. A world's target that has no figure, since arms are missing, is missed; that of a share
    where there is nothing to recover is not set.

    A share is recovered of what a clairvoyant gains over the plan of the start; how much that is stands beside it.
    """
    found, looped = Findings(), list[Mapping[str, Any]]()
    for name in arms:
        of = _seeds_that_ran(done[name], seeds)
        by_seed = {seed: {arm: done[name][seed][arm] for arm in arms[name]} for seed in of}
        _say_world(name, by_seed, found)
        looped += [runs["loop"] for runs in by_seed.values() if "seconds" in runs.get("loop", {})]
    if any({"planned", "round_robin"} <= set(names) for names in arms.values()):
        _starts(done, found)
    for clock, suffix in CLOCKS.items():
        if not suffix or any(clock in run for *_, run in every(done)):
            found.put(WORST + suffix, _worst(done, arms, clock))
    found.targets[WORST] = "<= 1.02"
    if jobs := _misjudged(looped, "gain_in_turns"):
        found.put(f"{MISJUDGED}, in turns", ratio_of_means(*zip(*jobs, strict=True)))
    if jobs := _misjudged(looped, "measured_gain"):
        found.put(MISJUDGED, ratio_of_means(*zip(*jobs, strict=True)), "<= 3")  # of all moves; drawn by job
    elif found.figures[WORST] is None:  # else races ran, and nothing moved: nothing was misjudged
        found.targets[MISJUDGED] = "<= 3"
    found.notes += HOW_MEASURED
    return vars(found) | origins([run for *_, run in every(done)])


def every(done: Runs) -> list[tuple[str, int, str, dict[str, Any]]]:
    """World, seed, arm and run."""
    return [(n, s, arm, run) for n, by in done.items() for s, by_arm in by.items() for arm, run in by_arm.items()]


def _say_world(name: str, by_seed: Mapping[int, Mapping[str, dict[str, Any]]], found: Findings) -> None:
    for seed, of_arms in by_seed.items():
        for arm, run in of_arms.items():
            if "missing" in run:
                found.notes.append(f"{name}, seed {seed}, {arm}: missing: {run['missing']}")
            elif run.get("load_beside", 0.0) > BESIDE:
                found.notes.append(f"{name}, seed {seed}, {arm}: other work took {run['load_beside']} cores")
            if first := run.get("disturbed"):
                said = (
                    f"took {first['seconds']:.0f} s beside other work ({first['load_beside']} cores), and ran once more"
                )
                found.notes.append(f"{name}, seed {seed}, {arm}: {said}")
    by_arm = {arm: [of_arms[arm] for of_arms in by_seed.values()] for arm in next(iter(by_seed.values()))}
    ended = {arm: [run for run in runs if "seconds" in run] for arm, runs in by_arm.items()}
    for arm, runs in ended.items():
        if runs:
            found.put(f"{name}: {arm} seconds", median_with_interval([run["seconds"] for run in runs]), digits=1)
    for clock, suffix in CLOCKS.items():
        complete = {arm: [run[clock] for run in runs] for arm, runs in by_arm.items() if all(clock in r for r in runs)}
        _compare(name, complete, suffix, found)
    if name == "calm":
        found.targets[f"{name}: loop on / loop off"] = "<= 1.01"
    if "torchrec" in by_arm:
        found.targets[f"{name}: torchrec / loop on"] = ">= 1.25"
    gain = found.figures.get(f"{name}: static / clairvoyant")
    if "clairvoyant" in by_arm and name not in ("calm", "tight") and (gain is None or gain - 1 >= LEAST_GAIN):
        found.targets[f"{name}: recovered"] = ">= 0.6" if name == "straggler" else ">= 0.8"
    found.put(f"{name}: commits", commits(run for runs in by_arm.values() for run in runs))
    if looped := ended.get("loop"):
        actions = [move["action"] for run in looped for move in run["moves"]]
        found.put(f"{name}: moves, roll-backs", [actions.count("moved"), actions.count("rolled_back")])
        found.notes.append(f"{name}, loop on, mean s: {_own_costs(looped)}")


def _misjudged(looped: Sequence[Mapping[str, Any]], measure: str) -> list[tuple[float, int]]:
    """By job that moved tables and measured that: points off of all its moves, and how many these are."""
    jobs = []
    for run in looped:
        gains = [(move["predicted_gain"], move.get(measure)) for move in run["moves"]]
        points = [100 * abs(one - other) for one, other in gains if one is not None and other is not None]
        jobs += [(sum(points), len(points))] if points else []
    return jobs


def _seeds_that_ran(of_world: Mapping[int, Mapping[str, Any]], seeds: int) -> list[int]:
    """Those below `seeds`, and others with all arms that the first one has."""
    first = [arm for arm, run in of_world.get(0, {}).items() if "seconds" in run]
    more = [s for s, runs in of_world.items() if first and all("seconds" in runs[arm] for arm in first)]
    return sorted({*range(seeds), *more})


def _compare(world: str, seconds: Mapping[str, Sequence[float]], suffix: str, found: Findings) -> None:
    """Ratios of arms, and what the loop recovered, by one clock. seconds: by seed, of the arms that have all seeds."""
    for what, above, below in RATIOS:
        if above in seconds and below in seconds:
            found.put(f"{world}: {what}{suffix}", paired_ratio(seconds[above], seconds[below]))
    if "loop" not in seconds or "planned" not in seconds:
        return
    gain = found.figures.get(f"{world}: static / clairvoyant{suffix}", 0.0) - 1
    if world not in ("calm", "tight") and gain >= LEAST_GAIN:
        by_seed = [seconds[arm] for arm in ("loop", "planned", "clairvoyant")]
        found.put(f"{world}: recovered{suffix}", recovered(*([1 / s for s in taken] for taken in by_seed)))
        # Of all seeds together: jobs of different seeds have different tables, so that medians over them compare one
        # job with another.
        found.put(f"{world}: recovered of all seeds' seconds{suffix}", with_interval(_saved_of_what_could_be, *by_seed))


def _worst(done: Runs, arms: Arms, clock: str) -> Ratio | None:
    """Worst ratio of all worlds and seeds of which both jobs have run. While others are missing, it may come to any
    more."""
    pairs = [[runs.get(arm, {}) for arm in ("loop", "planned")] for name in arms for runs in done[name].values()]
    ran = [looped[clock] / planned[clock] for looped, planned in pairs if clock in looped and clock in planned]
    if not ran:
        return None
    return Ratio(max(ran), max(ran), max(ran) if len(ran) == len(pairs) else np.inf)


def _own_costs(looped: Sequence[Mapping[str, Any]]) -> str:
    items = {i: fmean(run["phases_seconds"].get(i, 0.0) for run in looped) for i in ("planning", "checkpoints")}
    items |= {i: fmean(run[f"{i}_seconds"] for run in looped) for i in ("profiling", "deciding", "moving")}
    return ", ".join(f"{item} {seconds:.2f}" for item, seconds in items.items())


def _saved_of_what_could_be(looped: np.ndarray, static: np.ndarray, best: np.ndarray) -> np.ndarray:
    return share_of_gap((static - looped).sum(axis=-1), (static - best).sum(axis=-1))


def _starts(done: Runs, found: Findings) -> None:
    """Seconds to the end of the first step, in all worlds: planned, and more than round robin where both have run."""
    jobs = [arms for by_seed in done.values() for arms in by_seed.values() if "seconds" in arms.get("planned", {})]
    pairs = [arms for arms in jobs if "seconds" in arms.get("round_robin", {})]
    told = [arms["planned"]["phases_seconds"] for arms in jobs if "building" in arms["planned"]["phases_seconds"]]
    if told:
        of_start = {phase: fmean(one[phase] for one in told) for phase in ("joining", "planning", "building")}
        said = ", ".join(f"{phase} {seconds:.2f}" for phase, seconds in of_start.items())
        found.notes.append(f"of a planned job's start, mean s of {len(told)} jobs: {said}; then its first checkpoint")
    for what, target, second in (("", True, _first_step), (", till the model is built", False, _built)):
        planned = [second(arms["planned"]) for arms in jobs]
        more = [second(arms["planned"]) - second(arms["round_robin"]) for arms in pairs]
        for name, bound, values in ((f"{PLANNED_START}{what}", "<= 15", planned), (f"{LATER}{what}", "<= 5", more)):
            ratio = median_with_interval(values) if values else None
            found.put(name, ratio, bound if target else None, digits=1)


def _first_step(run: Mapping[str, Any]) -> float:
    """By the first steps' pace: metrics are written every few steps."""
    (at, step), *others = run["points"][:6]
    later, last = others[-1] if others else (2 * at, 2 * step)
    return float(at - (step - 1) * (later - at) / (last - step))


def _built(run: Mapping[str, Any]) -> float:
    return float(run["first_step_seconds"])
