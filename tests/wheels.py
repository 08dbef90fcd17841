"""Builds the package as people get it: a wheel, and an environment with only that wheel of this repository."""

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]


def build_wheel(folder: Path) -> Path:
    """Builds a wheel from a copy, so that nothing from earlier builds gets in."""
    copy = folder / "source"
    shutil.copytree(
        REPOSITORY / "dlrm_autoshard", copy / "dlrm_autoshard", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copytree(REPOSITORY / "configs", copy / "configs")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, copy)
    here = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    run([sys.executable, "-m", "pip", "wheel", str(copy), "--no-deps", "--quiet", "-w", str(folder / "dist"), *here])
    return next((folder / "dist").glob("*.whl"))


def install_beside_our_packages(wheel: Path, folder: Path) -> Path:
    """Makes an environment with the wheel, and with torch and the like from the tests' own; returns its bin folder."""
    run([sys.executable, "-m", "venv", "--without-pip", str(folder)])
    python = folder / "bin" / "python"
    run([sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel)])
    site = run([str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
    Path(site, "theirs.pth").write_text(sysconfig.get_path("purelib") + "\n")  # only now: pip would find us there
    return folder / "bin"


def bare() -> dict[str, str]:
    """Returns environment variables without those that lead back to the repository or hide a warning from users."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, env=bare())
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
