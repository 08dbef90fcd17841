"""The race: its worlds are what they are called, its data what the loader asks for, what is done is not done again."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_autoshard.benchmarks import harness, race, race_arms, race_picture, race_simulated, race_summary, race_turns
from dlrm_autoshard.benchmarks.plans_in_turns import Turn
from dlrm_autoshard.benchmarks.race_short import SHORT
from dlrm_autoshard.benchmarks.race_simulated import EPOCHS, SimulatedWorld
from dlrm_autoshard.benchmarks.race_worlds import WORLDS, Replayed, Scale, World, WorldName
from dlrm_autoshard.benchmarks.recorded_cluster import RecordedCluster
from dlrm_autoshard.config import TablesConfig, parse_config
from dlrm_autoshard.data.sources.custom import open_custom
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.tables import TableStats

TINY = Scale(tables=5, gib=0.01, batch=32, epochs=4, steps=6, distinct=2)


@pytest.mark.parametrize("name", WORLDS)
def test_a_world_changes_when_it_says_and_in_what_it_is_called_after(name: WorldName) -> None:
    world = World(name, seed=1)
    phases = [world.phase_of(epoch) for epoch in range(world.scale.epochs)]
    assert phases == sorted(phases) and phases[0] == 0 and phases[-1] == world.phases - 1
    pooled = [world.pooling(phase) for phase in phases]
    changed = any((one != other).any() for one, other in zip(pooled[1:], pooled, strict=False))
    assert changed == (name in ("abrupt", "gradual"))
    if name == "abrupt":
        assert sorted(pooled[0]) == sorted(pooled[-1])
    assert bool(world.busy_epochs) == (name == "straggler")
    assert (world.memory_gib is not None) == (name == "tight")
    assert World(name, seed=1).tables == world.tables != World(name, seed=2).tables


@pytest.mark.parametrize("name", ["gradual", "hot-ids"])
def test_its_data_are_the_phases_batches_over_and_over(name: WorldName, tmp_path: Path) -> None:
    world = World(name, seed=0, scale=TINY)
    world.draw_data(tmp_path)
    config = parse_config(world.config(tmp_path, {"enabled": False}))
    assert config.data.source == "custom"
    source = open_custom(config.data, TablesConfig())
    assert isinstance(source, Replayed)
    drawn = TINY.distinct * TINY.batch * 2
    first, again = source.read("train", 0, 32, 64), source.read("train", 0, 32 + drawn, 64 + drawn)
    assert first.values_N.equal(again.values_N) and first.lengths_TB.equal(again.lengths_TB)
    later = source.read("train", TINY.epochs - 1, 32, 64)
    assert not later.values_N.equal(first.values_N)
    if name == "hot-ids":
        assert later.lengths_TB.equal(first.lengths_TB)
    whole = source.read("train", 0, 0, drawn)
    table, start = 3, int(whole.lengths_TB[:3].sum() + whole.lengths_TB[3, :32].sum())
    begin, count = int(first.lengths_TB[:table].sum()), int(first.lengths_TB[table].sum())
    assert whole.values_N[start : start + count].equal(first.values_N[begin : begin + count])


@pytest.mark.parametrize("seed", range(5))
def test_a_tight_world_has_a_plan(seed: int) -> None:
    world = World("tight", seed, SHORT)
    stats = [TableStats(float(pooling)) for pooling in world.pooling(0)]
    limit = int((world.memory_gib or 0) * 2**30)
    task = PlacementTask.build(world.tables, stats, Topology(2, memory_bytes=(limit, limit)), batch_size=2048)
    assert task.allows(Planner("size_greedy").plan(task).plan)


def test_in_a_tight_world_the_heuristic_keeps_to_the_memory_and_round_robin_is_refused(tmp_path: Path) -> None:
    world = World("tight", 0, Scale(tables=12, gib=0.05, batch=64, epochs=2, steps=10, distinct=2, checkpoints=False))
    world.draw_data(tmp_path / "data")
    assert race_arms.run_arm("heuristic", world, tmp_path)["seconds"] > 0
    with pytest.raises(race_arms.Refused, match="short"):
        race_arms.run_arm("round_robin", world, tmp_path)


def finished(seconds: float, **more: Any) -> dict[str, Any]:
    points = [[seconds / 2, 5], [seconds, 10]]
    costs = {"phases_seconds": {}, "profiling_seconds": 0.2, "deciding_seconds": 0.1, "moving_seconds": 0.1}
    return {"points": points, "seconds": seconds, "first_step_seconds": 3.0, "moves": [], **costs, **more}


def test_what_is_done_is_not_done_again_and_what_fails_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def run_arm(arm: str, world: World, folder: Path) -> dict[str, Any]:
        asked.append(arm)
        (folder / arm).mkdir(parents=True, exist_ok=True)
        if arm == "round_robin":
            raise race_arms.BenchError("it broke")
        if arm == "heuristic":
            raise race_arms.Refused("it does not fit")
        return finished(10.0, moves=[{"step": 7, "action": "moved", "predicted_gain": 0.2, "measured_gain": 0.1}])

    def steps_in_turns(world: World, folder: Path, arms: Sequence[str]) -> tuple[dict[str, list[float]], Any]:
        asked.append("turns")
        return {arm: [4.0, 6.0, 5.0] if arm == "planned" else [2.0, 3.0, 10.0] for arm in arms}, {7: 0.25}

    monkeypatch.setattr(race, "run_arm", run_arm)
    monkeypatch.setattr(race, "steps_in_turns", steps_in_turns)
    monkeypatch.setattr(race, "other_work", lambda: nullcontext({"load_beside": 0.0}))  # else another each time
    monkeypatch.setattr(race, "machine", lambda: {"load_before": 0.0})
    arms: race_arms.Arms = {"calm": ("loop", "planned", "round_robin", "heuristic")}
    once = race.race(tmp_path, arms, 1, TINY)
    assert sorted(asked[:-1]) == sorted(arms["calm"]) and asked.pop() == "turns"
    # In two of three rounds, whether the machine was slow in them or not, it took half as long.
    assert [once["calm"][0][arm]["steps_seconds"] for arm in ("planned", "loop")] == [5, 2.5]
    found = race_summary.summarise(once, arms, 1)["figures"]
    assert (found[race_summary.MISJUDGED], found[f"{race_summary.MISJUDGED}, in turns"]) == pytest.approx((10, 5))
    assert race.race(tmp_path, arms, 1, TINY) == once and asked[4:] == ["round_robin"]  # what failed is tried again
    saved = tmp_path / "calm-0" / "loop.json"
    saved.write_text(json.dumps(json.loads(saved.read_text()) | {"state": -1}))  # of an earlier state of the code
    asked.clear()
    race.race(tmp_path, arms, 1, TINY)
    assert sorted(asked) == ["loop", "round_robin", "turns"]
    notes = race_summary.summarise(once, arms, 1)["notes"]
    assert "calm, seed 0, round_robin: missing: it broke" in notes
    assert "calm, seed 0, heuristic: missing: it does not fit" in notes


def test_a_job_beside_other_work_runs_once_more_and_both_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one counts, though it took longer."""
    ran: list[str] = []

    def run_arm(arm: str, world: World, folder: Path) -> dict[str, Any]:
        ran.append(arm)
        return finished(10.0 * len(ran), steps_seconds=5.0)

    monkeypatch.setattr(race, "run_arm", run_arm)
    monkeypatch.setattr(race, "other_work", lambda: nullcontext({"load_beside": 0.4 if len(ran) < 2 else 0.05}))
    arms: race_arms.Arms = {"calm": ("loop", "planned")}
    done = race.race(tmp_path, arms, 1, TINY)
    first, second = sorted(done["calm"][0].values(), key=lambda run: run["seconds"])
    assert ran[0] == ran[1] and len(ran) == 3
    assert (first["seconds"], first["disturbed"]) == (20.0, {"seconds": 10.0, "load_beside": 0.4})
    assert second["seconds"] == 30.0 and "disturbed" not in second
    notes = race_summary.summarise(done, arms, 1)["notes"]
    assert f"calm, seed 0, {ran[0]}: took 10 s beside other work (0.4 cores), and ran once more" in notes


def test_an_interrupted_race_says_what_is_missing_and_has_the_figures_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_arm(arm: str, world: World, folder: Path) -> dict[str, Any]:
        if world.name == "tight":
            raise KeyboardInterrupt
        return finished(10.0, steps_seconds=5.0)

    monkeypatch.setattr(race, "run_arm", run_arm)
    arms: race_arms.Arms = {"calm": ("loop", "planned"), "tight": ("loop", "planned")}
    outcome = race.outcome_of(tmp_path, arms, 1, TINY)
    assert outcome["figures"]["calm: loop on / loop off"] == 1
    assert "tight: loop seconds" not in outcome["figures"]
    assert "tight, seed 0, planned: missing: not run yet" in outcome["notes"]
    assert outcome["figures"]["seeds"] == 0 and outcome["targets"]["seeds"] == ">= 1"
    monkeypatch.setattr(race, "run_arm", lambda arm, world, folder: finished(20.0, steps_seconds=5.0))
    there = tmp_path / "elsewhere"
    there.mkdir()
    shutil.copy(tmp_path / "rows.jsonl", there)  # of what was done, the rows are enough to go on
    outcome = race.outcome_of(there, arms, 1, TINY)
    assert outcome["figures"]["calm: loop seconds"] == 10 and outcome["figures"]["tight: loop seconds"] == 20
    assert outcome["figures"]["seeds"] == 1


def test_jobs_that_ran_elsewhere_are_no_pair_for_those_that_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_arm(arm: str, world: World, folder: Path) -> dict[str, Any]:
        if not took:
            raise KeyboardInterrupt
        (folder / arm).mkdir(parents=True)
        return finished(took, steps_seconds=5.0)

    monkeypatch.setattr(race, "run_arm", run_arm)
    both, there = ("loop", "planned"), tmp_path / "there"
    there.mkdir()
    took = 10.0
    race.outcome_of(tmp_path, {"abrupt": both, "calm": both[:1]}, 1, TINY)
    shutil.copy(tmp_path / "rows.jsonl", there)
    took = 0.0
    figures = race.outcome_of(there, {"abrupt": both, "calm": both}, 1, TINY)["figures"]
    assert figures["calm: loop seconds"] == 10  # until a new job has ended
    took = 20.0
    figures = race.outcome_of(there, {"abrupt": both, "calm": both}, 1, TINY)["figures"]
    assert [figures[f"abrupt: {arm} seconds"] for arm in both] == [10, 10]  # a world that is complete stays
    assert [figures[f"calm: {arm} seconds"] for arm in both] == [20, 20]
    took = 30.0
    figures = race.outcome_of(there, {"calm": (*both, "round_robin")}, 1, TINY)["figures"]
    assert [figures[f"calm: {arm} seconds"] for arm in (*both, "round_robin")] == [20, 20, 30]


def test_shares_are_of_the_clairvoyants_gain_and_missing_arms_are_missed_targets() -> None:
    seconds = {"loop": 82.0, "planned": 90.0, "clairvoyant": 80.0, "round_robin": 100.0}
    done = {"abrupt": {seed: {arm: finished(s + seed) for arm, s in seconds.items()} for seed in range(3)}}
    for by_arm in done["abrupt"].values():
        by_arm["torchrec"] = {"missing": "it is not installed"}
    outcome = race_summary.summarise(done, {"abrupt": (*seconds, "torchrec")}, 3)
    assert outcome["figures"]["abrupt: recovered"] == pytest.approx(0.8, abs=0.02)
    assert outcome["figures"]["abrupt: round robin / clairvoyant"] == pytest.approx(1.25, abs=0.01)
    assert "abrupt: torchrec / loop on" in outcome["targets"]
    assert "abrupt: torchrec / loop on" not in outcome["figures"]
    assert outcome["figures"]["worst run: loop on / loop off"] < 1
    done["abrupt"][1]["loop"] = {"missing": "it was killed"}
    outcome = race_summary.summarise(done, {"abrupt": tuple(seconds)}, 3)
    assert outcome["figures"]["worst run: loop on / loop off"] == pytest.approx(84 / 92)
    assert outcome["spread"]["worst run: loop on / loop off"][1] == np.inf, "the one that is missing may be any worse"


def test_the_worst_run_is_of_all_that_ran_also_where_a_seed_is_not_complete() -> None:
    """Of seeds of which not all worlds and arms had run, the slowest was left out."""
    seconds = {0: (10.0, 10.1), 1: (10.0, 10.5)}
    runs = {s: {"planned": finished(one), "loop": finished(other)} for s, (one, other) in seconds.items()}
    calm = {0: {arm: finished(8.0) for arm in runs[0]}, 1: {arm: {"missing": race.NOT_RUN} for arm in runs[0]}}
    outcome = race_summary.summarise(
        {"abrupt": runs, "calm": calm}, {"abrupt": tuple(runs[0]), "calm": tuple(runs[0])}, 1
    )
    assert outcome["figures"][race_summary.WORST] == pytest.approx(1.05)
    assert harness.finish("race", False, outcome, 1.0)["verdicts"][race_summary.WORST] == "missed"


def test_a_start_ends_with_the_first_step() -> None:
    """Not when the model is there: the first checkpoint comes between."""
    points = [[11.0, 10], [13.0, 20], [15.0, 30]]
    jobs = {"planned": finished(40.0, points=points), "round_robin": finished(40.0, points=[[8.0, 10], [10.0, 20]])}
    figures = race_summary.summarise({"calm": {0: jobs}}, {"calm": tuple(jobs)}, 1)["figures"]
    assert figures["start: planned, s"] == pytest.approx(11.0 - 9 * 0.2)
    assert figures["start: planned more than round robin, s"] == pytest.approx(3.0)
    assert figures["start: planned, s, till the model is built"] == 3.0


def test_a_world_is_told_by_all_seeds_that_ran_as_far_as_the_first() -> None:
    """Not only by those of which all worlds have run: every run is told of."""
    some = {s: {"planned": finished(10.0 + s), "loop": finished(9.0 + s)} for s in range(3)}
    some[2]["loop"] = {"missing": race.NOT_RUN}
    one = {s: {arm: finished(8.0) if s == 0 else {"missing": race.NOT_RUN} for arm in some[0]} for s in range(3)}
    outcome = race_summary.summarise(
        {"abrupt": some, "calm": one}, {"abrupt": tuple(some[0]), "calm": tuple(one[0])}, 1
    )
    assert outcome["figures"]["abrupt: planned seconds"] == 10.5 and outcome["figures"]["calm: planned seconds"] == 8.0
    assert not any("missing" in note for note in outcome["notes"])


def test_how_far_gains_were_misjudged_is_a_mean_over_moves_with_an_interval_over_jobs() -> None:
    def job(*points: float) -> dict[str, Any]:
        known = [{"action": "moved", "predicted_gain": 0.1 + p / 100, "measured_gain": 0.1} for p in points]
        return finished(9.0, moves=[*known, {"action": "moved", "predicted_gain": 0.5, "measured_gain": None}])

    jobs = [job(1.0, 3.0), job(8.0), job(), *[job(2.0, 2.0)] * 3]
    done = {"abrupt": {seed: {"loop": one} for seed, one in enumerate(jobs)}}
    outcome = race_summary.summarise(done, {"abrupt": ("loop",)}, len(jobs))
    assert outcome["figures"][race_summary.MISJUDGED] == pytest.approx(24 / 9)
    low, high = outcome["spread"][race_summary.MISJUDGED]
    assert 1.9 < low < 24 / 9 < high < 8.1


def test_the_same_is_said_of_the_steps_alone_where_they_ran_again() -> None:
    steps = {"loop": 62.0, "planned": 70.0, "clairvoyant": 60.0}
    done = {"abrupt": {seed: {arm: finished(90.0, steps_seconds=s) for arm, s in steps.items()} for seed in range(3)}}
    figures = race_summary.summarise(done, {"abrupt": tuple(steps)}, 3)["figures"]
    assert figures["abrupt: recovered, steps alone"] == pytest.approx(0.8, abs=0.03)
    assert figures["abrupt: loop on / loop off, steps alone"] == pytest.approx(62 / 70)
    assert figures["abrupt: recovered of all seeds' seconds, steps alone"] == pytest.approx(0.8)
    assert figures["worst run: loop on / loop off, steps alone"] == pytest.approx(62 / 70)
    assert "abrupt: recovered" not in figures, "the whole jobs took equally long"


def test_a_share_has_no_upper_end_where_other_seeds_would_leave_nothing_to_gain() -> None:
    """As where a clairvoyant, which plans by what a start measures, found worse plans in some jobs."""
    steps = {"loop": [62.0] * 5, "planned": [70.0] * 5, "clairvoyant": [50.0, 60.0, 78.0, 60.0, 60.0]}
    jobs = {s: {arm: finished(90.0, steps_seconds=of[s]) for arm, of in steps.items()} for s in range(5)}
    outcome = race_summary.summarise({"abrupt": jobs}, {"abrupt": tuple(steps)}, 5)
    key = "abrupt: recovered of all seeds' seconds, steps alone"
    assert outcome["figures"][key] == pytest.approx(40 / 42)
    low, high = outcome["spread"][key]
    assert 0.3 < low < 40 / 42 and high == np.inf


def test_a_jobs_steps_are_counted_by_phase_and_plan(tmp_path: Path) -> None:
    world = World("abrupt", seed=0, scale=Scale(tables=4, epochs=4, steps=10))
    one, other = (ShardingPlan({t.name: i % n for i, t in enumerate(world.tables)}, 2) for n in (1, 2))
    for step, plan in ((0, one), (25, other)):
        plan.save(tmp_path / "loop" / "job" / "plan" / f"step_{step:08d}.json")
    counted = race_turns.steps_by_plan(world, race_turns.plans_by_step(world, tmp_path, "loop"))
    (change,) = world.changes
    expected = Counter((int(at >= 10 * change), (one if at < 25 else other).fingerprint) for at in range(40))
    assert {key: count for key, (_, count) in counted.items()} == expected


def test_a_move_is_judged_by_both_plans_on_the_data_that_came_after_it(tmp_path: Path) -> None:
    world = World("abrupt", seed=0, scale=Scale(tables=4, epochs=4, steps=10))
    one, other = (ShardingPlan({t.name: i % n for i, t in enumerate(world.tables)}, 2) for n in (1, 2))
    (change,) = world.changes
    moves = race_turns.moves_in(world, {0: one, 10 * change: other, 10 * change + 3: one, world.total_steps: other})
    assert moves == {
        10 * change: (1, Turn(one), Turn(other)),
        10 * change + 3: (1, Turn(other), Turn(one)),
    }


def test_the_picture_marks_moves_and_needs_nothing_else() -> None:
    move = {"step": 5, "text": "moved <2> tables"}
    page = race_picture.page({"abrupt": {0: {"loop": finished(9.0, moves=[move]), "torchrec": {"missing": "no"}}}})
    assert page.count("<polyline") == 1 and page.count("<circle") == 1 and "moved &lt;2&gt; tables" in page
    assert "http" not in page and "<script" not in page


def test_a_panel_shows_the_seed_whose_ratio_is_the_median_and_is_whole_xml() -> None:
    move = {"step": 5, "text": "moved 2 tables"}
    seeds = {
        seed: {"loop": finished(seconds, moves=[move] * seed), "planned": finished(10.0), "clairvoyant": finished(7.0)}
        for seed, seconds in enumerate((12.0, 9.0, 8.0))
    }
    drawn = race_picture.panels({"abrupt": seeds, "tight": {0: {"loop": finished(9.0), "planned": {}}}})
    assert ElementTree.fromstring(drawn).tag.endswith("svg")
    assert drawn.count("<polyline") == 2 and drawn.count("<circle") == 1, "seed 1's; a world without a pair has none"


def test_a_line_that_is_being_written_is_no_step_yet(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 10}\n{"step": 20}\n{"st')
    assert race_arms.last_step(tmp_path / "metrics.jsonl") == 20
    assert race_arms.last_step(tmp_path / "none.jsonl") == 0


def test_a_simulated_cell_without_a_job_is_a_missed_target() -> None:
    outcome = race_simulated.summarise([], (8,), ("calm", "abrupt", "straggler"), 20)
    assert outcome["targets"]["8 ranks, abrupt: recovered"] == ">= 0.8"
    assert outcome["targets"]["8 ranks, straggler: recovered"] == ">= 0.6"
    assert "8 ranks, calm: recovered" not in outcome["targets"]
    assert outcome["figures"] == {"seeds": 0} and outcome["targets"]["seeds"] == ">= 20"


# Simulated ------------------------------------------------------------------------------------------------------------


def test_recorded_shards_cost_about_what_was_recorded_and_more_tables_cost_more() -> None:
    pool = synthetic_pool(20, seed=3, batch_size=2048)
    cluster = RecordedCluster(pool.tables, seed=0)
    few, all_of_them = (cluster.compute_ms(pool.stats, 2048, range(count)) for count in (5, 20))
    assert (few > 0).all() and (few < all_of_them).all()
    names = [table.name for table in pool.tables]
    together = ShardingPlan(dict.fromkeys(names, 0), 4)
    apart = ShardingPlan({name: i % 4 for i, name in enumerate(names)}, 4)
    assert cluster.step_ms(pool.stats, apart, 2048) < cluster.step_ms(pool.stats, together, 2048)
    before = cluster.step_ms(pool.stats, apart, 2048)
    cluster.slowdown = {2: 50.0}
    assert cluster.step_ms(pool.stats, apart, 2048) > before


@pytest.mark.parametrize("name", WORLDS)
def test_a_simulated_world_changes_what_its_name_says(name: WorldName) -> None:
    stats = synthetic_pool(10, seed=1, batch_size=2048).stats
    world = SimulatedWorld(name, seed=0, world_size=8, num_tables=10)
    by_epoch = world.stats_by_epoch(stats)
    pooling = np.array([[s.mean_pooling for s in epoch] for epoch in by_epoch])
    reuse = np.array([[s.mean_reuse for s in epoch] for epoch in by_epoch])
    assert len(by_epoch) == EPOCHS and np.allclose(pooling[0], [s.mean_pooling for s in stats])
    assert (not np.allclose(pooling, pooling[0])) == (name in ("abrupt", "gradual"))
    assert (not np.allclose(reuse, reuse[0])) == (name == "hot-ids")
    assert any(world.slowdown(epoch) for epoch in range(EPOCHS)) == (name == "straggler")


def test_a_simulated_tight_world_has_a_plan_and_not_every_one_fits() -> None:
    pool = synthetic_pool(200, seed=1000, batch_size=2048)
    (limit, *_) = SimulatedWorld("tight", 0, 8, 200).memory_bytes(pool.tables) or (0,)
    topology = Topology(8, memory_bytes=(limit,) * 8)
    sizes = {table.name: table.weight_bytes for table in pool.tables}
    task = PlacementTask.build(pool.tables, pool.stats, topology, batch_size=2048, table_bytes=sizes)
    assert task.allows(Planner("size_greedy").plan(task).plan)
    assert not task.allows(ShardingPlan({table.name: i % 8 for i, table in enumerate(pool.tables)}, 8))
