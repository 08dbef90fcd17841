"""The doctor finds wrong packages from metadata, before any import, and has the line that fixes each problem."""

import importlib.metadata
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_autoshard.commands.environment_checks import (
    NEWEST,
    PAIRS,
    EnvironmentProblem,
    check_cores,
    check_memory,
    check_pair,
    check_python,
    require_pair,
)
from dlrm_autoshard.distributed.ranks.free_memory import free_host_memory

REPOSITORY = Path(__file__).parents[1]
PIP = f"{sys.executable} -m pip"
CPU_INDEX = "--extra-index-url https://download.pytorch.org/whl/cpu"
TORCH, FBGEMM = PAIRS[NEWEST]
# What goes with the torch that runs these tests.
FBGEMM_HERE = next(f for torch, f in PAIRS.values() if torch[:4] == importlib.metadata.version("torch")[:4])


def pretend(folder: Path, **versions: str) -> dict[str, str]:
    """An environment for a subprocess in which these packages seem to be installed: real metadata, found first."""
    for package, version in versions.items():
        info = folder / f"{package}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: {version}\n")
    return {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{REPOSITORY}", "OMP_NUM_THREADS": "1"}


@given(st.integers(0, 20), st.integers(0, 20), st.sampled_from(["fbgemm-gpu", "fbgemm-gpu-cpu"]))
def test_fbgemm_1_x_belongs_to_torch_2_x_plus_5_and_to_no_other(fbgemm: int, torch: int, variant: str) -> None:
    check = check_pair({"torch": f"2.{torch}.0+cpu", variant: f"1.{fbgemm}.0"}.get)
    assert (check.status != "fail") == (torch == fbgemm + 5)
    assert (check.fix is None) == (check.status == "ok")


def test_the_tested_pairs_are_well_and_are_what_setup_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr("setuptools.setup", asked.update)
    monkeypatch.chdir(REPOSITORY)
    runpy.run_path("setup.py")
    extras = asked["extras_require"]
    for (major, minor), (torch, fbgemm) in PAIRS.items():
        for device, package in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
            assert check_pair({"torch": torch, package: fbgemm}.get).status == "ok"
            assert extras[f"{device}-{major}.{minor}"] == [f"torch=={torch}", f"{package}=={fbgemm}"]
            if (major, minor) == NEWEST:
                assert extras[device] == extras[f"{device}-{major}.{minor}"]


@pytest.mark.parametrize(("torch", "fbgemm"), PAIRS.values())
def test_the_mending_line_changes_only_the_half_that_is_off(torch: str, fbgemm: str) -> None:
    old_fbgemm = check_pair({"torch": torch, "fbgemm-gpu-cpu": "1.6.0"}.get)
    assert old_fbgemm.finding == f"fbgemm-gpu-cpu 1.6.0 needs torch 2.11, but torch is {torch}."
    assert old_fbgemm.fix == f"{PIP} install fbgemm-gpu-cpu=={fbgemm}"
    old_torch = check_pair({"torch": "2.11.0", "fbgemm-gpu": fbgemm}.get)
    assert old_torch.fix == f"{PIP} install torch=={torch}"
    old_torch_for_cpu = check_pair({"torch": "2.11.0", "fbgemm-gpu-cpu": fbgemm}.get)
    assert old_torch_for_cpu.fix == f"{PIP} install torch=={torch} {CPU_INDEX}"


def test_the_newest_pair_mends_what_goes_with_none() -> None:
    both_old = check_pair({"torch": "2.10.0", "fbgemm-gpu": "1.6.0"}.get)
    assert both_old.fix == f"{PIP} install torch=={TORCH} fbgemm-gpu=={FBGEMM}"
    crossed = check_pair({"torch": PAIRS[2, 14][0], "fbgemm-gpu-cpu": PAIRS[2, 13][1]}.get)
    assert crossed.fix == f"{PIP} install fbgemm-gpu-cpu=={PAIRS[2, 14][1]}"  # torch is the larger half


@pytest.mark.parametrize("fbgemm", [{}, {"fbgemm-gpu-cpu": FBGEMM}])
def test_a_torch_that_is_ahead_of_every_fbgemm_is_called_so(fbgemm: dict[str, str]) -> None:
    check = check_pair({"torch": "2.15.0", **fbgemm}.get)
    assert check.finding == f"torch 2.15.0 has no fbgemm yet: the newest, {FBGEMM}, goes with torch {TORCH}."
    wanted = f"torch=={TORCH}" if fbgemm else f"torch=={TORCH} fbgemm-gpu-cpu=={FBGEMM}"
    assert check.fix == f"{PIP} install {wanted} {CPU_INDEX}"


def test_two_fbgemms_at_once_are_an_error_whatever_their_versions() -> None:
    check = check_pair({"torch": TORCH, "fbgemm-gpu": FBGEMM, "fbgemm-gpu-cpu": FBGEMM}.get)
    assert check.status == "fail" and "overwrite" in check.finding
    assert (check.fix or "").startswith(f"{PIP} uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {PIP} install fbgemm-gpu")


@pytest.mark.parametrize(
    ("versions", "finding"),
    [
        ({"torch": TORCH}, "fbgemm is not installed."),
        ({"fbgemm-gpu-cpu": FBGEMM}, "torch is not installed."),
        ({}, "torch is not installed."),
        ({"torch": TORCH, "fbgemm-gpu-cpu": "0+unknown"}, "is not of a known series, but torch is"),
    ],
)
def test_what_is_missing_or_unknown_is_named(versions: dict[str, str], finding: str) -> None:
    check = check_pair(versions.get)
    assert check.status == "fail" and finding in check.finding and f"{PIP} install" in (check.fix or "")


def test_require_pair_raises_a_sentence_with_the_line() -> None:
    with pytest.raises(EnvironmentProblem, match=rf"needs torch 2\.11.*\n.*pip install fbgemm-gpu-cpu=={FBGEMM}"):
        require_pair({"torch": TORCH, "fbgemm-gpu-cpu": "1.6.0"}.get)
    require_pair({"torch": TORCH, "fbgemm-gpu-cpu": FBGEMM}.get)


@pytest.mark.parametrize(("version", "status"), [((3, 9), "fail"), ((3, 10), "ok"), ((3, 14), "ok"), ((3, 15), "fail")])
def test_pythons_that_fbgemm_has_no_packages_for_fail(version: tuple[int, int], status: str) -> None:
    assert check_python(version).status == status


def test_fewer_cores_than_ranks_or_little_memory_are_warnings_with_figures() -> None:
    assert check_cores(ranks=2, cores=2).status == "ok"
    assert check_cores(ranks=4, cores=2).status == "warn"
    assert check_cores(ranks=4, cores=2).fix == "--ranks 2"
    assert check_memory(ranks=2, available_bytes=8 * 2**30).status == "ok"
    assert "0.5 GiB for each of 2 ranks" in check_memory(ranks=2, available_bytes=2**30).finding


def test_a_healthy_environment_passes_and_trains_a_row() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_autoshard.commands.main", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    checks = {check["name"]: check for check in json.loads(done.stdout)}
    assert done.returncode == 0, checks
    assert checks["embedding kernel"]["finding"].startswith("one SGD step on ")
    assert "two ranks exchanged tensors" in checks["backend"]["finding"]


def test_a_wrong_pair_is_reported_before_fbgemm_is_imported(tmp_path: Path) -> None:
    environment = pretend(tmp_path, **{"fbgemm_gpu_cpu": "1.6.0"})
    command = [sys.executable, "-X", "importtime", "-m", "dlrm_autoshard.commands.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert f"fix:     {PIP} install fbgemm-gpu-cpu=={FBGEMM_HERE}" in done.stdout
    assert "fbgemm_gpu" not in done.stderr and "| torch\n" not in done.stderr


def test_a_library_that_kills_its_process_becomes_a_sentence(tmp_path: Path) -> None:
    environment = pretend(tmp_path)
    package = tmp_path / "fbgemm_gpu"
    package.mkdir()
    (package / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n")
    command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert "died by SIGILL" in done.stdout and "--force-reinstall" in done.stdout


def test_training_with_a_wrong_pair_ends_in_the_doctors_line_not_in_a_traceback(tmp_path: Path) -> None:
    environment = pretend(tmp_path, **{"fbgemm_gpu_cpu": "1.6.0"})
    command = [sys.executable, str(REPOSITORY / "launch" / "train.py"), "--config", "whatever.yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 2
    assert "needs torch 2.11" in done.stderr and f"{PIP} install fbgemm-gpu-cpu=={FBGEMM_HERE}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_memory_of_a_control_group_is_what_counts_in_it(tmp_path: Path) -> None:
    for name, text in (("max", "8388608"), ("current", "3145728"), ("stat", "anon 5\ninactive_file 1048576")):
        (tmp_path / f"memory.{name}").write_text(text + "\n")
    assert free_host_memory(tmp_path) == 6 << 20
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_memory(tmp_path) > 6 << 20
    assert free_host_memory(tmp_path / "nothing") > 6 << 20


def test_so_is_that_of_a_control_group_of_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    for name, text in (
        ("limit_in_bytes", "8388608"), ("usage_in_bytes", "3145728"), ("stat", "cache 5\ntotal_inactive_file 1048576")
    ):  # fmt: skip
        (tmp_path / "memory" / f"memory.{name}").write_text(text + "\n")
    assert free_host_memory(tmp_path) == 6 << 20
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")  # as it is without a limit
    assert free_host_memory(tmp_path) > 6 << 20
