"""A trained model leaves the house: its metrics and predictions again, and the same ones without this package."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml

from dlrm_autoshard import plug_in
from dlrm_autoshard.commands.export import write_npz
from dlrm_autoshard.commands.main import main
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan, Topology
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.checkpoints.saved_model import saved_model, shared_out
from tests.jobs import REPOSITORY, said_by
from tests.terminal import Terminal

ALONE = """
import sys, json
import numpy as np, torch
model = torch.export.load("model.pt2").module()
batch = np.load("batch.npz")
tables = [name[4:] for name in batch if name.startswith("ids_")]
values = [torch.from_numpy(batch[f"ids_{t}"]) for t in tables]
offsets = [torch.from_numpy(batch[f"offsets_{t}"]) for t in tables]
np.save("alone.npy", model(torch.from_numpy(batch["dense"]), values, offsets).numpy())
assert not any(name.startswith("dlrm_autoshard") or name.startswith("fbgemm") for name in sys.modules)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Trained on two ranks; dims of 16 and 8, bags that are empty, a table that averages and others that sum."""
    folder = tmp_path_factory.mktemp("trained")
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "debug_cpu", "--ranks=2", "train.epochs=1"]
    command += ["tables.embedding_dims={item: 8}", "tables.poolings={clicked: mean}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=200, cwd=folder)
    return folder / "runs/debug_cpu"


def test_evaluate_gives_the_metrics_that_training_ended_with(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    again = json.loads(said_by("evaluate", str(run), "--json"))
    assert again["step"] == 40
    for name in ("auc", "logloss", "ne", "calibration", "accuracy"):
        assert again[name] == pytest.approx(lines[-1][name], abs=1e-6)
    assert before == {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}, "a reader writes nothing"


def test_ranks_that_share_the_tables_say_what_one_process_says(run: Path, tmp_path: Path) -> None:
    """On as many as trained it, under the plan of then, and on others; samples in the data's order."""
    alone = json.loads(said_by("evaluate", str(run), "--json"))
    said_by("predict", str(run), "--out", str(tmp_path / "alone.npy"))
    told = started("evaluate", str(run), "--json", "--ranks=2")
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout) == pytest.approx(alone, abs=1e-6)
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    predict = ["-m", "dlrm_autoshard", "predict", str(run), "--out", str(tmp_path / "shared.npy")]
    done = subprocess.run([*by_torchrun, *predict], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout == f"5,120 predictions: {tmp_path / 'shared.npy'}\n"
    np.testing.assert_allclose(np.load(tmp_path / "shared.npy"), np.load(tmp_path / "alone.npy"), atol=1e-6, rtol=0)


def test_predictions_are_probabilities_or_the_logits_that_rank_them(run: Path, tmp_path: Path) -> None:
    said_by("predict", str(run), "--out", str(tmp_path / "p.npy"))
    said_by("predict", str(run), "--logits", "--out", str(tmp_path / "l.npy"))
    logits = torch.from_numpy(np.load(tmp_path / "l.npy"))
    assert float(logits.min()) < 0 and np.array_equal(np.load(tmp_path / "p.npy"), logits.sigmoid().numpy())


def test_what_ranks_cannot_do_is_said_once(run: Path, tmp_path: Path) -> None:
    no_samples = started("evaluate", str(run), "--ranks=2", "--split=val")
    assert no_samples.returncode == 2 and no_samples.stderr.count("no samples in split 'val'") == 1
    by_torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    export = ["-m", "dlrm_autoshard", "export", str(run), "--out", str(tmp_path / "model.pt2")]
    done = subprocess.run([*by_torchrun, *export], capture_output=True, text=True, timeout=200)
    assert done.returncode and "start it without torchrun" in done.stderr and not list(tmp_path.iterdir())


def test_a_table_that_fits_no_rank_is_split_and_what_fits_nowhere_is_said() -> None:
    tables = [TableConfig("large", 1000, 64), TableConfig("small", 100, 16)]
    trained = ShardingPlan({"large": 1, "small": 0}, 2)
    assert shared_out(tables, Topology(2), trained) == trained
    assert shared_out(tables, Topology(3), trained).rank_of.keys() == {"large", "small"}
    rank_of = shared_out(tables, Topology(3, memory_bytes=(150_000,) * 3), trained).rank_of
    assert {name: rank_of[name] for name in rank_of if name != "small"}.keys() == {"large[0:32]", "large[32:64]"}
    with pytest.raises(UserError, match=r"251 KiB.* Start more ranks"):
        shared_out(tables, Topology(1, memory_bytes=(200_000,)), trained)


def started(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dlrm_autoshard", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


def test_a_trained_model_takes_no_memory_for_its_optimizer(run: Path) -> None:
    """And one whose optimizer is for GPUs alone can be looked at on a CPU."""
    with saved_model(run, splits=["test"]) as saved:
        tables = saved.bags.sharded.storage
        assert {key for table in saved.data.source.tables for key in tables.tensors(table.shard)} == {"weight"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_what_was_trained_on_a_gpu_is_evaluated_without_one_where_asked(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("device: cpu", "device: cuda").replace("device: auto", "device: cuda"))
    assert main(["evaluate", str(copy)]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert main(["evaluate", str(copy), "--device", "cpu"]) == 0
    assert "auc" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")  # of torch.export, of itself
def test_the_exported_program_predicts_the_same_without_this_package(run: Path, tmp_path: Path) -> None:
    said_by("predict", str(run), "--out", str(tmp_path / "ours.npy"))
    said_by("export", str(run), "--to", "pt", "--out", str(tmp_path / "model.pt2"))
    ours = np.load(tmp_path / "ours.npy")
    first = len(ours) // 2  # a batch size that export has not seen
    write_batch(run, tmp_path / "batch.npz", first)
    done = subprocess.run(
        [sys.executable, "-I", "-c", ALONE], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    alone = np.load(tmp_path / "alone.npy")
    assert len(alone) == first
    np.testing.assert_allclose(alone, ours[:first], atol=1e-6, rtol=0)


def write_batch(run: Path, path: Path, size: int) -> None:
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.data.open import open_source

    config = load_config(run / "config.yaml")
    source = open_source(config.data, config.tables)
    batch = source.read("test", 0, 0, size)
    arrays: dict[str, Any] = {"dense": batch.dense_BF.numpy()}
    ends = batch.lengths_TB.sum(1).cumsum(0).tolist()
    for number, table in enumerate(source.tables):
        lengths = batch.lengths_TB[number].numpy().astype(np.int64)
        ids = batch.values_N[ends[number] - lengths.sum() : ends[number]].numpy()
        arrays[f"ids_{table.name}"] = ids.astype(np.int64)
        arrays[f"offsets_{table.name}"] = np.cumsum(lengths) - lengths
    np.savez(path, **arrays)


def test_each_export_says_what_goes_in_and_what_is_in_it(run: Path, tmp_path: Path) -> None:
    for form, name in (("pt", "model.pt2"), ("numpy", "model.npz"), ("torchrec", "model.pt")):
        said_by("export", str(run), "--to", form, "--out", str(tmp_path / name))
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["model.npz", "model.npz.json", "model.pt", "model.pt.json", "model.pt2", "model.pt2.json"]
    program = json.loads((tmp_path / "model.pt2.json").read_text())
    dense, values, offsets = program["inputs"]
    assert (dense["name"], dense["shape"], dense["dtype"]) == ("dense_BF", ["B", program["num_dense"]], "float32")
    features = ["user", "item", "clicked", "country", "coupon"]
    for argument, size in ((values, "N"), (offsets, "B")):
        assert argument["list"] == [{"name": name, "shape": [size], "dtype": "int64"} for name in features]
    assert program["outputs"] == [{"name": "probabilities", "shape": ["B"], "dtype": "float32", "columns": ["label"]}]
    arrays = np.load(tmp_path / "model.npz")
    weights = json.loads((tmp_path / "model.npz.json").read_text())
    assert weights["model"] == "model.npz" and "inputs" not in weights
    told = {tensor["name"]: (tuple(tensor["shape"]), tensor["dtype"]) for tensor in weights["tensors"]}
    assert told == {name: (array.shape, array.dtype.name) for name, array in arrays.items()}


@pytest.mark.filterwarnings("ignore:No complete tensor found:UserWarning")  # of torch.export, of itself
def test_a_table_that_is_split_on_one_rank_is_exported_whole(tmp_path: Path) -> None:
    plan = {"user": 0, "item[0:8]": 0, "item[8:16]": 0, "clicked": 0, "country": 0, "coupon": 0}
    (tmp_path / "plan.json").write_text(json.dumps({"schema": 1, "world_size": 1, "rank_of": plan}))
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "debug_cpu", "--ranks=1", "train.max_steps=4"]
    command += ["tables.optimizer.name=adagrad", f"autoshard.placement={tmp_path / 'plan.json'}"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=200, cwd=tmp_path)
    run = tmp_path / "runs" / "debug_cpu"
    said_by("predict", str(run), "--out", str(tmp_path / "ours.npy"))
    said_by("export", str(run), "--out", str(tmp_path / "model.pt2"))
    write_batch(run, tmp_path / "batch.npz", 50)
    batch, model = np.load(tmp_path / "batch.npz"), torch.export.load(tmp_path / "model.pt2").module()
    tables = [name[4:] for name in batch if name.startswith("ids_")]
    given = [[torch.from_numpy(batch[f"{kind}_{table}"]) for table in tables] for kind in ("ids", "offsets")]
    alone = model(torch.from_numpy(batch["dense"]), *given)
    np.testing.assert_allclose(alone.numpy(), np.load(tmp_path / "ours.npy")[:50], atol=1e-6, rtol=0)


def test_they_show_in_a_terminal_how_far_they_are(run: Path, tmp_path: Path) -> None:
    for command, words in (
        (["evaluate", str(run)], ["batches of test"]),
        (["evaluate", str(run), "--json"], []),
        (["predict", str(run), "--out", str(tmp_path / "p.npy")], ["batches of test"]),
        (["export", str(run), "--out", str(tmp_path / "model.pt2")], ["tables", "exporting the program"]),
        (["export", str(run), "--to", "numpy", "--out", str(tmp_path / "w.npz")], ["tensors"]),
    ):
        with Terminal() as terminal:
            said_by(*command)
        assert all(word in terminal.said for word in words) and bool(words) == bool(terminal.said), command


def test_weights_are_exported_by_name(run: Path, tmp_path: Path) -> None:
    said_by("export", str(run), "--to", "numpy", "--out", str(tmp_path / "w.npz"))
    said_by("export", str(run), "--to", "torchrec", "--out", str(tmp_path / "w.pt"))
    arrays, state = np.load(tmp_path / "w.npz"), torch.load(tmp_path / "w.pt", weights_only=True)
    assert arrays["tables.item.weight"].shape == (2000, 8)
    assert np.array_equal(arrays["tables.item.weight"], state["embedding_bags.item.weight"].numpy())
    with saved_model(run) as saved:
        for table in saved.data.source.tables:
            weight = saved.bags.sharded.storage.tensors(table.shard)["weight"]
            assert np.array_equal(arrays[f"tables.{table.name}.weight"], weight.numpy())
        dense = saved.dense.state_dict()
    of_dense = {name.removeprefix("dense."): value for name, value in state.items() if name.startswith("dense.")}
    assert of_dense.keys() == dense.keys() and all(torch.equal(of_dense[name], dense[name]) for name in dense)
    assert set(arrays) == {name.replace("embedding_bags.", "tables.") for name in state}


def test_weights_are_written_with_one_array_in_memory(tmp_path: Path) -> None:
    alive: list[weakref.ref[torch.Tensor]] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(3):
            assert not any(ref() is not None for ref in alive)
            tensor = torch.full((5, 2), number, dtype=torch.bfloat16)
            alive.append(weakref.ref(tensor))
            yield f"t{number}", tensor
            del tensor

    with open(tmp_path / "w.npz", "wb") as file:
        write_npz(file, tensors())
    assert {name: array.mean() for name, array in np.load(tmp_path / "w.npz").items()} == {"t0": 0, "t1": 1, "t2": 2}


def test_a_damaged_checkpoint_is_not_exported(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    newest = max(copy.glob("checkpoints/step_*")) / "rank_00000.bin"
    newest.write_bytes(bytes(byte ^ 1 for byte in newest.read_bytes()))
    for form in ("numpy", "torchrec", "pt"):
        (tmp_path / "model").write_text("of yesterday")
        assert main(["export", str(copy), "--to", form, "--out", str(tmp_path / "model")]) == 2
        assert "rank_00000.bin' is damaged" in capsys.readouterr().err
        assert (tmp_path / "model").read_text() == "of yesterday"
    assert {path.name for path in tmp_path.iterdir()} == {"run", "model"}


def test_what_is_no_run_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", str(REPOSITORY / "configs")]) == 2
    said = capsys.readouterr().err
    assert said.endswith("configs' is no run directory: it has no config.yaml.\n") and said.count("\n") == 1


OWN = """
import pathlib
from dlrm_autoshard import DenseArch

pathlib.Path("executed").touch()
raise SystemExit("it was executed")
"""


@pytest.mark.parametrize("key", ["data.factory", "model.factory"])
def test_code_that_lies_in_a_run_is_executed_by_none_that_only_reads_it(
    key: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever was sent a run reads its records, and is asked before its code runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    copy = tmp_path / "sent"
    shutil.copytree(run, copy)
    (copy / "code").mkdir()
    for file in ("own.py", "code/__init__.py", "code/own.py"):
        (copy / file).write_text(OWN)
    (tmp_path / "link.py").symlink_to(copy / "own.py")
    record = yaml.safe_load((copy / "config.yaml").read_text())
    for place in ("sent/own.py:F", f"{tmp_path}/link.py:F", "sent.own:F", "sent.code.own:F"):
        section, name = key.split(".")
        changed = {"source": "custom"} if section == "data" else record["model"]
        (copy / "config.yaml").write_text(yaml.safe_dump({**record, section: {**changed, name: place}}))
        for command in (["evaluate"], ["predict", "--out", "p.npy"], ["export"], ["export", "--to", "numpy"]):
            assert main([*command, str(copy)]) == 2, command
            said = capsys.readouterr().err
            assert f"{key} is '{place}'" in said and "add --trust" in said
        for command in (["explain", str(copy)], ["plan", str(copy)], ["tables", "--from-run", str(copy), "--json"]):
            assert main(command) == 0, command
        capsys.readouterr()
        with pytest.raises(SystemExit, match="it was executed"):
            main(["evaluate", str(copy), "--trust"])
        assert (tmp_path / "executed").exists()
        (tmp_path / "executed").unlink()
        assert not (copy / "model.pt2").exists() and not (copy / "model.npz").exists()
        for loaded in [name for name in sys.modules if name == "sent" or name.startswith("sent.")]:
            del sys.modules[loaded]


def test_code_beside_a_run_is_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert not plug_in.lies_in("clicks.py:Clicks", tmp_path / "runs" / "mine")
    assert not plug_in.lies_in("json:loads", tmp_path) and not plug_in.lies_in("no.such.module:F", tmp_path)
    assert plug_in.lies_in("runs/mine/../mine/clicks.py:Clicks", tmp_path / "runs" / "mine")


def test_a_run_can_be_planned_for_and_explained(run: Path, tmp_path: Path) -> None:
    pool = json.loads(said_by("tables", "--from-run", str(run), "--json"))
    assert [table["name"] for table in pool["tables"]] == ["user", "item", "clicked", "country", "coupon"]
    assert pool["tables"][2]["stats"]["mean_pooling"] == pytest.approx(8, rel=0.1)
    planned = json.loads(said_by("plan", str(run), "--json"))
    assert planned["plan"]["world_size"] == 2, "as many ranks as the run had"
    explained = json.loads(said_by("explain", str(run), "--json"))
    assert set(explained["plan"]["rank_of"]) == {"user", "item", "clicked", "country", "coupon"}
