"""Users' own data and dense part: the example of configs/CUSTOM.md trains on two ranks and learns; whatever is wrong
with such code is a sentence that names the key."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import yaml

from dlrm_autoshard import plug_in
from dlrm_autoshard.config import ModelConfig, TablesConfig
from dlrm_autoshard.config_data import CustomData
from dlrm_autoshard.data.batch import DataError
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.model.dlrm import make_model

ROOT = Path(__file__).parents[1]


def page_example(folder: Path) -> None:
    """The page's two classes, and clicks that depend on dense features and ids alike."""
    blocks = re.findall(r"```python\n(# (\w+\.py)\n.*?)```", (ROOT / "configs/CUSTOM.md").read_text(), re.DOTALL)
    assert sorted(name for _, name in blocks) == ["clicks.py", "tower.py"]
    for text, name in blocks:
        (folder / name).write_text(text)
    generator = np.random.default_rng(0)
    dense = generator.normal(size=(20_000, 3)).astype(np.float32)
    ids = np.stack([generator.integers(0, rows, 20_000) for rows in (50, 7, 20)], 1)
    odds = dense[:, 0] + (ids[:, 0] % 2) * 2 - 1 + (ids[:, 2] % 3) - 1
    np.savez(folder / "clicks.npz", dense=dense, ids=ids, label=generator.random(20_000) < 1 / (1 + np.exp(-odds)))


def page_yaml() -> dict[str, object]:
    text = re.search(r"```yaml\n(data: \{source: custom.*?)```", (ROOT / "configs/CUSTOM.md").read_text(), re.DOTALL)
    assert text is not None
    return yaml.safe_load(text[1])


def test_files_of_one_name_are_several_modules(tmp_path: Path) -> None:
    found = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "clicks.py").write_text(f"class Clicks:\n    place = '{folder}'\n")
        found.append(plug_in.load(str(tmp_path / folder / "clicks.py") + ":Clicks", "data.factory"))
    assert [one.place for one in found] == ["one", "two"]  # type: ignore[attr-defined]
    assert [sys.modules[one.__module__].Clicks for one in found] == found, "as pickle finds them"


def test_a_source_may_count_in_numpys_numbers(tmp_path: Path) -> None:
    page_example(tmp_path)
    with open(tmp_path / "clicks.py", "a") as file:
        file.write("\n\nclass Counted(Clicks):\n    def num_samples(self, split):\n")
        file.write("        return np.int64(super().num_samples(split))\n")
    options = {"path": str(tmp_path / "clicks.npz")}
    source = open_source(
        CustomData(source="custom", factory=f"{tmp_path / 'clicks.py'}:Counted", options=options), TablesConfig()
    )
    assert source.num_samples("train") == 18_000


def test_the_pages_example_trains_on_two_ranks(tmp_path: Path) -> None:
    page_example(tmp_path)
    record = {**page_yaml(), "run": {"device": "cpu"}, "train": {"batch_size": 128, "epochs": 2}}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump({**record, "autoshard": {"enabled": True}}))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "launch/train.py"), "--config", "own.yaml"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [json.loads(line) for line in (tmp_path / "runs/run/metrics.jsonl").read_text().splitlines()]
    assert [line["auc"] for line in lines if "auc" in line][-1] > 0.75  # the best possible is 0.83


@pytest.mark.parametrize(
    "place, says",
    [
        ("clicks.py", "must have the form file.py:name"),
        ("nowhere.py:Clicks", "there is no file 'nowhere.py'"),
        ("no_such_module_at_all.x:Clicks", "finds no module 'no_such_module_at_all.x'"),
        ("json:Clicks", "'json' has no function or class 'Clicks'"),
    ],
)
def test_code_that_is_not_there(place: str, says: str) -> None:
    with pytest.raises(UserError, match=re.escape(says)) as error:
        plug_in.load(place, "data.factory")
    assert "data.factory" in str(error.value)


def test_a_module_that_imports_what_is_not_there_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_service_tracker.py").write_text("import no_such_service\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_service'"):
        plug_in.load("no_such_service_tracker:Tracker", "callbacks")


def test_custom_tables_and_labels_have_names_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "twice.py").write_text(
        "from tests.scripted_source import Scripted\n"
        "def make(tables, what):\n"
        "    source = Scripted()\n"
        "    setattr(source, what, {'tables': (source.tables[1],) * 2, 'label_names': ('a', 'a')}[what])\n"
        "    return source\n"
    )
    for what, name in (("tables", "user"), ("label_names", "a")):
        data = CustomData(source="custom", factory=f"{tmp_path}/twice.py:make", options={"what": what})
        with pytest.raises(DataError, match=rf"data\.factory: {what} of '.*' have '{name}' more than once"):
            open_source(data, TablesConfig())


def test_what_custom_data_gets_wrong_is_said_before_training(tmp_path: Path) -> None:
    page_example(tmp_path)
    place, tables = f"{tmp_path / 'clicks.py'}:Clicks", TablesConfig()

    def opened(**options: object) -> object:
        return open_source(CustomData(source="custom", factory=place, options=options), tables)

    with pytest.raises(UserError, match="options folder: missing a required argument: 'path'"):
        opened(folder=str(tmp_path))
    opened(path=str(tmp_path / "clicks.npz"))
    text = (tmp_path / "clicks.py").read_text()
    (tmp_path / "clicks.py").write_text(text.replace("self.ids[part].T.int()", "self.ids[part].T.double()"))
    with pytest.raises(DataError, match=r"gives lengths_TB as float64 \[3, 2\]; .* must be int32 \[3, 2\]"):
        opened(path=str(tmp_path / "clicks.npz"))
    weighted = text.replace("size, size)", "size, size, weights_N=torch.ones(WEIGHTS))")
    (tmp_path / "clicks.py").write_text(weighted.replace("WEIGHTS", "5"))
    with pytest.raises(DataError, match=r"gives weights_N as float32 \[5\]; .* must be float32 \[6\]"):
        opened(path=str(tmp_path / "clicks.npz"))
    (tmp_path / "clicks.py").write_text(weighted.replace("WEIGHTS", "6").replace("(6)", "(6).double()"))
    with pytest.raises(DataError, match=r"gives weights_N as float64 \[6\]; .* must be float32 \[6\]"):
        opened(path=str(tmp_path / "clicks.npz"))
    (tmp_path / "clicks.py").write_text(weighted.replace("WEIGHTS", "6"))
    opened(path=str(tmp_path / "clicks.npz"))
    tables = TablesConfig(pooling="mean")
    with pytest.raises(DataError, match=r"gives weights_N, .* the pooling of 'table_0' is mean"):
        opened(path=str(tmp_path / "clicks.npz"))
    (tmp_path / "clicks.py").write_text("class Clicks:\n    def __init__(self, tables): pass\n")
    with pytest.raises(DataError, match="has no tables and no num_dense"):
        opened()


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16"])
def test_weights_that_are_trained_must_be_float32(dtype: str, tmp_path: Path) -> None:
    """Others were rounded in silence, or ended in torch's own words. What is frozen may be of any type."""
    path = tmp_path / "other.py"
    path.write_text(
        "import torch\nfrom dlrm_autoshard import DenseArch\n\n\nclass Arch(DenseArch):\n"
        "    def __init__(self, num_dense, tables, frozen=False):\n        super().__init__()\n"
        f"        self.layer = torch.nn.Linear(2, 1).to(torch.{dtype})\n"
        "        self.layer.requires_grad_(not frozen)\n"
    )
    with pytest.raises(UserError, match=rf"returns layer\.weight as {dtype}; .* must be float32.*dense_dtype: bf16"):
        make_model(3, (), ModelConfig(factory=f"{path}:Arch"))
    make_model(3, (), ModelConfig(factory=f"{path}:Arch", options={"frozen": True}))


def test_a_dense_part_must_be_one(tmp_path: Path) -> None:
    path = tmp_path / "other.py"
    path.write_text("import torch\ndef made(num_dense, tables): return torch.nn.Module()\n")
    with pytest.raises(UserError, match=r"returns a Module; it must return a dlrm_autoshard\.DenseArch"):
        make_model(3, (), ModelConfig(factory=f"{path}:made"))


RAISES = """
import torch
from dlrm_autoshard import DenseArch
class Source:
    def __init__(self, tables, **options):
        self.lost()
    def lost(self):
        raise KeyError("clicks of day 3")
class Tower(DenseArch):
    def __init__(self, *given, **options):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)
    def bottom(self, dense):
        return self.layer(torch.zeros(2, 5))
class Tracker:
    def __init__(self, run_dir, config): pass
    def scalars(self, step, values): raise ConnectionError("no dashboard answers")
    def finish(self, result): raise AssertionError("it is told nothing more")
"""
SYNTHETIC = {"source": "synthetic", "train_samples": 300, "tables": [{"name": "a", "num_embeddings": 50}]}


def own_job(folder: Path, **sections: object) -> subprocess.CompletedProcess[str]:
    (folder / "mine.py").write_text(RAISES)
    run = {"device": "cpu", "pin_cores": False, "name": "job"}
    (folder / "own.yaml").write_text(yaml.safe_dump({"run": run, "data": SYNTHETIC, **sections}))
    command = [sys.executable, "-m", "dlrm_autoshard", "train", "own.yaml", "--ranks=1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment)


@pytest.mark.parametrize(
    ("sections", "error", "lines"),
    [
        ({"data": {"source": "custom", "factory": "mine.py:Source"}}, "KeyError: 'clicks of day 3'", 10),
        ({"model": {"factory": "mine.py:Tower"}}, "RuntimeError: mat1 and mat2 shapes cannot be multiplied", 20),
    ],
)
def test_an_error_in_code_of_ones_own_shows_its_own_frames(
    sections: dict[str, object], error: str, lines: int, tmp_path: Path
) -> None:
    done = own_job(tmp_path, **sections)
    assert done.returncode == 1
    assert done.stderr.startswith(error) and "mine.py" in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) < lines and f"{ROOT}/dlrm_autoshard" not in done.stderr, done.stderr


def test_a_callback_that_fails_ends_no_training(tmp_path: Path) -> None:
    done = own_job(tmp_path, callbacks=["mine.py:Tracker"], train={"batch_size": 64, "log_every_steps": 1})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Tracker failed and will not be called again: ConnectionError: no dashboard answers") == 1
    assert (tmp_path / "runs/job/result.json").exists()
