"""The planning subcommands end to end, on small pools; plans in TorchRec's form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.commands.arguments import ALGORITHM_NAMES
from dlrm_autoshard.commands.compare_planners import Outcome, summarise
from dlrm_autoshard.commands.main import main
from dlrm_autoshard.commands.planning import planner_of
from dlrm_autoshard.config import Algorithm, load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.data.statistics import measure_stats
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.planner.costs.exchange_model import ExchangeModel
from dlrm_autoshard.planner.dreamshard.drawn_tasks import TaskSet, draw_tasks
from dlrm_autoshard.planner.dreamshard.pool import TablePool, reuse_shares, synthetic_pool
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask, Splits
from dlrm_autoshard.probe.measured import Costs
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.summary import summary
from dlrm_autoshard.tables import NUM_REUSE_BINS, TableConfig, TableStats
from dlrm_autoshard.torchrec.plan_format import to_sharding_plan, torchrec_plan
from tests.report_records import write_run

MACHINE = {"device": "cpu", "processor": "a test", "fbgemm": "1.8.0"}


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    """The subcommand's JSON."""
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def tables_file(tmp_path: Path) -> Path:
    synthetic_pool(24, seed=0, batch_size=256, rows=(1e3, 1e5)).save(tmp_path / "tables.json")
    return tmp_path / "tables.json"


@pytest.fixture
def tasks_file(tmp_path: Path) -> Path:
    pool = synthetic_pool(24, seed=0, batch_size=256, rows=(1e3, 1e5))
    draw_tasks(pool, 6, 3, seed=0, batch_size=256).save(tmp_path / "tasks.json")
    return tmp_path / "tasks.json"


def test_tables_then_tasks_then_fit_then_evaluate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tables, tasks, fitted = tmp_path / "tables.json", tmp_path / "tasks.json", tmp_path / "fitted"
    run(capsys, "tables", "--synthetic", 24, "--batch-size", 256, "--out", tables)
    drawn = run(capsys, "tasks", "--tables", tables, "--tables-per-task", 6, "--count", 3, "--out", tasks)
    assert drawn["train_tasks"] == drawn["test_tasks"] == 3 and drawn["batch_size"] == 256
    simulated = ["--tasks", tasks, "--devices", 2, "--memory-gib", 30, "--costs", "simulated"]
    report = run(capsys, "fit", *simulated, "--iterations", 2, "--placements", 3, "--out", fitted)
    assert report["shards"] >= 6 and max(report["error_after"]) < max(report["error_before"])
    reference = tmp_path / "reference"
    run(capsys, "fit", *simulated, "--reference", "--iterations", 2, "--placements", 3, "--out", reference)
    chosen = ["--algorithm", fitted, "--algorithm", reference, "--algorithm", "lookup_greedy"]
    judged = run(capsys, "compare-planners", *simulated, *chosen, "--limit", 2, "--out", tmp_path / "judged.json")
    by_name = {row["algorithm"]: row for row in judged["algorithms"]}
    assert set(by_name) == {str(fitted), str(reference), "lookup_greedy", "random"} and judged["costs"] == "simulated"
    assert by_name["random"]["speedup_over_random"] == 1 and by_name["lookup_greedy"]["speedup_over_random"] > 1
    assert json.loads((tmp_path / "judged.json").read_text()) == judged


def test_fitted_costs_serve_every_algorithm_and_a_fitted_directory_is_its_own(
    tables_file: Path, tasks_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fitted, reference = tmp_path / "fitted", tmp_path / "reference"
    simulated = ["--tasks", tasks_file, "--devices", 2, "--costs", "simulated"]
    effort = ["--iterations", 1, "--placements", 2]
    report = run(capsys, "fit", *simulated, *effort, "--algorithm", "autoshard", "--out", fitted)
    assert report["algorithm"] == "autoshard" and report["placements"] > 50  # every placement that it tries
    run(capsys, "fit", *simulated, *effort, "--reference", "--out", reference)
    plan = ["plan", "--tables", tables_file, "--devices", 2]
    own = run(capsys, *plan, "--algorithm", fitted)
    assert own["chosen"]["name"] == "autoshard" and "fitted" in own["costs_from"]
    for name in ("auto", "search"):
        with_fitted = run(capsys, *plan, "--algorithm", name, "--fitted", fitted)
        assert with_fitted["costs_from"] == own["costs_from"]
        assert with_fitted["predicted_ms"] != run(capsys, *plan, "--algorithm", name)["predicted_ms"]
    assert run(capsys, *plan, "--algorithm", "dreamshard", "--fitted", reference)["chosen"]["name"] == "dreamshard"
    for arguments, message in (
        ([*plan, "--algorithm", "search", "--fitted", reference], "was made by `fit --reference`"),
        (["fit", *simulated, "--reference", "--algorithm", "rnn", "--out", fitted], "'rnn' has no reference version"),
    ):
        assert main([str(argument) for argument in arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split())
    names = ["--algorithm", "search", "--algorithm", "size_greedy", "--algorithm", fitted]
    judged = run(capsys, "compare-planners", *simulated, *names, "--fitted", fitted, "--limit", 1)
    assert {row["algorithm"] for row in judged["algorithms"]} == {"search", "size_greedy", str(fitted), "random"}


def test_for_gpus_it_plans_by_a_gpus_costs_on_a_machine_without(
    tables_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were those of the CPU: computation twenty times as costly or more, exchanges as costly as over a
    loopback."""
    on_cpus, on_gpus = (
        run(capsys, "plan", "--tables", tables_file, "--devices", 2, "--device", device) for device in ("cpu", "cuda")
    )
    assert "NVIDIA" in on_gpus["costs_from"] and "NVIDIA" not in on_cpus["costs_from"]
    assert on_gpus["predicted_ms"] < on_cpus["predicted_ms"] / 5


def test_simulated_costs_are_news_to_planners_that_know_a_real_machine() -> None:
    warm, cold = (planner_of("search", 0, shipped=shipped).costs for shipped in (True, False))
    assert "shipped measurements" in warm.costs_from and "nothing was measured" in cold.costs_from


def test_evaluate_measures_with_fbgemm_by_default(tasks_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judged = run(
        capsys,
        "compare-planners",
        "--tasks",
        tasks_file,
        "--devices",
        2,
        "--algorithm",
        "size_lookup_greedy",
        "--limit",
        1,
    )
    assert judged["costs"] == "measured"
    assert all(row["mean_ms"] > 0 and row["infeasible"] == 0 for row in judged["algorithms"])


def test_tasks_that_cannot_be_placed_are_counted_against_everybody_and_compared_for_nobody() -> None:
    nan = float("nan")
    rows = summarise({"a": Outcome([10.0, nan, 2.0], [0.1, 0.1]), "random": Outcome([20.0, 5.0, 4.0], [0.0] * 3)})
    by_name = {row["algorithm"]: row for row in rows}
    assert by_name["a"]["infeasible"] == 1 and by_name["random"]["infeasible"] == 0
    assert by_name["a"]["mean_ms"] == 6.0 and by_name["random"]["mean_ms"] == 12.0  # tasks 0 and 2 for both
    assert by_name["a"]["speedup_over_random"] == 2.0 and by_name["a"]["compared_tasks"] == 2
    nobody = summarise({"random": Outcome([nan], [])})
    assert nobody[0]["mean_ms"] is None and nobody[0]["infeasible"] == 1


def test_plan_obeys_pins_and_groups_and_starts_a_job(
    tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    record = run(
        capsys, "plan", "--tables", tables_file, "--devices", 3, "--memory-gib", 40, "--out", out,
        "--pin", "t_0=2", "--together", "t_1,t_2", "--apart", "t_3,t_4,t_5", "--algorithm", "search",
    )  # fmt: skip
    plan = ShardingPlan.load(out)
    assert plan.to_json() == record["plan"] and len(plan.rank_of) == 24
    assert plan.rank_of["t_0"] == 2 and plan.rank_of["t_1"] == plan.rank_of["t_2"]
    assert len({plan.rank_of[name] for name in ("t_3", "t_4", "t_5")}) == 3
    assert {candidate["name"] for candidate in record["candidates"]} >= {"search", "lookup_greedy", "random"}


def test_planning_commands_measure_on_one_thread_as_ranks_compute() -> None:
    torch.set_num_threads(2)
    try:
        planner_of("search", 0)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(1)


def test_what_is_measured_is_the_tables_own_optimizers_update() -> None:
    table, stats = TableConfig("wide", 200_000, 128), TableStats(50.0, batch_size=512)
    costs, plan = Costs("measured", ExchangeModel()), ShardingPlan({"wide": 0}, 1)

    def backward_ms(optimizer: Any) -> float:
        task = PlacementTask.build([table], [stats], Topology(1), batch_size=512, splits=Splits(optimizer=optimizer))
        return costs.measure(task, [plan])[0].ranks[0].bwd_compute_ms

    assert backward_ms("adagrad") > 1.8 * backward_ms("rowwise_adagrad")


def test_plan_measures_its_finalists_on_request(tables_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = run(
        capsys, "plan", "--tables", tables_file, "--devices", 2, "--measure", "--batch-size", 64,
        "--budget-seconds", 3,
    )  # fmt: skip
    assert record["chosen"]["measured_source"] == "probe" and record["chosen"]["measured_ms"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "--devices is 0"),
        (["--devices", "2", "--memory-gib", "0.01"], "MiB short"),
        (["--devices", "2", "--pin", "t_0"], "must have the form TABLE=RANK"),
        (["--devices", "2", "--pin", "t_0=²"], "must have the form TABLE=RANK"),
        (["--devices", "2", "--measure", "--device", "cuda"], "on this machine's CPU, but --device puts"),
        (["--devices", "2", "--algorithm", "nowhere"], "holds no fitted planner"),
        (["--devices", "2", "--algorithm", "search", "--measure"], "'search' makes a single plan"),
        (["--devices", "2", "--algorithm", "nowhere", "--measure"], "'nowhere' makes a single plan"),
        (["--devices", "2", "--algorithm", "nowhere", "--fitted", "elsewhere"], "'nowhere' is not one of auto"),
        (["--devices", "2", "--algorithm", "search", "--fitted", "elsewhere"], "'elsewhere' holds no fitted planner"),
    ],
)
def test_plans_that_cannot_be_made_say_why(
    arguments: list[str], message: str, tables_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--tables", str(tables_file), *arguments]) == 2
    assert message in capsys.readouterr().err


def test_explain_names_the_slow_rank_and_its_heaviest_table(
    tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = TablePool.load(tables_file)
    work = {t.name: t.embedding_dim * s.mean_pooling for t, s in zip(pool.tables, pool.stats, strict=True)}
    heavy = max(work, key=lambda name: work[name])
    lopsided = ShardingPlan({name: 0 if name == heavy or work[name] > 300 else 1 for name in work}, 2)
    lopsided.save(tmp_path / "plan.json")
    record = run(capsys, "explain", tmp_path / "plan.json", "--tables", tables_file)
    text = " ".join(record["explanation"])
    assert "rank 0 takes" in text and f"'{heavy}'" in text and "would move" in text
    assert len(record["predicted"]) == 2


def test_a_plan_is_explained_where_no_plan_fits(
    tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [table.name for table in TablePool.load(tables_file).tables]
    ShardingPlan(dict.fromkeys(names, 0), 2).save(tmp_path / "plan.json")
    tight = ["--memory-gib", "0.0001", "--max-parts", "1"]
    said = run(capsys, "explain", tmp_path / "plan.json", "--tables", tables_file, *tight)["explanation"]
    assert any("this plan does not fit" in one for one in said)
    assert said[-1].startswith("The planner finds no plan: ") and "0.0001" not in said[0]


def test_explain_and_plan_say_what_splits_bring_and_why_a_table_is_split(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = synthetic_pool(10, seed=0, batch_size=2048)
    dominant = TableConfig("big", 100_000, 128), TableStats(300.0, batch_size=2048)
    pool = TablePool((dominant[0], *pool.tables), (dominant[1], *pool.stats))
    pool.save(tmp_path / "tables.json")
    asked = ["plan", "--tables", tmp_path / "tables.json", "--devices", "4"]
    whole = run(capsys, *asked, "--out", tmp_path / "whole.json")
    assert whole["would_split"]["predicted_ms"] < 0.9 * whole["predicted_ms"]
    assert run(capsys, *asked, "--max-parts", "1").get("would_split") is None
    for exact in (["--optimizer", "adagrad"], ["--per-part"]):
        split = run(capsys, *asked, *exact, "--out", tmp_path / "split.json")
        assert "big[0:64]" in " ".join(split["plan"]["rank_of"]) or "big[0:32]" in split["plan"]["rank_of"]
        assert split["predicted_ms"] < 0.9 * run(capsys, *asked, *exact, "--max-parts", "1")["predicted_ms"]
    said = {
        name: " ".join(
            run(capsys, "explain", tmp_path / f"{name}.json", "--tables", tmp_path / "tables.json")["explanation"]
        )
        for name in ("whole", "split")
    }
    assert "by columns ('big' in" in said["whole"] and "tables.optimizer.per_part" in said["whole"]
    assert "'big' is split into" in said["split"] and "it would make the step cost" in said["split"]


def test_a_split_plan_is_explained_by_memory_by_parts_and_with_the_option_that_plans_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = TableConfig("big", 4000, 128), TableConfig("small", 1000, 32)
    TablePool(tables, (TableStats(300.0, batch_size=512), TableStats(1.0, batch_size=512))).save(tmp_path / "t.json")
    ShardingPlan({f"big[{i}:{i + 32}]": 0 for i in range(0, 128, 32)} | {"small": 1}, 2).save(tmp_path / "one.json")

    def said(*asked: object, plan: str = "one.json") -> str:
        return " ".join(run(capsys, "explain", tmp_path / plan, "--tables", tmp_path / "t.json", *asked)["explanation"])

    free = said("--pin", "small=1")
    assert "`dlrm-autoshard plan --per-part` would move 1 table, which" in free, free
    assert "`dlrm-autoshard plan` would move 1 table, which" in said("--pin", "small=1", "--optimizer", "adagrad")
    assert "on one of their ranks, it would make the step cost" in free and "room" not in free
    needed = PlacementTask.build(tables, (TableStats(300.0), TableStats(1.0)), Topology(2), batch_size=512).table_bytes
    tight = said("--memory-gib", 0.9 * needed["big"] / 2**30)
    assert "(32 + 32 + 32 + 32 columns): whole, it would need" in tight and "no rank has more than" in tight
    ShardingPlan({"big[0:96]": 0, "big[96:128]": 1, "small": 1}, 2).save(tmp_path / "two.json")
    uneven = said(plan="two.json")
    assert "'big[0:96]'" in uneven and "This shard alone limits the plan" in uneven and "whole tables" not in uneven
    ShardingPlan({"big": 0, "small": 1}, 2).save(tmp_path / "whole.json")
    assert "This table alone limits the plan" in said(plan="whole.json")


@pytest.mark.parametrize("command", ["plan --tables T --devices 2", "explain P"])
def test_columns_of_a_part_are_a_multiple_of_4(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command.split(), "--min-dim", "6"])
    assert "argument --min-dim: it is 6; fbgemm needs a multiple of 4 (try 8)" in capsys.readouterr().err


def test_where_no_whole_table_fits_plan_and_explain_say_that_parts_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table, stats = TableConfig("big", 40_000, 128), TableStats(3.0, batch_size=512)
    TablePool((table,), (stats,)).save(tmp_path / "t.json")
    ShardingPlan({"big": 0}, 2).save(tmp_path / "plan.json")
    asked = ["--tables", str(tmp_path / "t.json"), "--memory-gib", str(0.7 * table.weight_bytes / 2**30)]
    assert run(capsys, "plan", "--devices", "2", *asked, "--rows", "auto")["plan"]["rank_of"].keys() == {
        "big[rows 0:20000]", "big[rows 20000:40000]"}  # fmt: skip
    asked += ["--rows", "never"]
    hint = "Split by columns, the tables would fit: set tables.optimizer.per_part: true (or use sgd)."
    assert main(["plan", "--devices", "2", *asked]) == 2 and hint in " ".join(capsys.readouterr().err.split())
    assert run(capsys, "explain", tmp_path / "plan.json", *asked)["explanation"][-1].endswith(hint)


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("tables --synthetic 3 --seed -1", "argument --seed: -1 is not between 0 and"),
        ("tables --synthetic 3 --seed 99999999999999999999", "argument --seed: 99999999999999999999 is not between"),
        ("plan --tables T --devices 2 --seed -1", "argument --seed: -1 is not between 0 and"),
        ("tasks --tables T --out O --seed -1", "argument --seed: -1 is not between 0 and"),
        ("fit --tasks T --devices 2 --out O --seed -1", "argument --seed: -1 is not between 0 and"),
        ("fit --tasks T --devices 2 --out O --iterations 0", "argument --iterations: 0 is not between 1 and"),
        ("fit --tasks T --devices 2 --out O --placements 0", "argument --placements: 0 is not between 1 and"),
        ("data criteo-sample --out O --seed -1", "argument --seed: -1 is not between 0 and"),
        ("compare-planners --tasks T --devices 2 --seed -1", "argument --seed: -1 is not between 0 and"),
        ("fit --tasks T --devices 2 --out O --placements 0", "argument --placements: 0 is not between 1 and"),
        ("compare-planners --tasks T --devices 2 --limit -1", "argument --limit: -1 is not between 1 and"),
        ("plan --tables T --devices 2 --ranks-per-host -1", "argument --ranks-per-host: -1 is not between 1 and"),
    ],
)
def test_numbers_out_of_range_are_refused_before_anything_is_read(
    line: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    assert end.value.code == 2 and sentence in capsys.readouterr().err


@pytest.mark.parametrize("gib", ["nan", "inf", "-1", "0"])
@pytest.mark.parametrize("command", ["plan", "explain"])
def test_memory_is_more_than_nothing_and_less_than_everything(
    command: str, gib: str, tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_file = tmp_path / "plan.json"
    ShardingPlan({table.name: 0 for table in TablePool.load(tables_file).tables}, 2).save(plan_file)
    asked = ["--devices", "2"] if command == "plan" else [str(plan_file)]
    assert main([command, *asked, "--tables", str(tables_file), "--memory-gib", gib]) == 2
    assert f"--memory-gib is {gib}; it must be more than 0 and less than" in capsys.readouterr().err


def run_of(tmp_path: Path, optimizer: str) -> Path:
    """On two ranks, a table each. Its times are made up, so no step of it was sampled."""
    path = write_run(tmp_path / optimizer, ranks=2, epochs=1, tables=2)
    costs = path / "costs" / "epochs.jsonl"
    costs.write_text(costs.read_text().replace('"samples": 20', '"samples": 0').replace('"samples":20', '"samples":0'))
    ShardingPlan({"cat_0": 0, "cat_1": 1}, 2).save(path / "plan" / "step_00000000.json")
    tables = "[{name: cat_0, num_embeddings: 1000}, {name: cat_1, num_embeddings: 100000}]"
    (path / "config.yaml").write_text(
        f"data: {{source: synthetic, train_samples: 2048, tables: {tables}}}\n"
        f"tables: {{embedding_dim: 64, optimizer: {{name: {optimizer}}}}}\n"
    )
    config = load_config(path / "config.yaml")
    source = open_source(config.data, config.tables)
    TablePool(source.tables, measure_stats(source, 2048, 1)).save(path / "plan" / "tables.json")
    return path


def test_a_run_is_planned_for_and_explained_with_its_own_optimizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = {name: run_of(tmp_path, name) for name in ("sgd", "rowwise_adagrad", "adagrad")}
    run(capsys, "tables", "--from-run", runs["sgd"], "--out", tmp_path / "tables.json")
    plan_file = runs["sgd"] / "plan" / "step_00000000.json"
    needs = []
    for name in runs:
        of_run = run(capsys, "explain", runs[name])["explanation"]
        of_file = run(capsys, "explain", plan_file, "--tables", tmp_path / "tables.json", "--optimizer", name)
        assert of_file["explanation"] == of_run
        assert ("tables.optimizer.per_part" in of_run[-1]) == (name == "rowwise_adagrad"), "what a split would bring"
        needs.append(next(sentence for sentence in of_run if sentence.startswith("The fullest rank")))
        planned = run(capsys, "plan", runs[name])
        assert any("[" in shard for shard in planned["plan"]["rank_of"]) == (name != "rowwise_adagrad")
    assert len(set(needs)) == 3, needs
    asked_otherwise = run(capsys, "explain", runs["adagrad"], "--optimizer", "sgd")["explanation"]
    assert needs[0] in asked_otherwise


def test_a_run_is_explained_in_the_words_and_by_the_figures_of_its_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Measured: who is slow, what balance would save; and the costs of other plans rest on what was measured."""
    path = run_of(tmp_path, "adagrad")
    costs = path / "costs" / "epochs.jsonl"
    costs.write_text(costs.read_text().replace('"samples":0', '"samples":20'))
    RunRecord.load(path).last.plan.save(path / "plan" / "step_00000000.json")
    found = run(capsys, "explain", path)
    told = summary(RunRecord.load(path))
    assert found["explanation"][0] in told and found["explanation"][0].startswith("Rank 1 makes the others wait")
    assert found["explanation"][1] in told and "perfect balance would have saved" in found["explanation"][1]
    assert "corrected by 1 interval of the run" in found["costs_from"]
    slowest = max(cost["fwd_compute"] for cost in found["predicted"])
    assert slowest == pytest.approx(max(RunRecord.load(path).last.stage_ms["fwd_compute"]), rel=0.3)


def test_a_plan_file_says_by_which_costs_it_was_made_and_is_explained_by_them(
    tables_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fitted").mkdir()
    (tmp_path / "fitted" / "planner.json").write_text(json.dumps(Planner(seed=0).state_dict()))
    asked = ["--tables", tables_file]
    out = tmp_path / "plan.json"
    made = run(capsys, "plan", *asked, "--devices", "2", "--fitted", tmp_path / "fitted", "--out", out)
    assert ShardingPlan.load(out) == ShardingPlan.from_json(made["plan"])
    explained = run(capsys, "explain", out, *asked)
    assert explained["predicted"] == made["predicted"] and explained["costs_from"] == made["costs_from"]
    (tmp_path / "fitted" / "planner.json").unlink()
    (tmp_path / "fitted").rmdir()
    explained = run(capsys, "explain", out, *asked)
    said = [sentence for sentence in explained["explanation"] if "made with other costs" in sentence]
    assert explained["predicted"] != made["predicted"] and made["costs_from"] in said[0] and "fitted'" in said[0]


def asking(path: Path, *settings: str) -> Path:
    """A run like it, of `autoshard:` settings."""
    with (path / "config.yaml").open("a") as config:
        config.write(f"autoshard: {{{', '.join(settings)}}}\n")
    return path


def test_a_run_is_planned_for_and_explained_as_its_settings_ask(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def plan_of(run_dir: Path, *arguments: object) -> ShardingPlan:
        return ShardingPlan.from_json(run(capsys, "plan", run_dir, *arguments)["plan"])

    free = run_of(tmp_path / "free", "adagrad")
    assert plan_of(free).split_tables, "what the settings below forbid"
    pinned = asking(run_of(tmp_path / "pinned", "adagrad"), "pinned: {cat_0: 1, cat_1: 1}")
    assert plan_of(pinned).rank_of == {"cat_0": 1, "cat_1": 1}
    assert plan_of(pinned, "--pin", "cat_0=0").rank_of == {"cat_0": 0, "cat_1": 1}, "what is asked here comes first"
    whole = asking(run_of(tmp_path / "whole", "adagrad"), "splits: {max_parts: 1}")
    assert not plan_of(whole).split_tables and plan_of(whole, "--max-parts", "2").split_tables
    narrow = asking(run_of(tmp_path / "narrow", "adagrad"), "splits: {min_dim: 64}")
    assert not plan_of(narrow).split_tables
    together = asking(run_of(tmp_path / "together", "sgd"), "together: [[cat_0, cat_1]]")
    assert len(set(plan_of(together).rank_of.values())) == 1
    empty = asking(run_of(tmp_path / "empty", "sgd"), "exclude_ranks: [0]")
    assert set(plan_of(empty).rank_of.values()) == {1}
    small = asking(run_of(tmp_path / "small", "sgd"), "memory_gib: [0.0001, 2]")
    assert set(plan_of(small).rank_of.values()) == {1}
    apart = run_of(tmp_path / "two_hosts", "sgd")
    costs = apart / "costs" / "epochs.jsonl"
    costs.write_text(costs.read_text().replace('["host0","host0"]', '["host0","host1"]'))
    comms = [
        [cost["fwd_comms"] for cost in run(capsys, "explain", path)["predicted"]]
        for path in (run_of(tmp_path / "one_host", "sgd"), apart)
    ]
    assert comms[0] != comms[1], "between hosts the exchange costs something else"
    for path in (pinned, together, empty):
        best = plan_of(path)
        best.save(path / "plan" / "step_00000000.json")
        assert "no plan that is predicted" in " ".join(run(capsys, "explain", path)["explanation"])
    assert "this plan does not fit" in " ".join(run(capsys, "explain", small)["explanation"])
    said = run(capsys, "explain", free, "--pin", "cat_0=1")["explanation"]
    assert any(sentence.startswith("The plan breaks a constraint: ") and "'cat_0'" in sentence for sentence in said)
    assert main(["plan", str(small), "--devices", "3"]) == 2
    assert "autoshard.memory_gib has 2 entries, but there are 3 ranks" in capsys.readouterr().err


def test_the_pooling_of_a_split_table_is_as_last_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = run_of(tmp_path, "sgd")
    costs = path / "costs" / "epochs.jsonl"
    record = json.loads(costs.read_text())
    tables = {key: [values[0], *values] for key, values in record["tables"].items()}
    tables |= {"name": ["cat_0[0:32]", "cat_0[32:64]", "cat_1"], "mean_pooling": [7.5, 7.5, 2.0], "rank": [0, 1, 1]}
    costs.write_text(json.dumps({**record, "tables": tables}) + "\n")
    pool = run(capsys, "tables", "--from-run", path)
    assert [table["stats"]["mean_pooling"] for table in pool["tables"]] == [7.5, 2.0]


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        (["plan", "RUN", "--devices", "0"], "--devices is 0; it must be 1 or more."),
        (["explain", "nowhere"], "there is no plan file and no run 'nowhere'"),
        (["tables", "--from-run", "RUN", "--batch-size", "8"], "--from-run takes a run's tables as they are"),
        (["tables", "--from-run", "RUN", "--dim", "8"], "--from-run takes a run's tables as they are"),
    ],
)
def test_what_is_asked_about_a_run_is_never_replaced_in_silence(
    asked: list[str], sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(run_of(tmp_path, "sgd"))
    assert main([path if word == "RUN" else word for word in asked]) == 2
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize("command", ["tables", "plan", "explain", "compare-planners"])
def test_tables_for_people_fit_into_80_columns(
    command: str, tables_file: Path, tasks_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("COLUMNS", "80")
    main(["plan", "--tables", str(tables_file), "--devices", "2", "--algorithm", "search", "--out",
          str(tmp_path / "plan.json")])  # fmt: skip
    capsys.readouterr()
    choices: dict[str, list[object]] = {
        "tables": ["--synthetic", "5"],
        "plan": ["--tables", tables_file, "--devices", "2", "--algorithm", "search"],
        "explain": [tmp_path / "plan.json", "--tables", tables_file, "--memory-gib", "40"],
        "compare-planners": ["--tasks", tasks_file, "--devices", "2", "--algorithm", "search", "--costs", "simulated"],
    }
    assert main([command, *map(str, choices[command])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines and max(len(line) for line in lines if "written" not in line and "/" not in line) <= 80


def test_tables_reads_dlrm_datasets_files_and_keeps_real_pooling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = torch.tensor([[1, 0, 1, 1], [3, 3, 2, 3]] * 1).repeat(1, 8)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.reshape(-1).cumsum(0)])
    indices = torch.arange(int(offsets[-1])) % 7
    torch.save((indices, offsets, lengths), tmp_path / "trace.pt")
    record = run(capsys, "tables", tmp_path / "trace.pt", "--dim", 32, "--out", tmp_path / "tables.json")
    pooling = [table["stats"]["mean_pooling"] for table in record["tables"]]
    assert pooling == pytest.approx([0.75, 2.75], abs=0.1)
    assert all(len(table["stats"]["reuse_histogram"]) == NUM_REUSE_BINS for table in record["tables"])
    assert [table["embedding_dim"] for table in record["tables"]] == [32, 32]


def test_tables_that_nobody_looks_up_have_no_shares_and_no_reuse() -> None:
    idle = TableStats(0.0, (0.0,) * NUM_REUSE_BINS, 1.0, 64)
    assert reuse_shares([idle, idle]) == ([0.0] * NUM_REUSE_BINS, 1.0)


def test_training_and_test_tasks_share_no_table(tmp_path: Path) -> None:
    tasks = draw_tasks(synthetic_pool(41, seed=0, batch_size=64), 10, 8, seed=3, batch_size=64)
    train, test = ({i for task in half for i in task} for half in (tasks.train_indices, tasks.test_indices))
    assert not train & test
    assert draw_tasks(tasks.pool, 10, 8, seed=3, batch_size=64) == tasks
    tasks.save(tmp_path / "tasks.json")
    assert TaskSet.load(tmp_path / "tasks.json") == tasks
    with pytest.raises(ValueError, match="at most 20 a task"):
        draw_tasks(tasks.pool, 21, 1, seed=0, batch_size=64)


def test_torchrec_form_of_a_plan() -> None:
    pool = synthetic_pool(3, seed=0, batch_size=64)
    plan = ShardingPlan({"t_0": 1, "t_1": 0, "t_2": 1}, 2)
    record = torchrec_plan(plan, pool.tables, module="sparse.ebc")
    assert record["sparse.ebc"]["t_0"]["ranks"] == [1]
    [shard] = record["sparse.ebc"]["t_1"]["sharding_spec"]["shards"]
    assert shard["shard_sizes"] == [pool.tables[1].num_embeddings, pool.tables[1].embedding_dim]
    assert shard["placement"] == "rank:0/cpu"


def test_torchrec_numbers_gpus_on_each_host_anew() -> None:
    pool = synthetic_pool(4, seed=0, batch_size=64)
    plan = ShardingPlan({f"t_{i}": i for i in range(4)}, 4)
    record = torchrec_plan(plan, pool.tables, device="cuda", local_ranks=[0, 1, 2, 0])["embedding_bag_collection"]
    places = [record[f"t_{i}"]["sharding_spec"]["shards"][0]["placement"] for i in range(4)]
    assert places == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:2", "rank:3/cuda:0"]


def test_torchrec_itself_shards_by_our_plan() -> None:
    if find_torchrec() is not None:
        pytest.skip(find_torchrec() or "")
    from tests.ranks import run_ranks

    names, owned = zip(*run_ranks(_torchrec_rank, 2, timeout=90), strict=True)
    assert names == ("DistributedModelParallel",) * 2
    assert owned == (["t_1"], ["t_0", "t_2"])  # t_3 is on both, and no shard


def _torchrec_rank(rank: int, world_size: int) -> tuple[str, list[str]]:
    assert find_torchrec() is None
    import torch.distributed as dist
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
    from torchrec.distributed import DistributedModelParallel
    from torchrec.distributed.types import ShardingEnv

    pool = synthetic_pool(4, seed=0, batch_size=64, rows=(10, 100))
    plan = ShardingPlan({"t_0": 1, "t_1": 0, "t_2": 1}, 2)
    configs = [
        EmbeddingBagConfig(
            name=t.name, num_embeddings=t.num_embeddings, embedding_dim=t.embedding_dim, feature_names=[f"f_{t.name}"]
        )
        for t in pool.tables
    ]
    module = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
    world = dist.group.WORLD
    assert world is not None
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(world),
        device=torch.device("cpu"),
        plan=to_sharding_plan(torchrec_plan(plan, pool.tables, module="", replicated=["t_3"])),
        init_data_parallel=False,
    )
    owned = sorted(
        name.split(".")[-2]
        for name, tensor in model.state_dict().items()
        if hasattr(tensor, "local_shards") and tensor.local_shards()
    )
    return type(model).__name__, owned


# Costs that outlive a job --------------------------------------------------------------------------------------------


def test_help_names_all_algorithms() -> None:
    assert set(ALGORITHM_NAMES.split(", ")) == set(get_args(Algorithm))
