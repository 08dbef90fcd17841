"""The pages' promises: links lead somewhere, YAML loads, scripts are there, loops run; and pages are short."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.commands.keys import keys_page
from dlrm_autoshard.config import parse_config
from tests.layers import LAYERS
from tests.pages import PAGES, REPOSITORY, blocks

README = PAGES["README.md"]
PACKAGE = REPOSITORY / "dlrm_autoshard"
SHORT = {  # pages for people who want to do something: 300 to 1,000 words
    "launch/README.md", "configs/README.md", "dlrm_autoshard/README.md", "dlrm_autoshard/report/README.md",
    "dlrm_autoshard/planner/README.md", "dlrm_autoshard/torchrec/README.md", "dlrm_autoshard/distributed/GPU.md",
    "dlrm_autoshard/commands/EXPORT.md", "dlrm_autoshard/CUSTOM_LOOP.md",
}  # fmt: skip


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere_and_scripts_are_there(page: str) -> None:
    links = {link for link in re.findall(r"\]\(([^)#\s]+)\)", PAGES[page]) if not link.startswith("http")}
    assert not [link for link in links if not (REPOSITORY / page).parent.joinpath(link).exists()]
    named = set(re.findall(r"(?<![\w/])(?:launch|configs)/\w[\w.]*\w", PAGES[page]))
    assert not [path for path in named if not (REPOSITORY / path).exists()]


@pytest.mark.parametrize("page", sorted(SHORT))
def test_a_page_is_read_in_minutes(page: str) -> None:
    assert 300 <= len(PAGES[page].split()) <= 1000


def test_the_readme_is_read_in_ten_minutes() -> None:
    assert len(README.splitlines()) <= 180 and len(README.split()) <= 1300


def test_the_glossary_has_at_most_thirty_terms() -> None:
    assert PAGES["dlrm_autoshard/GLOSSARY.md"].count("\n| ") - 2 <= 30


def test_the_page_of_keys_is_what_the_command_prints() -> None:
    assert PAGES["configs/KEYS.md"] == keys_page(), "run `dlrm-autoshard configs --keys > configs/KEYS.md`"


@pytest.mark.parametrize("page", [page for page in PAGES if "```yaml" in PAGES[page]])
def test_yaml_is_valid_and_names_tables_that_the_data_have(page: str) -> None:
    for block in blocks(page, "yaml"):
        record = {"data": {"source": "movielens"}, **yaml.safe_load(block)}
        assert parse_config(record).to_yaml()
        named = set(record.get("tables", {}).get("embedding_dims", {}))
        assert record["data"]["source"] != "criteo" or named <= {f"t_cat_{number}" for number in range(26)}


# The map of the code -----------------------------------------------------------------------------------------------

CODE = PAGES["dlrm_autoshard/README.md"]


@pytest.mark.parametrize("path", re.findall(r'\["([\w/]+\.py)"\]', CODE))
def test_each_file_of_the_diagram_is_there(path: str) -> None:
    assert (PACKAGE / path).is_file()


def test_every_folder_is_named_in_the_order_of_imports() -> None:
    named = [path.rstrip("/") for path in re.findall(r"^\| \[[\w/]+/\]\(([\w/]+)\)", CODE, re.MULTILINE)]
    files = (path.relative_to(PACKAGE) for path in PACKAGE.rglob("*") if path.is_file())
    folders = {path.parent.as_posix() for path in files if "__pycache__" not in path.parts} - {"."}
    assert set(named) == folders
    layers = [LAYERS.index(folder.split("/")[0]) for folder in named]
    assert layers == sorted(layers)


# Its training loop -------------------------------------------------------------------------------------------------

MADE_UP = """
import torch

lengths_TB = torch.ones(2, 64, dtype=torch.int32)
batches = [(lengths_TB, torch.randint(1000, (128,)), torch.randint(2, (64,)).float()) for _ in range(101)]
"""


def test_the_readmes_snippets_are_lines_of_examples_in_their_order() -> None:
    """Which test_examples.py runs; its commands are run by test_page_commands.py."""
    snippets = {"own_loop": "ShardedEmbeddingBags(", "torchrec_loop": "das.torchrec.Autoshard"}
    assert len(blocks("README.md", "python")) == len(snippets)
    for example, marked in snippets.items():
        file = (REPOSITORY / f"launch/examples/{example}.py").read_text()
        lines = iter([line.strip() for line in file.splitlines()])
        snippet = [line.strip() for line in the_loop(marked, "README.md").splitlines() if line]
        assert len(snippet) <= 20 and not [line for line in snippet if line not in lines]


def test_a_training_loop_runs_on_two_ranks(tmp_path: Path) -> None:
    loop = the_loop("autoshard = Autoshard(bags", "dlrm_autoshard/CUSTOM_LOOP.md")
    assert len(loop.splitlines()) <= 25
    run_loop(tmp_path, MADE_UP + loop)
    decisions = (tmp_path / "runs/mine/decisions.jsonl").read_text().splitlines()
    assert decisions and (tmp_path / "runs/mine/report.html").exists()


TORCHREC = """
from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec

assert find_torchrec() is None
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t{i}", num_embeddings=1000, embedding_dim=8, feature_names=[f"f{i}"])
            for i in range(4)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.tower = torch.nn.Linear(32, 1)

    def forward(self, features):
        return self.tower(self.ebc(features).values()).squeeze(1)


dist.init_process_group("gloo")
module, keys = Module(), [f"f{i}" for i in range(4)]
sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD})]
ids = [KeyedJaggedTensor(keys, torch.randint(1000, (256,)), lengths=torch.ones(256).int()) for _ in range(101)]
batches = [(features, torch.randint(2, (64,)).float()) for features in ids]
"""


@pytest.mark.skipif(find_torchrec() is not None, reason=find_torchrec() or "")
def test_its_torchrec_loop_runs_on_two_ranks(tmp_path: Path) -> None:
    run_loop(tmp_path, TORCHREC + the_loop("das.torchrec.Autoshard", "dlrm_autoshard/torchrec/README.md"))
    decisions = (tmp_path / "runs/torchrec/decisions.jsonl").read_text().splitlines()
    assert decisions and (tmp_path / "runs/torchrec/report.html").exists()


def the_loop(marked: str, page: str) -> str:
    (loop,) = (block for block in blocks(page, "python") if marked in block)
    return loop


def run_loop(tmp_path: Path, code: str) -> None:
    (tmp_path / "loop.py").write_text(code)
    torchrun = f"{sys.executable} -m torch.distributed.run --standalone --nproc_per_node=2 loop.py"
    done = subprocess.run(
        torchrun.split(),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
