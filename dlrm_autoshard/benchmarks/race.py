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
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.harness import STATE, BenchError, commit
from dlrm_autoshard.benchmarks.race_arms import ARMS, Arms, Refused, Runs, missing_peer, run_arm
from dlrm_autoshard.benchmarks.race_picture import page, panels
from dlrm_autoshard.benchmarks.race_summary import every, summarise
from dlrm_autoshard.benchmarks.race_turns import in_typical_round, steps_in_turns
from dlrm_autoshard.benchmarks.race_worlds import QUICK, WORLDS, Scale, World
from dlrm_autoshard.benchmarks.slices import machine, other_work
from dlrm_autoshard.records.jsonl import append_jsonl, read_jsonl

TITLE = "whole jobs, with resharding and without, clairvoyant, and TorchRec's, in six worlds: seconds, start to end"
ROUGH_TIME = "a day; goes on where it was stopped (quick: 1 min)"
SEEDS = 5
REPLAYED = ("round_robin", "heuristic", "planned", "loop", "clairvoyant")
NOT_RUN, ROWS = "not run yet", "rows.jsonl"
QUIET = 0.1
"""Cores. A job beside which other work took more is run once more, however long it took: the second one counts, and the
record names both."""


def run(quick: bool) -> dict[str, Any]:
    if quick:
        return outcome_of(Path("runs/race-quick"), {"abrupt": ("planned", "loop")}, 1, QUICK)
    return outcome_of(Path("runs/race"), dict.fromkeys(WORLDS, ARMS), SEEDS, Scale())


def outcome_of(folder: Path, arms: Arms, seeds: int, scale: Scale) -> dict[str, Any]:
    """Runs what is not saved in `folder` yet; figures of all of it, and the picture."""
    _saved_before(folder)
    done = race(folder, arms, seeds, scale)
    (folder / ROWS).unlink(missing_ok=True)
    for name, seed, arm, run in every(done):
        append_jsonl(folder / ROWS, {"of": [name, seed, arm], **run})
    ran = sum(all(r.get("missing") != NOT_RUN for by in done.values() for r in by[s].values()) for s in range(seeds))
    outcome = summarise(done, arms, max(1, ran))
    outcome["figures"]["seeds"], outcome["targets"]["seeds"] = ran, f">= {seeds}"
    (folder / "race.html").write_text(page(done))
    (folder / "race.svg").write_text(panels(done))
    outcome["notes"].append(f"the pictures: {folder}/race.html, of all jobs, and race.svg, of a job a world")
    return outcome


def _saved_before(folder: Path) -> None:
    """Runs that are in the rows alone, as where a clone goes on with those of the repository (results/rows): with whole
    worlds, as `_pairless` says."""
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
    for *_, run in every(done):
        _add_clocks(run, scale)
    return done


def _saved(path: Path) -> dict[str, Any]:
    """A run that ended or was refused, in this state of the code; one that failed is tried again."""
    known = json.loads(path.read_text()) if path.exists() else {}
    return known if known.get("state") == STATE and _settled(known) else {"missing": NOT_RUN}


def _settled(run: Mapping[str, Any]) -> bool:
    return "seconds" in run or run.get("refused", False)


def _add_clocks(run: dict[str, Any], scale: Scale) -> None:
    if scale.checkpoints and "checkpoints" in run.get("phases_seconds", {}):
        before = scale.epochs / (scale.epochs + 1)  # one is written after the last step, which ends the clock
        run["unsaved_seconds"] = run["seconds"] - before * run["phases_seconds"]["checkpoints"]
    if "steps_seconds" in run:
        run["net_seconds"] = run["steps_seconds"] + run["deciding_seconds"] + run["moving_seconds"]
        run["planned_seconds"] = run["net_seconds"] + run["phases_seconds"].get("planning", 0.0)


def _pairless(arms: Sequence[str], place: Path, runs: Mapping[str, dict[str, Any]]) -> list[str]:
    """Jobs of another day or machine, which are no pair for those that are still to run; and their plans, which take
    turns with those of the others, are not here. So such a world is run anew as a whole."""
    missing = any(not _settled(runs[arm]) and missing_peer(arm) is None for arm in arms)
    return [arm for arm in arms if missing and _settled(runs[arm]) and not (place / arm).exists()]


def _ran(arm: str, world: World, place: Path) -> dict[str, Any]:
    with other_work() as beside:
        try:
            found = run_arm(arm, world, place)
        except BenchError as error:
            found = {"missing": str(error), "refused": isinstance(error, Refused)}
    return {**found, **beside}


def _run_missing(
    world: World, arms: Sequence[str], place: Path, runs: dict[str, dict[str, Any]], on: Mapping[str, Any]
) -> None:
    """Runs what is missing of one world and seed, into `runs`. on: the machine, as `slices.machine` says it."""
    pairless = _pairless(arms, place, runs)
    if pairless:
        print(f"{world.name}, seed {world.seed}: {', '.join(pairless)} ran elsewhere; all arms run anew", flush=True)
    for arm in np.random.default_rng([world.seed, WORLDS.index(world.name)]).permutation(list(arms)).tolist():
        if _settled(runs[arm]) and arm not in pairless:
            continue
        reason = missing_peer(arm)
        if reason is not None:  # not saved: it may be there next time
            runs[arm] = {"missing": reason}
            continue
        world.draw_data(place / "data")
        found = _ran(arm, world, place)
        if found["load_beside"] > QUIET and "seconds" in found:
            print(
                f"{world.name}, seed {world.seed}, {arm}: {found['seconds']}, beside other work: once more", flush=True
            )
            first = {key: found[key] for key in ("seconds", "load_beside")}
            found = {**_ran(arm, world, place), "disturbed": first}
        for old in pairless:  # from the first new job on
            runs[old] = {"missing": NOT_RUN}
            (place / f"{old}.json").unlink()
        pairless = []
        runs[arm] = {**found, "state": STATE, "commit": commit(), **on}
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
