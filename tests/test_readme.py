"""The pages' promises: links lead somewhere, YAML loads, scripts are there, commands run; and pages are short."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlrm_autoshard.benchmarks.peer_torchrec import find_torchrec
from dlrm_autoshard.commands.keys import keys_page
from dlrm_autoshard.commands.main import main
from dlrm_autoshard.config import parse_config
from tests.layers import LAYERS
from tests.wheels import bare, build_wheel, install_beside_our_packages

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()
PACKAGE = REPOSITORY / "dlrm_autoshard"
SHORT = {  # pages for people who want to do something: 300 to 1,000 words
    "launch/README.md", "configs/README.md", "dlrm_autoshard/README.md", "dlrm_autoshard/report/README.md",
    "dlrm_autoshard/planner/README.md", "dlrm_autoshard/torchrec/README.md", "dlrm_autoshard/distributed/GPU.md",
    "dlrm_autoshard/commands/EXPORT.md", "dlrm_autoshard/CUSTOM_LOOP.md",
}  # fmt: skip
PAGES = {
    path.relative_to(REPOSITORY).as_posix(): path.read_text()
    for folder in (".", "launch", "configs", "dlrm_autoshard")
    for path in sorted((REPOSITORY / folder).glob("*.md" if folder == "." else "**/*.md"))
}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], re.DOTALL)


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


@pytest.mark.parametrize(("page", "most_lines"), [("README.md", 20), ("dlrm_autoshard/CUSTOM_LOOP.md", 25)])
def test_a_training_loop_runs_on_two_ranks(page: str, most_lines: int, tmp_path: Path) -> None:
    loop = the_loop("autoshard = Autoshard(bags", page)
    assert len(loop.splitlines()) <= most_lines
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


# Commands ----------------------------------------------------------------------------------------------------------


def commands(page: str) -> list[str]:
    lines = (line for block in blocks(page, "bash") for line in block.splitlines() if line.strip())
    return [line.partition("  #")[0].strip() for line in lines]


ELSEWHERE = {
    "pip install": "test_wheel.py, in a bare environment",
    "NNODES=2 RANKS_PER_NODE=4": "test_launch.py, two agents on one machine",
    "dlrm-autoshard train mine.yaml --nodes": "test_train_command.py, two launchers on one machine",
    "torchrun --nnodes=2": "test_network.py, four ranks on two hosts",
    "dlrm-autoshard bench gpu-all": "test_gpu_ready.py, which learns that there is no GPU",
    "dlrm-autoshard train movielens": "as the quickstart trains it",
    "dlrm-autoshard plan --from-torchrec": "test_torchrec_module_file.py, of a module that it saves",
    "bash launch/test.sh": "by whoever runs this",
    "sbatch --nodes=2": "nowhere: it needs SLURM; test_launch.py checks that it is bash",
    "docker": "nowhere: it needs Docker",
}
SLOW = ["dlrm-autoshard train demo --ranks 2", "bash launch/quickstart.sh"]
TORCHRUN = "OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 launch/train.py --config configs/debug_cpu.yaml"
QUICK = {
    page: [
        line
        for line in commands(page)
        if line not in SLOW and not line.startswith(tuple(ELSEWHERE)) and not (line == TORCHRUN and page != "README.md")
    ]
    for page in PAGES
}


def test_every_command_is_run_by_some_test() -> None:
    assert TORCHRUN in QUICK["README.md"] and set(SLOW) <= set(commands("README.md"))
    lines = [line for page in PAGES for line in QUICK[page]]
    assert not [line for line in lines if line != TORCHRUN and not line.startswith(("dlrm-autoshard ", "printf "))]


@pytest.fixture(scope="module")
def with_a_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the commands of launch/README.md have trained."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    run_here("launch/README.md", folder)
    return folder


def run_here(page: str, folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in QUICK[page]:
            assert main(shlex.split(line)[1:]) == 0, line


@pytest.mark.parametrize(
    "page", [page for page in PAGES if QUICK[page] and page not in ("README.md", "launch/README.md")]
)
def test_a_pages_commands_work_in_their_order(page: str, with_a_run: Path) -> None:
    run_here(page, with_a_run)


def shell(command: str, folder: Path, programs: Path | None = None, limit: float = 280) -> str:
    path = f"{programs}{os.pathsep}{os.environ['PATH']}" if programs else os.environ["PATH"]
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env={**bare(), "PATH": path}, capture_output=True, text=True, timeout=limit
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of an environment with the wheel, and nothing else of this repository."""
    folder = tmp_path_factory.mktemp("environment")
    programs = install_beside_our_packages(build_wheel(folder), folder / "env")
    (programs / "torchrun").write_text(f'#!/bin/sh\nexec "{programs}/python" -m torch.distributed.run "$@"\n')
    (programs / "torchrun").chmod(0o755)
    return programs


def test_its_commands_work_in_their_order(programs: Path, tmp_path: Path) -> None:
    where = shell(f"'{programs}/python' -I -c 'import dlrm_autoshard as d; print(d.__file__)'", tmp_path)
    assert where.startswith(str(programs.parent)), "the wheel's package, not the repository's"
    for name in ("launch", "configs"):
        shutil.copytree(REPOSITORY / name, tmp_path / name)
    for command in QUICK["README.md"]:
        shell(command, tmp_path, programs)
    for made in ("mine.yaml", "predictions.npy", "model.pt2", "runs/debug_cpu/result.json"):
        assert (tmp_path / made).exists(), made


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_demo_moves_tables_where_the_data_drift_and_says_what_it_gained(programs: Path, tmp_path: Path) -> None:
    said = shell("dlrm-autoshard train demo --ranks 2", tmp_path, programs, limit=800)
    assert re.search(r"^\d+ moves?\b.*: saved [\d.]+% \([\d.]+ to [\d.]+%\)", said, re.MULTILINE), said
    decisions = [json.loads(line) for line in (tmp_path / "runs/demo/decisions.jsonl").read_text().splitlines()]
    assert any(decision["action"] == "moved" and 256 < decision["step"] < 384 for decision in decisions)


def bare_clone(folder: Path) -> Path:
    for name in ("dlrm_autoshard", "launch", "configs"):
        shutil.copytree(REPOSITORY / name, folder / name)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_starts_from_a_bare_clone(tmp_path: Path) -> None:
    assert "test AUC" in shell("bash launch/quickstart.sh --cpu", bare_clone(tmp_path / "clone"), limit=1700)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_starts_where_python_3_13_is_the_only_one(tmp_path: Path) -> None:
    found = [shutil.which("python3.13"), *Path.home().glob(".pyenv/versions/3.13.*/bin/python3.13")]
    works = [str(one) for one in found if one and not subprocess.call([one, "-c", ""], stderr=subprocess.DEVNULL)]
    if not works:
        pytest.skip("this machine has no Python 3.13")
    programs = tmp_path / "bin"
    programs.mkdir()
    for program in [*Path("/bin").iterdir(), *Path("/usr/bin").iterdir()]:
        if not program.name.startswith("python") and not (programs / program.name).exists():
            (programs / program.name).symlink_to(program)
    (programs / "python3").symlink_to(works[0])
    clone = bare_clone(tmp_path / "clone")
    environment = {**bare(), "PATH": str(programs)}
    done = subprocess.run(
        ["bash", "launch/quickstart.sh", "--cpu"],
        cwd=clone, env=environment, capture_output=True, text=True, timeout=1700,
    )  # fmt: skip
    assert done.returncode == 0 and "test AUC" in done.stdout, done.stdout + done.stderr
    assert "Making .venv with Python 3.13." in done.stdout
