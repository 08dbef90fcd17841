"""What is shipped: the wheel's content, and a bare environment in which nothing else was installed."""

import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

import dlrm_autoshard
from tests.wheels import REPOSITORY, bare, build_wheel, install_beside_our_packages, run


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def test_it_holds_every_module_config_and_data_file_and_nothing_of_the_tests(wheel: Path) -> None:
    assert f"-{dlrm_autoshard.__version__}-" in wheel.name
    with zipfile.ZipFile(wheel) as opened:
        inside = {name for name in opened.namelist() if ".dist-info/" not in name}
        metadata = next(opened.read(n).decode() for n in opened.namelist() if n.endswith("METADATA"))
    package = REPOSITORY / "dlrm_autoshard"
    wanted = {f"dlrm_autoshard/configs/{path.name}" for path in (REPOSITORY / "configs").glob("*.yaml")}
    wanted |= {
        str(path.relative_to(REPOSITORY))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert inside == wanted
    assert "dlrm_autoshard/py.typed" in inside
    for told in ("Classifier: Typing :: Typed", "Provides-Extra: cpu", "Description-Content-Type: text/markdown"):
        assert told in metadata
    assert wheel.stat().st_size < 2 * 2**20


def test_it_trains_a_shipped_config_in_a_folder_of_ones_own(wheel: Path, tmp_path: Path) -> None:
    programs = install_beside_our_packages(wheel, tmp_path / "env")
    trains_anywhere(programs / "dlrm-autoshard", tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_bare_environment_gets_all_it_needs_from_pip_and_trains(wheel: Path, tmp_path: Path) -> None:
    """torch and fbgemm are fetched, by pip's own settings."""
    started = time.monotonic()
    run([sys.executable, "-m", "venv", str(tmp_path / "env")])
    programs = tmp_path / "env" / "bin"
    run([str(programs / "python"), "-m", "pip", "install", "--quiet", f"{wheel}[cpu]"])
    run([str(programs / "dlrm-autoshard"), "doctor"])
    trains_anywhere(programs / "dlrm-autoshard", tmp_path)
    print(f"bare environment, from nothing to a trained model: {time.monotonic() - started:.0f} s")


def trains_anywhere(program: Path, folder: Path) -> None:
    where = run([str(program.parent / "python"), "-I", "-c", "import dlrm_autoshard as d; print(d.__file__)"])
    assert where.startswith(str(program.parent.parent)), "the wheel's package, not the repository's"
    for command in (
        ["configs"],
        ["train", "debug_cpu", "--ranks=2", "train.max_steps=30"],
        ["report", "runs/latest", "--html"],
    ):
        done = subprocess.run(
            [str(program), *command], capture_output=True, text=True, timeout=300, cwd=folder, env=bare()
        )
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert (folder / "runs/debug_cpu/report.html").exists()
