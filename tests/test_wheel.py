"""What is shipped: the wheel's content, and a bare environment in which nothing else was installed.

That it trains beside installed packages, in a folder of one's own, is in test_page_commands.py.
"""

import re
import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import dlrm_autoshard
from tests.wheels import REPOSITORY, bare, build_wheel, run


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
        if path.is_file() and not {"__pycache__", "rows"} & set(path.parts)  # rows: for who goes on with a benchmark
    }
    assert inside == wanted
    assert "dlrm_autoshard/py.typed" in inside
    for told in ("Classifier: Typing :: Typed", "Provides-Extra: cpu", "Description-Content-Type: text/markdown"):
        assert told in metadata
    assert wheel.stat().st_size < 2 * 2**20


@pytest.fixture(scope="module")
def programs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those of an environment that pip alone has filled: torch and fbgemm are fetched, by pip's own settings."""
    folder = tmp_path_factory.mktemp("bare")
    run([sys.executable, "-m", "venv", str(folder / "env")])
    programs = folder / "env" / "bin"
    run([str(programs / "python"), "-m", "pip", "install", "--quiet", f"{wheel}[cpu]"])
    return programs


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_bare_environment_gets_all_it_needs_from_pip_and_trains(programs: Path, tmp_path: Path) -> None:
    run([str(programs / "dlrm-autoshard"), "doctor"])
    for command in ("configs", "train debug_cpu --ranks=2 train.max_steps=30", "report runs/latest --html"):
        done = subprocess.run(
            [str(programs / "dlrm-autoshard"), *command.split()],
            capture_output=True, text=True, timeout=300, cwd=tmp_path, env=bare(),
        )  # fmt: skip
        assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert (tmp_path / "runs/debug_cpu/report.html").exists()


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_pages_line_installs_torchrec_there(wheel: Path, programs: Path) -> None:
    (line,) = re.findall(
        r"`(pip install \"\.\[[^`]*torchrec==[^`]*)`", (REPOSITORY / "dlrm_autoshard/torchrec/README.md").read_text()
    )
    for command in line.replace('".[', f'"{wheel}[').split(" && "):
        run([str(programs / "python"), "-m", *shlex.split(command), "--quiet"])
    run([str(programs / "python"), "-c", "import torchrec.distributed, dlrm_autoshard as das; das.torchrec.Autoshard"])
    run([str(programs / "dlrm-autoshard"), "doctor"])  # fbgemm is still the one that torch and this machine need
