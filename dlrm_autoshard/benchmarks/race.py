"""Does a whole job end sooner with resharding? Every arm is a real job, from its process's start to its last step.

A job of 60 tables, 8 epochs of 400 steps on two ranks, in six worlds (race_worlds.py), by seven arms (race_arms.py),
the arms of a world and seed one after another in random order. Every run that ended is in the record, none is chosen.
What is done lies in runs/race, each run a line of rows.jsonl: the benchmark goes on where it was stopped.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import STATE, BenchError, Findings, commit
from dlrm_autoshard.benchmarks.paired import Ratio, median_with_interval, paired_ratio, ratio_of_means, with_interval
from dlrm_autoshard.benchmarks.plans_in_turns import recovered, share_of_gap
from dlrm_autoshard.benchmarks.race_arms import ARMS, DECIDES_EVERY, PLANNING_SECONDS, missing_peer, run_arm
from dlrm_autoshard.benchmarks.race_picture import Runs, page, panels
from dlrm_autoshard.benchmarks.race_turns import ROUNDS, in_typical_round, steps_in_turns
from dlrm_autoshard.benchmarks.race_worlds import QUICK, WORLDS, Scale, World, WorldName
from dlrm_autoshard.benchmarks.slices import commits, machine, origins, other_work
from dlrm_autoshard.records.jsonl import append_jsonl, read_jsonl

TITLE = "whole jobs, with resharding and without, clairvoyant, and TorchRec's, in six worlds: seconds, start to end"
ROUGH_TIME = "a day; goes on where it was stopped (quick: 1 min)"
SEEDS, LEAST_GAIN = 5, 0.05
BESIDE = 0.3
"""Cores that other work had beside a job, from which on that is said."""
REPLAYED = ("round_robin", "heuristic", "planned", "loop", "clairvoyant")
CLOCKS = {
    "seconds": "",
    "unsaved_seconds": ", checkpoints left out",
    "steps_seconds": ", steps alone",
    "net_seconds": ", steps, deciding and moving",
    "planned_seconds": ", steps, planning, deciding and moving",
}
PLANNED_START, LATER = "start: planned, s", "start: planned more than round robin, s"
WORST = "worst run: loop on / loop off"
NOT_RUN, ROWS = "not run yet", "rows.jsonl"
MISJUDGED = "gain predicted - measured of moves, points"
RATIOS = (
    ("loop on / loop off", "loop", "planned"),
    ("round robin / clairvoyant", "round_robin", "clairvoyant"),
    ("static / clairvoyant", "planned", "clairvoyant"),
    ("torchrec / loop on", "torchrec", "loop"),
)
Arms = Mapping[WorldName, Sequence[str]]
"""Which run in which world."""


def run(quick: bool) -> dict[str, Any]:
    if quick:
        return outcome_of(Path("runs/race-quick"), {"abrupt": ("planned", "loop")}, 1, QUICK)
    return outcome_of(Path("runs/race"), dict.fromkeys(WORLDS, ARMS), SEEDS, Scale())


def outcome_of(folder: Path, arms: Arms, seeds: int, scale: Scale) -> dict[str, Any]:
    """Runs what is not saved in `folder` yet; figures of all of it, and the picture."""
    _saved_before(folder)
    done = race(folder, arms, seeds, scale)
    (folder / ROWS).unlink(missing_ok=True)
    for name, seed, arm, run in _every(done):
        append_jsonl(folder / ROWS, {"of": [name, seed, arm], **run})
    ran = sum(all(r.get("missing") != NOT_RUN for by in done.values() for r in by[s].values()) for s in range(seeds))
    outcome = summarise(done, arms, max(1, ran))
    outcome["figures"]["seeds"], outcome["targets"]["seeds"] = ran, f">= {seeds}"
    (folder / "race.html").write_text(page(done))
    (folder / "race.svg").write_text(panels(done))
    outcome["notes"].append(f"the pictures: {folder}/race.html, of all jobs, and race.svg, of a job a world")
    return outcome


def _saved_before(folder: Path) -> None:
    """Runs that are in the rows alone, as where a clone goes on with those of the repository (results/rows)."""
    for row in read_jsonl(folder / ROWS):
        name, seed, arm = row["of"]
        saved = folder / f"{name}-{seed}" / f"{arm}.json"
        if "state" in row and not saved.exists():
            saved.parent.mkdir(parents=True, exist_ok=True)
            saved.write_text(json.dumps({key: value for key, value in row.items() if key not in ("of", "schema")}))


def race(folder: Path, arms: Arms, seeds: int, scale: Scale) -> Runs:
    """All runs that are not saved yet, all worlds of one seed after the other, and then all of them. A run that fails
    is saved with its reason, and tried again the next time; where it is interrupted, the rest is missing."""
    done: dict[str, dict[int, dict[str, dict[str, Any]]]] = {
        name: {
            seed: {arm: _saved(folder / f"{name}-{seed}" / f"{arm}.json") for arm in arms[name]}
            for seed in range(seeds)
        }
        for name in arms
    }
    on = machine()
    try:
        for seed in range(seeds):
            for name in arms:
                _run_missing(World(name, seed, scale), arms[name], folder / f"{name}-{seed}", done[name][seed], on)
    except KeyboardInterrupt:
        print(f"Stopped. What was done lies in {folder}; the same command goes on there.", flush=True)
    for *_, run in _every(done):
        _add_clocks(run, scale)
    return done


def _saved(path: Path) -> dict[str, Any]:
    """A run that ended, in this state of the code; one that failed is tried again."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return known if known.get("state") == STATE and "seconds" in known else {"missing": NOT_RUN}


def _add_clocks(run: dict[str, Any], scale: Scale) -> None:
    if scale.checkpoints and "checkpoints" in run.get("phases_seconds", {}):
        before = scale.epochs / (scale.epochs + 1)  # one is written after the last step, which ends the clock
        run["unsaved_seconds"] = run["seconds"] - before * run["phases_seconds"]["checkpoints"]
    if "steps_seconds" in run:
        run["net_seconds"] = run["steps_seconds"] + run["deciding_seconds"] + run["moving_seconds"]
        run["planned_seconds"] = run["net_seconds"] + run["phases_seconds"].get("planning", 0.0)


def _run_missing(
    world: World, arms: Sequence[str], place: Path, runs: dict[str, dict[str, Any]], on: Mapping[str, Any]
) -> None:
    """Of one world and seed, into `runs`. on: the machine, as `slices.machine` says it."""
    for arm in np.random.default_rng([world.seed, WORLDS.index(world.name)]).permutation(list(arms)).tolist():
        if "seconds" in runs[arm]:
            continue
        reason = missing_peer(arm)
        if reason is not None:  # not saved: it may be there next time
            runs[arm] = {"missing": reason}
            continue
        world.draw_data(place / "data")
        with other_work() as beside:
            try:
                found = run_arm(arm, world, place)
            except BenchError as error:
                found = {"missing": str(error)}
        runs[arm] = {**found, "state": STATE, "commit": commit(), **on, **beside}
        (place / f"{arm}.json").write_text(json.dumps(runs[arm]))
        print(f"{world.name}, seed {world.seed}, {arm}: {found.get('missing') or found['seconds']}", flush=True)
    again = [arm for arm in REPLAYED if "seconds" in runs.get(arm, {})]
    if any("steps_seconds" not in runs[arm] for arm in again):
        world.draw_data(place / "data")
        seconds_of, gains = steps_in_turns(world, place, again)
        for move in runs.get("loop", {}).get("moves", []):
            move["gain_in_turns"] = gains.get(move["step"])
        for arm, seconds in in_typical_round(seconds_of).items():
            runs[arm]["steps_seconds"] = seconds
            (place / f"{arm}.json").write_text(json.dumps(runs[arm]))
    shutil.rmtree(place / "data", ignore_errors=True)  # gibibytes, and drawn again in a minute


# What it says ---------------------------------------------------------------------------------------------------------


def summarise(done: Runs, arms: Arms, seeds: int) -> dict[str, Any]:
    """Figures, targets, spread, notes. seeds: those that have to have run; of a world more count where all arms have
    run that the first seed has. A world's target that has no figure, since arms are missing, is missed; that of a share
    where there is nothing to recover is not set.

    A share is recovered of what a clairvoyant gains over the plan of the start; how much that is stands beside it.
    """
    found = Findings()
    misjudged: dict[str, list[tuple[float, int]]] = {"measured_gain": [], "gain_in_turns": []}
    for name in arms:
        of = _seeds_that_ran(done[name], seeds)
        by_arm = {arm: [done[name][s][arm] for s in of] for arm in arms[name]}
        for arm, runs in by_arm.items():
            for seed, run in zip(of, runs, strict=True):
                if "missing" in run:
                    found.notes.append(f"{name}, seed {seed}, {arm}: missing: {run['missing']}")
                elif run.get("load_beside", 0.0) > BESIDE:
                    found.notes.append(f"{name}, seed {seed}, {arm}: other work took {run['load_beside']} cores")
            ended = [r["seconds"] for r in runs if "seconds" in r]
            if ended:
                found.put(f"{name}: {arm} seconds", median_with_interval(ended), digits=1)
        for clock, suffix in CLOCKS.items():
            complete = {arm: [r[clock] for r in runs] for arm, runs in by_arm.items() if all(clock in r for r in runs)}
            _compare(name, complete, suffix, found)
        if name == "calm":
            found.targets[f"{name}: loop on / loop off"] = "<= 1.01"
        if "torchrec" in by_arm:
            found.targets[f"{name}: torchrec / loop on"] = ">= 1.25"
        gain = found.figures.get(f"{name}: static / clairvoyant")
        if "clairvoyant" in by_arm and name not in ("calm", "tight") and (gain is None or gain - 1 >= LEAST_GAIN):
            found.targets[f"{name}: recovered"] = ">= 0.6" if name == "straggler" else ">= 0.8"
        found.put(f"{name}: commits", commits(run for runs in by_arm.values() for run in runs))
        looped = [r for r in by_arm.get("loop", []) if "seconds" in r]
        moves = [move for r in looped for move in r["moves"]]
        if looped:
            back = [sum(move["action"] == action for move in moves) for action in ("moved", "rolled_back")]
            found.put(f"{name}: moves, roll-backs", back)
            found.notes.append(f"{name}, loop on, mean s: {_own_costs(looped)}")
        for run in looped:
            for measure, jobs in misjudged.items():
                gains = [(move["predicted_gain"], move.get(measure)) for move in run["moves"]]
                points = [100 * abs(one - other) for one, other in gains if one is not None and other is not None]
                jobs += [(sum(points), len(points))] if points else []
    if any({"planned", "round_robin"} <= set(names) for names in arms.values()):
        _starts(done, found)
    for clock, suffix in CLOCKS.items():
        if not suffix or any(clock in run for *_, run in _every(done)):
            found.put(WORST + suffix, _worst(done, arms, clock))
    found.targets[WORST] = "<= 1.02"
    if jobs := misjudged["gain_in_turns"]:
        found.put(f"{MISJUDGED}, in turns", ratio_of_means(*zip(*jobs, strict=True)))
    if jobs := misjudged["measured_gain"]:
        found.put(MISJUDGED, ratio_of_means(*zip(*jobs, strict=True)), "<= 3")  # of all moves; drawn by job
    elif found.figures[WORST] is None:  # else races ran, and nothing moved: nothing was misjudged
        found.targets[MISJUDGED] = "<= 3"
    found.notes += [
        "seconds: from the process's start to the last step; interval: 95%, over seeds",
        "steps alone: the same plans over the same data in turns within one job, without start, decisions and moves; "
        "jobs one after the other differ by some percent under one plan. Deciding and moving of the jobs are added to "
        "that; planning with what was measured for it, which jobs without resharding do more of, is in figures of its "
        "own (it was added always, until 0.2.0)",
        f"turns: {ROUNDS} rounds, compared within each; before 6a4eff7 10, whose medians were",
        "gains are measured by the job itself, of the few steps before a move; in turns by the steps of both plans",
        "start: to the end of the first step, with the checkpoint before it; until 0.2.0 only till the model was built",
        "profiling: by how much sampled steps, which have barriers, took longer than the mean; steps alone have none",
        f"clairvoyants plan for up to {PLANNING_SECONDS:.0f} s since 9b1231b, for 20 before, which beside a busy core "
        "left a start too little to measure what spares it",
        f"loop on decides every {DECIDES_EVERY} steps (reshard.every_steps); all else is by default",
    ]
    return vars(found) | origins([run for *_, run in _every(done)])


def _seeds_that_ran(of_world: Mapping[int, Mapping[str, Any]], seeds: int) -> list[int]:
    """Those below `seeds`, and others with all arms that the first one has."""
    first = [arm for arm, run in of_world.get(0, {}).items() if "seconds" in run]
    more = [s for s, runs in of_world.items() if first and all("seconds" in runs[arm] for arm in first)]
    return sorted({*range(seeds), *more})


def _every(done: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[tuple[str, int, str, dict[str, Any]]]:
    """World, seed, arm and run."""
    return [(n, s, arm, run) for n, by in done.items() for s, by_arm in by.items() for arm, run in by_arm.items()]


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
    """Of all worlds and seeds of which both jobs have run. While others are missing, it may come to any more."""
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
    """Of all worlds: seconds to the end of the first step, planned, and more than round robin where both have run."""
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
