"""A job with small tables on every rank: evaluated, interrupted, continued on other ranks, and without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import Config, ConfigError
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.training.checkpoints.manifest import read_manifest
from dlrm_autoshard.training.run_directory import record_start
from dlrm_autoshard.training.state import TrainError
from tests.ranks import run_ranks
from tests.trainers import TABLES, config, losses, make_runtime, tensors, trainer


def job(replicate: Any, optimizer: str = "adagrad", steps: int | None = None, **sections: Any) -> Config:
    return config(
        tables={"optimizer": {"name": optimizer, "lr": 0.1}, "replicate": replicate},
        train={"batch_size": 16, "max_steps": steps, "epochs": 2, "log_every_steps": 1},
        checkpoint={"enabled": True, "every_steps": 4, "keep": 9},
        **{"data": {"train_samples": 250, "test_samples": 60}, **sections},
    )


def trained(rank: int, world_size: int, folder: Path, settings: Config) -> tuple[dict[str, Tensor], list[str]]:
    with trainer(settings, make_runtime(rank, world_size), folder) as made:
        if rank == 0:
            record_start(folder, settings, world_size)
        said: list[str] = []
        made.log.display.line = said.append  # type: ignore[method-assign, assignment]
        made.run()
        return tensors(made), said


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad"])
def test_replicas_learn_what_owners_do_and_an_interruption_changes_no_bit(tmp_path: Path, optimizer: str) -> None:
    names = ["tag", "user"]
    ranks = run_ranks(trained, 2, tmp_path / "whole", job(names, optimizer), timeout=90)
    for name in (f"tables.{name}.weight" for name in names):
        assert torch.equal(ranks[0][0][name], ranks[1][0][name])
    run_ranks(trained, 2, tmp_path / "pieces", job(names, optimizer, steps=6), timeout=90)
    pieces = run_ranks(trained, 2, tmp_path / "pieces", job(names, optimizer), timeout=90)
    assert losses(tmp_path / "pieces") == losses(tmp_path / "whole")
    for (found, _), (same, _) in zip(pieces, ranks, strict=True):
        assert all(torch.equal(value, same[name]) for name, value in found.items())
    run_ranks(trained, 2, tmp_path / "owned", job("none", optimizer), timeout=90)
    of_owners = losses(tmp_path / "owned")
    assert [loss for _, loss in losses(tmp_path / "whole")] == pytest.approx([loss for _, loss in of_owners], rel=1e-4)
    manifests = [read_manifest(tmp_path / run / "checkpoints" / "step_00000008") for run in ("whole", "owned")]
    assert manifests[0].shapes() == manifests[1].shapes() and sorted(manifests[0].state.replicated) == names
    record = json.loads((tmp_path / "whole" / "plan" / "replicated.json").read_text())
    assert [table["name"] for table in record["tables"]] == ["user", "tag"]
    assert not (tmp_path / "owned" / "plan" / "replicated.json").exists()


def test_a_checkpoint_continues_whichever_tables_are_replicated_on_other_ranks(
    tmp_path: Path,
) -> None:
    def stage(run: str, world_size: int, replicate: Any, steps: int, batch: int = 16) -> list[str]:
        settings = job(replicate, steps=steps, autoshard={"enabled": True, "budget_seconds": 1, "measure_plans": 0})
        settings = settings.model_copy(update={"train": settings.train.model_copy(update={"batch_size": batch})})
        return run_ranks(trained, world_size, tmp_path / run, settings, timeout=90)[0][1]

    assert "2 small tables are on every rank: 'tag', 'user'" in stage("mixed", 2, ["tag", "user"], 4, 24)
    stage("mixed", 3, "none", 6)
    assert not any("placed again" in note for note in stage("mixed", 3, "none", 7))
    assert any("tables were placed again" in note for note in stage("mixed", 3, ["shop"], 8))
    stage("mixed", 1, ["shop"], 9, 48)
    assert "1 small table is on every rank: 'tag'" in stage("mixed", 2, "auto", 10, 24)
    for world_size, steps in ((2, 4), (3, 6), (3, 7), (3, 8), (1, 9), (2, 10)):
        stage("plain", world_size, "none", steps, 48 // world_size)
    mixed, plain = losses(tmp_path / "mixed"), losses(tmp_path / "plain")
    assert [step for step, _ in mixed] == [step for step, _ in plain]
    assert [loss for _, loss in mixed] == pytest.approx([loss for _, loss in plain], rel=1e-4)
    assert read_manifest(tmp_path / "mixed" / "checkpoints" / "step_00000010").state.replicated == ["tag"]


def test_what_was_replicated_is_evaluated_exported_explained_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    settings = job(["user", "tag"], autoshard={"enabled": True, "budget_seconds": 1, "measure_plans": 0})
    run_ranks(trained, 2, run, settings, timeout=90)
    tested = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logloss = [line["logloss"] for line in tested if line["split"] == "test"][-1]
    capsys.readouterr()
    assert main(["evaluate", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["logloss"] == pytest.approx(logloss, rel=1e-5)
    assert main(["export", str(run), "--to", "numpy"]) == 0
    assert main(["report", str(run)]) == 0
    assert main(["explain", str(run)]) == 0
    assert capsys.readouterr().out.count("2 small tables are on every rank: 'tag', 'user'") == 2
    assert main(["plan", str(run), "--format", "torchrec", "--out", str(tmp_path / "plan.json")]) == 0
    [module] = json.loads((tmp_path / "plan.json").read_text()).values()
    assert {name: sharding["sharding_type"] for name, sharding in module.items()} == {
        "item": "table_wise", "shop": "table_wise", "tag": "data_parallel", "user": "data_parallel",
    }  # fmt: skip
    assert module["tag"]["ranks"] == [0, 1] and module["tag"]["compute_kernel"] == "dense"


def drift(rank: int, world_size: int, folder: Path) -> str:
    with trainer(job(["tag"]), make_runtime(rank, world_size), folder) as made:
        assert made.job.embeddings.replicas is not None
        made.job.embeddings.replicas.weights[3] *= 1 + rank * 2**-23  # one bit of one weight
        with pytest.raises(TrainError) as caught:
            made.run()
        return str(caught.value)


def test_copies_that_drift_end_the_job(tmp_path: Path) -> None:
    for message in run_ranks(drift, 2, tmp_path):
        assert "the dense weights, or copies of tables, of rank(s) 1 differ from rank 0's" in message


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"tables": {"replicate": ["usr"]}}, "replicate names table 'usr', which the model does not have"),
        ({"tables": {"replicate": "all"}}, "'tables.replicate' is 'all'"),
        ({"tables": {"replicate": [table["name"] for table in TABLES]}}, "names all tables"),
        ({"tables": {"replicate": ["tag"]}, "autoshard": {"pinned": {"tag": 1}}}, "a constraint places it too"),
    ],
)
def test_what_a_config_cannot_ask_is_said_before_ranks_start(sections: dict[str, Any], said: str) -> None:
    from dlrm_autoshard.training.start_checks import check_start

    with pytest.raises((UserError, ConfigError)) as caught:
        check_start(config(**sections), ranks=2)
    assert said in str(caught.value)
