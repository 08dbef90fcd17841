"""Records of a run: what they say about stragglers, that they survive crashes, and how they are read back."""

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.costs import PLANNED_STAGES, STAGES, WAITS, RankCost, StageTime
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.records.diagnosis import describe_straggler, drift, table_costs_ms
from dlrm_autoshard.records.facts import RankInterval, rank_file
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import SCHEMA, ReportError, append_jsonl, forget_after, read_jsonl
from dlrm_autoshard.records.plans import write_plan
from dlrm_autoshard.records.run import RESULT, RunRecord
from dlrm_autoshard.report.comparison import side_by_side
from dlrm_autoshard.report.page_data import page_data
from dlrm_autoshard.report.page_sections import page_sections
from dlrm_autoshard.report.summary import autoshard_overhead, earlier_stragglers, summary
from dlrm_autoshard.report.verdict import autoshard_in_one_line, left_to_save, verdict
from dlrm_autoshard.tables import TableConfig, TableStats
from dlrm_autoshard.training.run_log import Journal
from tests.report_records import BASE_MS, make_profile, make_ranks, make_tables, write_run

# -- who is slow, and why ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heavy", [0, 1, 3])
def test_the_rank_with_twice_the_lookups_is_named_with_its_stage_and_tables(heavy: int) -> None:
    profile = make_profile(work=[2.0 if rank == heavy else 1.0 for rank in range(4)], num_tables=20)
    straggler = profile.straggler
    assert straggler is not None
    assert (straggler.rank, straggler.cause) == (heavy, "load")
    assert straggler.stage in ("fwd_compute", "bwd_compute")
    owned = {table.name: table.mean_pooling * table.embedding_dim for table in profile.tables if table.rank == heavy}
    assert [name for name, _ in straggler.tables] == sorted(owned, key=lambda name: -owned[name])[:3]
    assert f"rank {heavy}" in straggler.sentence and "too much work" in straggler.sentence


def test_the_fast_ranks_time_is_waiting_and_not_communication() -> None:
    profile = make_profile(work=(1.0, 2.0))
    assert profile.wait_ms["fwd_comms_wait"][0] > 4.0 > 0.5 > profile.wait_ms["fwd_comms_wait"][1]
    assert max(profile.stage_ms["fwd_comms"]) / min(profile.stage_ms["fwd_comms"]) < 1.05
    assert profile.to_json()["waited_for"]["fwd_comms_wait"]["rank"] == 1
    assert profile.accounted == pytest.approx(1.0)


def test_a_rank_whose_core_is_shared_is_starved_and_its_tables_are_not_blamed() -> None:
    straggler = make_profile(work=(1, 1, 1), cpu_share=(0.99, 0.5, 0.98)).straggler
    assert straggler is not None
    assert (straggler.rank, straggler.cause, straggler.tables) == (1, "starved of CPU", ())
    assert "got only 50% of its CPU core" in straggler.sentence


def test_a_rank_with_too_much_work_and_a_slightly_shared_core_is_overloaded() -> None:
    straggler = make_profile(work=(1, 2.5), cpu_share=(0.99, 0.85)).straggler
    assert straggler is not None and (straggler.rank, straggler.cause) == (1, "load")


def test_where_all_ranks_are_starved_alike_the_one_with_more_work_is_overloaded() -> None:
    profile = make_profile(work=(1, 2), cpu_share=(0.5, 0.48))
    assert profile.straggler is not None and (profile.straggler.rank, profile.straggler.cause) == (1, "load")
    late = make_profile(work=(2, 1), cpu_share=(0.6, 0.2)).straggler  # less work, but later: it had less of its core
    assert late is not None and (late.rank, late.cause) == (1, "starved of CPU")
    record = RunRecord("x", {}, (profile,))
    assert any("Every rank got at most" in sentence for sentence in summary(record))


def test_even_ranks_have_no_straggler_and_one_rank_has_none() -> None:
    assert make_profile(work=(1, 1, 1)).straggler is None
    assert make_profile(work=(1,)).straggler is None


def noisy_profile(draw: np.random.Generator, samples: int, work: Sequence[float] = (1.0, 1.0)) -> IntervalProfile:
    """Each stage of each sampled step is off by 15%, as on a machine with neighbours."""
    tables, stats = make_tables(8)
    plan = ShardingPlan({t.name: i % len(work) for i, t in enumerate(tables)}, len(work))
    ranks = []
    for rank in make_ranks(plan, tables, work):
        seen = {n: [t.median_ms * max(0.1, 1 + 0.15 * draw.standard_normal()) for _ in range(samples)]
                for n, t in rank.stages.items()}  # fmt: skip
        stages = {n: StageTime.of([1e-3 * ms for ms in times]) for n, times in seen.items()}
        ranks.append(replace(rank, stages=stages))
    return IntervalProfile.gather(ranks, plan, tables, stats, 2048)


@pytest.mark.parametrize("samples", [3, 4, 8, 20])
def test_nobody_is_blamed_for_noise(samples: int) -> None:
    """However few steps were sampled, and though the slower of two ranks always lies above their mean."""
    draw = np.random.default_rng(samples)
    profiles = [noisy_profile(draw, samples) for _ in range(60)]
    blamed = [profile for profile in profiles if profile.straggler is not None]
    assert len(blamed) <= 6
    said = [describe_straggler(profile) or "" for profile in profiles if profile.straggler is None]
    assert any(f"No rank is significantly slower: over {samples} sampled steps" in text for text in said)


def test_whoever_is_slow_is_blamed_with_an_interval_once_enough_steps_were_sampled() -> None:
    profiles = [noisy_profile(np.random.default_rng(seed), 20, work=(1.0, 2.0)) for seed in range(20)]
    found = [profile.straggler for profile in profiles if profile.straggler is not None]
    assert len(found) == 20 and all(straggler.rank == 1 for straggler in found)
    excess_ms = 0.5 * (BASE_MS["fwd_compute"] + BASE_MS["bwd_compute"])
    assert sum(s.low_ms < excess_ms < s.high_ms for s in found) >= 14
    assert f"a step ({found[0].low_ms:.3g} to {found[0].high_ms:.3g})" in found[0].sentence


def test_a_table_is_said_to_limit_the_plan_only_with_the_rank_that_it_makes_slow() -> None:
    tables, stats = make_tables(4)
    heavy = [replace(stat, mean_pooling=900.0 if i == 1 else 1.0) for i, stat in enumerate(stats)]
    plan = ShardingPlan({table.name: i % 2 for i, table in enumerate(tables)}, 2)
    slow = IntervalProfile.gather(make_ranks(plan, tables, (1.0, 3.0)), plan, tables, heavy, 2048)
    assert "This table alone limits the plan" in (describe_straggler(slow) or "") and "'cat_1'" in (
        describe_straggler(slow) or ""
    )
    even = IntervalProfile.gather(make_ranks(plan, tables, (1.0, 1.0)), plan, tables, heavy, 2048)
    assert "limits" not in (describe_straggler(even) or "")


def test_stages_that_were_not_measured_are_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As in a custom loop, whose dense part nobody times: null in the records, and no zeros anywhere."""
    run = write_run(tmp_path / "run", epochs=1)
    ranks = [RankInterval.from_json(read_jsonl(rank_file(run, rank))[0]) for rank in (0, 1)]
    lacking = [
        replace(rank, stages={n: t for n, t in rank.stages.items() if not n.startswith("dense")}) for rank in ranks
    ]
    tables, stats = make_tables(12)
    profile = IntervalProfile.gather(lacking, RunRecord.load(run).last.plan, tables, stats, 2048)
    line = json.loads(json.dumps(profile.to_json()))
    assert line["stage_ms"]["dense_fwd"] is None and lacking[0].to_json()["dense_bwd"] is None
    assert profile.unmeasured == ("dense_fwd", "dense_bwd", "dense_optim")
    left_out = {**line, "stage_ms": {n: times for n, times in line["stage_ms"].items() if times is not None}}
    for record in (line, left_out):
        assert IntervalProfile.from_json(record) == profile
    epochs_file(run).unlink()
    append_jsonl(epochs_file(run), left_out)
    assert main(["report", str(run)]) == 0
    shown = capsys.readouterr().out
    assert "dense_fwd" in shown and shown.count("not measured") == 3
    page = page_data(RunRecord.load(run))
    assert set(page["ranks"]["dense_fwd"]) == {None}


def test_a_rank_that_waits_for_data_is_told_from_a_loaded_one() -> None:
    profile = make_profile(work=(1, 1))
    late = {**profile.stage_ms, "data_wait": (0.1, 9.0)}
    straggler = IntervalProfile(**{**vars(profile), "stage_ms": late}).straggler
    assert straggler is not None and (straggler.rank, straggler.cause, straggler.stage) == (1, "slow data", "data_wait")


def test_perfect_balance_saves_what_the_slowest_ranks_take_beyond_the_mean() -> None:
    profile = make_profile(work=(1.0, 2.0))
    planned = [profile.stage_ms[stage] for stage in PLANNED_STAGES]
    excess = sum(max(times) - sum(times) / 2 for times in planned)
    assert profile.step_ms - profile.balanced_ms == pytest.approx(excess)
    assert excess == pytest.approx(0.5 * (5.0 + 7.0), rel=0.1)
    assert profile.balance_gain == pytest.approx(excess / profile.mean_step_ms)


def test_table_costs_add_up_to_what_was_measured() -> None:
    profile = make_profile(work=(1.0, 1.5, 2.0), num_tables=30)
    costs = table_costs_ms(profile)
    for rank in range(3):
        owned = sum(costs[table.name] for table in profile.tables if table.rank == rank)
        assert owned == pytest.approx(profile.measured[rank].total_ms)


def test_prediction_error_is_of_the_step_and_of_each_stage() -> None:
    tables, stats = make_tables(4)
    plan = ShardingPlan({table.name: i % 2 for i, table in enumerate(tables)}, 2)
    ranks = make_ranks(plan, tables, (1.0, 2.0))
    exact = IntervalProfile.gather(ranks, plan, tables, stats, 2048, [rank.cost for rank in ranks])
    half = [RankCost(*(0.5 * rank.cost.stage(stage) for stage in PLANNED_STAGES)) for rank in ranks]
    low = IntervalProfile.gather(ranks, plan, tables, stats, 2048, half)
    assert exact.prediction_error == pytest.approx(0.0)
    assert low.prediction_error == pytest.approx(0.5) and low.prediction_bias == pytest.approx(-0.5)
    assert low.to_json()["prediction_error_by_stage"]["bwd_compute"] == pytest.approx(0.5)
    # Ranks that were mistaken for each other: the step was foreseen, and no rank was.
    swapped = IntervalProfile.gather(ranks, plan, tables, stats, 2048, [rank.cost for rank in reversed(ranks)])
    assert swapped.prediction_bias == pytest.approx(0.0)
    assert swapped.prediction_error is not None and swapped.prediction_error > 0.3
    nothing = IntervalProfile.gather(ranks, plan, tables, stats, 2048)
    assert nothing.prediction_error is nothing.prediction_bias is None
    assert nothing.to_json()["prediction_error_by_stage"] is None


# -- records and files -------------------------------------------------------------------------------------------------

times = st.just(0.0) | st.floats(1e-4, 1e4)  # a clock does not tell less apart


@st.composite
def profiles(draw: st.DrawFn) -> IntervalProfile:
    world = draw(st.integers(1, 5))
    names = draw(st.lists(st.text(min_size=1, max_size=8).filter(str.isprintable), max_size=6, unique=True))
    tables = [TableConfig(name, draw(st.integers(1, 10**9)), 4 * draw(st.integers(1, 64))) for name in names]
    stats = [TableStats(draw(st.floats(0, 500)), mean_reuse=draw(st.floats(1, 1e4))) for _ in names]
    plan = ShardingPlan({name: draw(st.integers(0, world - 1)) for name in names}, world)
    some = st.lists(st.sampled_from((*STAGES, *WAITS)), unique=True)
    ranks = [
        RankInterval(
            3, 10, 20, rank, draw(st.text(max_size=5)), "cpu", plan.shards_on(rank), draw(st.integers(0, 2**40)),
            {name: StageTime(draw(times), draw(times), draw(times), draw(st.integers(1, 99))) for name in draw(some)},
            draw(times), draw(times), draw(st.none() | st.floats(0, 1)), draw(st.integers(0, 2**40)),
        )
        for rank in range(world)
    ]  # fmt: skip
    for rank in ranks:
        assert RankInterval.from_json(json.loads(json.dumps(rank.to_json()))) == rank
    predicted: Sequence[RankCost] | None = None
    if draw(st.booleans()):
        predicted = [RankCost(draw(times), draw(times), draw(times), draw(times)) for _ in range(world)]
    return IntervalProfile.gather(draw(st.permutations(ranks)), plan, tables, stats, 1024, predicted)


@given(profiles())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_any_profile_comes_back_from_its_json_as_it_was(profile: IntervalProfile) -> None:
    line = json.dumps(profile.to_json(), allow_nan=False)
    assert IntervalProfile.from_json(json.loads(line)) == profile


def test_a_rank_missing_from_the_gathered_records_is_an_error() -> None:
    tables, stats = make_tables(3)
    plan = ShardingPlan({table.name: 0 for table in tables}, 2)
    with pytest.raises(ReportError, match=r"records of ranks \[0\] for a plan of 2 ranks"):
        IntervalProfile.gather(make_ranks(plan, tables, (1, 1))[:1], plan, tables, stats, 2048)


def test_a_torn_last_line_is_ignored_and_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "costs" / "epochs.jsonl"
    for epoch in range(3):
        append_jsonl(path, {"epoch": epoch})
    whole = path.read_bytes()
    for cut in range(1, 20):  # a crash may end the file anywhere
        path.write_bytes(whole[:-cut])
        assert [line["epoch"] for line in read_jsonl(path)] == [0, 1]
        append_jsonl(path, {"epoch": 2})
        assert path.read_bytes() == whole


def test_records_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for step in (1, 1, 5, 6):
        append_jsonl(path, {"step": step})
    append_jsonl(path, {"step": 5, "split": "val"})
    forget_after(tmp_path, 5)
    append_jsonl(path, {"step": 6, "again": True})
    assert [(line["step"], line.get("split"), "again" in line) for line in read_jsonl(path)] == [
        (1, None, False), (1, None, False), (5, None, False), (5, "val", False), (6, None, True)
    ]  # fmt: skip


def test_an_evaluation_that_is_made_again_after_a_resume_takes_the_earlier_ones_place(tmp_path: Path) -> None:
    """A kill may come between: until the new one is there the old one is."""
    path = tmp_path / "metrics.jsonl"
    for split in ("train", "val", "test"):
        append_jsonl(path, {"step": 5, "epoch": 0, "split": split, "auc": 0.1})
    journal = Journal(tmp_path, active=True, resumed_at=5)
    journal.metrics(5, 0, "val", {"auc": 0.2})
    journal.metrics(6, 0, "val", {"auc": 0.3})
    journal.metrics(6, 0, "train", {"auc": 0.4})
    assert [(line["step"], line["split"], line["auc"]) for line in read_jsonl(path)] == [
        (5, "train", 0.1), (5, "test", 0.1), (5, "val", 0.2), (6, "val", 0.3), (6, "train", 0.4)
    ]  # fmt: skip
    forget_after(tmp_path / "nothing", 1)
    assert not (tmp_path / "nothing").exists()


def test_plans_beyond_the_resumed_step_are_dropped(tmp_path: Path) -> None:
    plans = tmp_path / "plan"
    for step, tables in ((0, "ab"), (5, "ab"), (9, "ab")):
        ShardingPlan({table: step % 2 for table in tables}, 2).save(plans / f"step_{step:08d}.json")
        append_jsonl(plans / "evidence.jsonl", {"step": step})
    (plans / "step_of_mine.json").write_text("{}")  # nobody's record
    for resumed, left in ((5, [0, 5]), (-1, [])):
        forget_after(tmp_path, resumed)
        assert [int(path.stem.removeprefix("step_")) for path in sorted(plans.glob("step_0*.json"))] == left
        assert [line["step"] for line in read_jsonl(plans / "evidence.jsonl")] == left
    assert (plans / "step_of_mine.json").exists()


def test_not_a_number_is_written_as_null(tmp_path: Path) -> None:
    append_jsonl(tmp_path / "m.jsonl", {"auc": float("nan"), "stages": {"a": [float("inf"), 1.0]}})
    assert read_jsonl(tmp_path / "m.jsonl") == [{"schema": SCHEMA, "auc": None, "stages": {"a": [None, 1.0]}}]


# -- reading a run back ------------------------------------------------------------------------------------------------


def test_a_run_is_read_back_whole(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=3, tables=12))
    assert [profile.epoch for profile in record.intervals] == [0, 1, 2]
    assert len(record.ranks) == 12 and len(record.decisions) == 3 and record.stopped_early is None
    assert record.intervals[0].straggler is not None and record.intervals[0].straggler.rank == 3


def test_an_empty_directory_and_none_at_all_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"is empty: nothing to report"):
        RunRecord.load(tmp_path)
    with pytest.raises(ReportError, match=r"is not a directory"):
        RunRecord.load(tmp_path / "nowhere")
    (tmp_path / "photo.jpg").touch()
    with pytest.raises(ReportError, match=r"is not a run directory: .*only photo\.jpg"):
        RunRecord.load(tmp_path)


def test_a_run_killed_in_its_first_epoch_says_what_is_there(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=1)
    epochs_file(run).unlink()
    with pytest.raises(ReportError, match=r"no complete epoch yet.*It has config\.yaml, costs/.*up to step 100"):
        RunRecord.load(run)


def test_a_run_killed_in_a_later_epoch_is_reported_up_to_the_last_complete_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    lines = epochs_file(run).read_bytes().splitlines(keepends=True)
    epochs_file(run).write_bytes(lines[0] + lines[1] + lines[2][:100])
    (run / RESULT).unlink()
    record = RunRecord.load(run)
    assert len(record.intervals) == 2 and {rank.epoch for rank in record.ranks} == {0, 1}
    assert "up to step 200 (last metrics: step 300), in epoch 1 (from 0) of 3" in (record.stopped_early or "")


@pytest.mark.parametrize("epochs", [1, 2])
def test_a_run_killed_after_a_part_of_its_last_epoch_is_said_to_have_ended_there(tmp_path: Path, epochs: int) -> None:
    run = write_run(tmp_path / "run", epochs=epochs)
    *earlier, last = [json.loads(line) for line in epochs_file(run).read_text().splitlines()]
    lines = [*earlier, {**last, "end_step": last["end_step"] - 50}]
    epochs_file(run).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "metrics.jsonl").unlink()
    (run / RESULT).unlink()
    record = RunRecord.load(run)
    said = f"to step {100 * epochs - 50}, in epoch {epochs - 1} (from 0) of {epochs}."
    assert said in (record.stopped_early or "")
    assert replace(record, finished=True).stopped_early is None


@pytest.mark.parametrize("file", ["costs/epochs.jsonl", "metrics.jsonl", "costs/rank_00001.jsonl", "decisions.jsonl"])
def test_a_future_schema_is_a_clear_error(tmp_path: Path, file: str, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    append_jsonl(run / file, {"schema": SCHEMA + 6, "epoch": 9})
    assert main(["report", str(run)]) == 2
    said = capsys.readouterr().err
    assert f"has schema {SCHEMA + 6}" in said and "update dlrm_autoshard" in said and Path(file).name in said


DAMAGED = [
    b"\0" * 40,
    b"null",
    b"[1]",
    b'{"schema":1,"step":null}',
    b'{"schema":1,"step":1e999}',
    b'{"schema":1,"step":"7"}',
]


@pytest.mark.parametrize("file", ["costs/epochs.jsonl", "metrics.jsonl", "costs/rank_00001.jsonl", "decisions.jsonl"])
def test_damaged_lines_are_left_out_of_a_report_with_a_warning(
    tmp_path: Path, file: str, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", epochs=3)
    whole = RunRecord.load(run)
    lines = (run / file).read_bytes().splitlines()
    (run / file).write_bytes(b"".join(line + b"\n" for line in [lines[0], *DAMAGED, *lines[1:]]))
    assert replace(RunRecord.load(run), config={}) == replace(whole, config={})
    [said] = [record.getMessage() for record in caplog.records]
    assert f"{file}' is damaged: 6 lines, the first line 2 left out: it is not JSON (line 1, column 1" in said
    assert main(["report", str(run)]) == 0


def test_a_line_of_the_wrong_kind_is_left_out_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = write_run(tmp_path / "run", epochs=2)
    append_jsonl(epochs_file(run), {"epoch": 7})
    assert [profile.epoch for profile in RunRecord.load(run).intervals] == [0, 1]
    assert "line 3 left out: " in caplog.text and "is missing" in caplog.text


def test_damaged_lines_are_set_aside_where_a_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ("metrics.jsonl", "decisions.jsonl", "costs/epochs.jsonl", "costs/rank_00000.jsonl", "plan/evidence.jsonl")
    newer = b'{"schema":99,"step":1}'
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        good = b'{"schema":1,"step":%d}'
        lines = [good % 1, *DAMAGED, newer, good % 2, good % 9]
        (tmp_path / name).write_bytes(b"".join(line + b"\n" for line in lines) + b'{"torn')
    forget_after(tmp_path, 5)
    for name in names:
        assert [line["step"] for line in read_jsonl(tmp_path / name)] == [1, 2]
        assert (tmp_path / f"{name}.damaged").read_bytes().splitlines() == [*DAMAGED, newer]
        assert f"{name}' is damaged: 7 lines, the first line 2 moved to '{tmp_path / name}.damaged'" in caplog.text
    caplog.clear()
    forget_after(tmp_path, 5)
    assert not caplog.records, "said once"
    log = DecisionLog(tmp_path / "decisions.jsonl")
    with log.path.open("ab") as file:
        file.write(DAMAGED[0] + b"\n")
    log.write({"step": 2, "action": "kept"})
    log.write({"step": 3, "action": "kept"})
    assert [(line["step"], line.get("action")) for line in read_jsonl(log.path)] == [
        (1, None),
        (2, "kept"),
        (3, "kept"),
    ]


def test_a_record_that_cannot_be_rewritten_or_read_ends_no_training(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("metrics.jsonl", "decisions.jsonl"):
        (tmp_path / name).mkdir()
    forget_after(tmp_path, 5)
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 1})
    DecisionLog(tmp_path / "decisions.jsonl").write({"step": 1})
    assert len(caplog.records) == 5 and all("cannot be" in record.getMessage() for record in caplog.records)


def test_a_run_without_profiling_still_has_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("profile: {enabled: false}\n")
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 9, "epoch": 0, "split": "test", "auc": 0.71234})
    assert main(["report", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "Profiling was off" in said and "auc 0.7123" in said


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.usefixtures("narrow")
@pytest.mark.parametrize(("ranks", "epochs", "tables"), [(1, 1, 3), (2, 3, 12), (64, 20, 1000)])
def test_the_terminal_report_fits_80_columns_and_about_two_screens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ranks: int, epochs: int, tables: int
) -> None:
    run = write_run(tmp_path / "a_run_with_a_rather_long_name", ranks, epochs, tables)
    assert main(["report", str(run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and len(lines) < 125
    assert any("Where the step goes" in line for line in lines)


@pytest.mark.usefixtures("narrow")
def test_the_terminal_report_names_the_straggler(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", ranks=2, epochs=1)
    straggler = RunRecord.load(run).last.straggler
    assert straggler is not None
    assert main(["report", str(run)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert f"Rank 1 makes the others wait {straggler.excess_ms:.3g} ms" in said and straggler.tables[0][0] in said


@pytest.mark.usefixtures("narrow")
def test_an_epoch_without_a_sampled_step_is_reported_as_such(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", epochs=1, tables=3)
    ranks = [RankInterval.from_json(read_jsonl(rank_file(run, rank))[0]) for rank in (0, 1)]
    short = [replace(rank, epoch=1, stages={}, step_ms=0.0) for rank in ranks]
    tables, stats = make_tables(3)
    plan = RunRecord.load(run).last.plan
    append_jsonl(epochs_file(run), IntervalProfile.gather(short, plan, tables, stats, 2048).to_json())
    assert main(["report", str(run)]) == 0
    assert "None of these 100 steps was sampled, so there are no stage times. Lower profile.warmup_steps" in " ".join(
        capsys.readouterr().out.split()
    )
    assert main(["report", str(run), "--html"]) == 0
    assert RunRecord.load(run).last.straggler is None, "where nothing was measured nobody was slow"


@pytest.mark.usefixtures("narrow")
def test_two_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = write_run(tmp_path / "two", ranks=2, epochs=1), write_run(tmp_path / "four", ranks=4, epochs=3)
    assert main(["report", str(one), str(other)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert next(line for line in lines if line.split()[:1] == ["ranks"]).split()[1:3] == ["2", "4"]
    assert main(["report", str(one), str(other), str(one)]) == 2


def test_json_holds_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == SCHEMA and len(found["epochs"]) == 3 and found["epochs"][0]["straggler"]["rank"] == 1
    assert found["summary"] == summary(RunRecord.load(run))


def test_a_last_interval_of_a_step_or_two_does_not_hide_what_is_known(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=2))
    short = replace(record.last, first_step=200, end_step=202, samples=1, error_ms={})
    grown = replace(record, intervals=(*record.intervals, short), decisions=())
    assert (
        verdict(grown)[0] == describe_straggler(record.last) and "perfect balance would have saved" in verdict(grown)[1]
    )
    assert "202 steps." in " ".join(summary(grown))


def test_csv_has_a_row_for_every_epoch_rank_and_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run", ranks=2, epochs=3)
    assert main(["report", str(run), "--csv"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert len(rows) == 2 * 3 * (len(STAGES) + len(WAITS))
    assert len({row.rsplit(",", 5)[0] for row in rows}) == len(rows), "an epoch's intervals are told apart"
    first = dict(zip(head.split(","), rows[0].split(","), strict=True))
    rank = RankInterval.from_json(read_jsonl(rank_file(run, 0))[0])
    assert float(first["p95_ms"]) == rank.stages[first["stage"]].p95_ms


def test_stragglers_of_earlier_epochs_and_what_autoshard_did_are_told(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=6, starved_epoch=2))
    assert earlier_stragglers(record) == [
        "Earlier stragglers: rank 3 (load) in epochs 0 to 1 and rank 0 (starved of CPU) in epoch 2."
    ]
    first, *_ = moves = [decision for decision in record.decisions if decision["action"] == "moved"]
    one = replace(record, decisions=(first,))
    assert autoshard_in_one_line(one) == (
        "1 move ('cat_1' from rank 1 to 0): saved 13.9% (11.2 to 16.6%) of a step, paid back after 80 steps"
    )
    two = (first, {**moves[1], "measured_gain": 0.078, "measured_low": 0.05, "measured_high": 0.1})
    assert autoshard_in_one_line(replace(record, decisions=two)) == (
        "2 moves: saved 13.9% (11.2 to 16.6%) and 7.8% (5.0 to 10.0%) of a step, paid back after 80 and 80 steps"
    )
    even = {**first, "measured_gain": -0.0001, "paid_back_after_steps": None}
    and_back = (two[0], {"action": "kept"}, two[1], {"action": "rolled_back"}, even)
    assert "saved 13.9% (11.2 to 16.6%) and 0.0% (11.2" in autoshard_in_one_line(replace(record, decisions=and_back))
    doubted = {**first, "doubt": "a rank got only 60% of its CPU core", "paid_back_after_steps": None}
    said = "gain unknown (a rank got only 60% of its CPU core)"
    assert autoshard_in_one_line(replace(record, decisions=(doubted,))).endswith(f": {said}")
    assert "gain of 1 of them unknown (no interval after it)" in autoshard_in_one_line(
        replace(record, decisions=(first, {"action": "moved"}))
    )


def test_what_it_cost_is_told_beside_what_the_whole_took(tmp_path: Path) -> None:
    record = replace(RunRecord.load(write_run(tmp_path / "run")), seconds={"planning": 1.26, "total": 83.4})
    decisions = tuple({**d, "decide_seconds": 0.25, "move_seconds": 0.5} for d in record.decisions)
    assert len(decisions) == 3
    assert autoshard_overhead(replace(record, decisions=decisions)) == [
        "Deciding took 0.8 s and moving tables 1.5 s of 83 s; planning before the start took 1.3 s."
    ]
    continued = replace(record, decisions=decisions, starts=2)  # of the starts before nobody knows what they took
    assert autoshard_overhead(continued) == ["Of the run's time, deciding took 0.8 s and moving tables 1.5 s."]
    assert autoshard_overhead(replace(record, decisions=())) == []


def test_a_run_that_cannot_move_tables_says_how_to_let_them_where_it_matters(tmp_path: Path) -> None:
    record = replace(RunRecord.load(write_run(tmp_path / "run", ranks=4)), decisions=())
    assert record.last.balance_gain > 0.01 and "dlrm-autoshard explain RUN" in verdict(record)[-1]
    assert "explain" not in verdict(replace(record, config={}))[-1], "a loop of one's own has no config to plan by"
    even = replace(record, intervals=(make_profile([1.0, 1.0]),))
    assert not any("explain" in sentence for sentence in verdict(even))


def test_the_verdict_does_not_praise_or_blame_a_speed_that_was_left(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=4, epochs=6))
    move = {"action": "moved", "measured_gain": 0.1, "measured_low": 0.05, "measured_high": 0.15}
    taken_back = replace(record, decisions=(move, {"action": "rolled_back"}, {"action": "kept"}))
    assert autoshard_in_one_line(taken_back) == "1 move, 1 undone, including the last one"


def test_splitting_a_table_is_no_drift_of_the_data() -> None:
    tables, stats = make_tables(3)
    parts = [*(tables[0].part(at, at + tables[0].embedding_dim // 2) for at in (0, tables[0].embedding_dim // 2))]
    profiles = []
    for shards, of in ((tables, stats), ([*parts, *tables[1:]], [stats[0], *stats])):
        plan = ShardingPlan({table.name: i % 2 for i, table in enumerate(shards)}, 2)
        profiles.append(IntervalProfile.gather(make_ranks(plan, shards, (1.0, 1.0)), plan, shards, of, 2048))
    assert drift(*profiles) == pytest.approx(0.0, abs=1e-9)
    page = page_data(RunRecord("run", {}, tuple(profiles)))["tables"]
    assert {name.partition("[")[0] for name in page["name"]} == {table.name for table in tables}
    for at, profile in zip(page["at"], profiles, strict=True):
        shown = {name for name, rank in zip(page["name"], at["rank"], strict=True) if rank is not None}
        assert shown == {use.name for use in profile.tables}


def test_where_nothing_moved_the_verdict_says_why(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=2, epochs=3))
    told = record.decisions[-1]
    later = [{**told, "step": step, "text": f"kept: {why}"} for step, why in
             ((400, "nothing has changed since step 300"), (500, "no steps are left"))]  # fmt: skip
    kept = replace(record, decisions=(told, *later))
    assert (
        autoshard_in_one_line(kept)
        == "no move in 3 decisions (at step 300: best candidate 1.2% faster, below min_gain 2%)"
    )


def test_no_epoch_is_lost_when_intervals_are_shorter_than_epochs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", epochs=2)
    lines = [json.loads(line) for line in epochs_file(run).read_text().splitlines()]
    epochs_file(run).unlink()
    for line in lines:
        append_jsonl(epochs_file(run), {**line, "epoch": 0})
    record = RunRecord.load(run)
    assert [record.label(profile) for profile in record.intervals] == ["0 (0-99)", "0 (100-199)"]


def in_parts(run: Path) -> RunRecord:
    """Its two epochs as the halves of one, the latter evaluated."""
    for file in (epochs_file(run), run / "metrics.jsonl", *(rank_file(run, rank) for rank in (0, 1))):
        lines = [json.loads(line) for line in file.read_text().splitlines()]
        file.unlink()
        for line in lines:
            if line.get("split") != "val" or line["step"] == 200:
                append_jsonl(file, {**line, "epoch": 0})
    return RunRecord.load(run)


@pytest.mark.usefixtures("narrow")
def test_a_part_of_an_epoch_is_not_called_the_epoch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = in_parts(write_run(tmp_path / "run", epochs=2))
    assert any(sentence.startswith("In steps 100 to 199 a step took") for sentence in summary(record))
    assert earlier_stragglers(record) == ["Earlier stragglers: rank 1 (load) in steps 0 to 99."]
    assert page_data(record)["epochs"]["text"][0].startswith("In steps 0 to 99 a step took")
    assert main(["report", str(tmp_path / "run")]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = " ".join(" ".join(lines).split())
    for title in ("Where the step goes, steps 100 to 199", "Ranks, steps 100 to 199", "Predicted, steps 100 to 199"):
        assert title in said
    assert "slowest" in next(line for line in lines if "uneven" in line) and max(map(len, lines)) <= 80
    assert sum("0.7000" in line.split() for line in lines) == 1, (
        "the evaluation after the latter part is none of the former"
    )
    three = RunRecord.load(write_run(tmp_path / "whole", epochs=3))
    assert any(sentence.startswith("In epoch 2 a step took") for sentence in summary(three))


def test_what_was_not_sampled_has_no_figures(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", epochs=1))
    nothing = {name: (0.0, 0.0) for name in STAGES}
    short = replace(record.last, samples=0, stage_ms=nothing, step_ms_by_rank=(0.0, 0.0))
    rows = {name: cells for name, *cells in side_by_side(record, replace(record, intervals=(short,)))}
    assert rows["fwd_compute, slowest rank, ms"][1:] == ["-", ""] and rows["sampled step ms"][1:] == ["-", ""]
    assert rows["examples/s"][0] == rows["examples/s"][1] != "-"


def test_one_rank_is_not_told_what_balance_would_save(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=1, epochs=1))
    said = summary(record)
    assert said[0] == "With one rank there is nothing to place." and "balance" not in " ".join(said)


def test_the_page_and_the_last_decision_name_one_figure_for_perfect_balance(tmp_path: Path) -> None:
    record = RunRecord.load(write_run(tmp_path / "run", ranks=2, epochs=3))
    decided = [*record.decisions[:-1], {**record.decisions[-1], "balance_gain": 0.1234}]
    of_decision = replace(record, decisions=tuple(decided))
    page, figures = page_data(of_decision), dict((key, body) for key, _, body in page_sections(of_decision, set()))
    [said] = left_to_save(of_decision)
    assert said.startswith("In epoch 2 perfect balance would have saved 12.3% (") and said in page["epochs"]["text"][-1]
    assert said in verdict(of_decision) and "12.3% <small>" in figures["summary"]
    left = record.last.step_ms - 0.1234 * record.last.mean_step_ms
    assert page["epochs"]["balanced_ms"][-1] == pytest.approx(left, rel=1e-3)
    earlier = replace(record, decisions=tuple({**decision, "step": 0} for decision in decided))
    assert f"{record.last.balance_gain:.1%}"[:-1] in left_to_save(earlier)[0]


def test_records_that_a_failing_disk_does_not_take_are_lost_with_a_warning_each(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 9})

    def read_only(_: int) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "fsync", read_only)
    append_jsonl(tmp_path / "metrics.jsonl", {"step": 10})
    DecisionLog(tmp_path / "decisions.jsonl").write({"step": 10})
    write_plan(tmp_path, 10, ShardingPlan({"a": 0}, 1))
    forget_after(tmp_path, 5)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) >= 4 and all("cannot be" in line and line.endswith("Read-only file system") for line in said)
