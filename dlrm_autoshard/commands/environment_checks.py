"""Checks of the environment: what was found and, for each problem, the command that fixes it.

    check_pair(version_of={"torch": "2.13.0", "fbgemm-gpu-cpu": "1.6.0"}.get).finding

fbgemm 1.X is built against torch 2.(X+5) and crashes with any other, so versions are read from package metadata. This
module must work with a broken pair, so it imports neither.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_autoshard.distributed.ranks.free_memory import free_host_memory
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.versions import installed_version

Series = tuple[int, int]  # (2, 14) of 2.14.1

# Tested pairs of torch and fbgemm by torch's series; setup.py's extras install them.
PAIRS: dict[Series, tuple[str, str]] = {(2, 14): ("2.14.1", "1.9.0"), (2, 13): ("2.13.0", "1.8.0")}
NEWEST = max(PAIRS)
OLDEST_PYTHON, NEWEST_PYTHON = (3, 10), (3, 14)
CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"  # PyPI's torch brings gigabytes of CUDA
_PIP = f"{sys.executable} -m pip"
_SMOKE_SECONDS = 120

VersionOf = Callable[[str], str | None]


class EnvironmentProblem(UserError):
    """Installed packages cannot work together; the message names them and the command that fixes it."""


@dataclass(frozen=True)
class Check:
    """A line of `doctor`: the finding, and the command that fixes it."""

    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    fix: str | None = None


def examine(ranks: int, version_of: VersionOf = installed_version) -> list[Check]:
    """Runs all checks, cheapest first; imports fbgemm in a subprocess, and only if its version fits torch's."""
    checks = [check_python(sys.version_info[:2]), check_pair(version_of)]
    if checks[-1].status != "fail":
        checks += check_by_running(version_of)
    return [*checks, check_cores(ranks, _cores()), check_memory(ranks, free_host_memory()), check_disk(Path.cwd())]


def require_pair(version_of: VersionOf = installed_version) -> None:
    """Raises EnvironmentProblem if importing fbgemm would crash."""
    check = check_pair(version_of)
    if check.status == "fail":
        raise EnvironmentProblem(f"{check.finding} Fix it with:\n    {check.fix}")


def check_python(version: tuple[int, int]) -> Check:
    """Checks that fbgemm has packages for this Python."""
    found = f"Python {version[0]}.{version[1]}"
    if OLDEST_PYTHON <= version <= NEWEST_PYTHON:
        return Check("python", "ok", found)
    return Check("python", "fail", f"{found}; fbgemm has packages for 3.10 to 3.14.", "python3.13 -m venv .venv")


def check_pair(version_of: VersionOf = installed_version) -> Check:
    """Checks that fbgemm 1.X is installed with torch 2.(X+5), and that only one fbgemm package is."""
    name = "torch/fbgemm pair"
    torch = version_of("torch")
    variants = {package: v for package in ("fbgemm-gpu-cpu", "fbgemm-gpu") if (v := version_of(package)) is not None}
    variant = next(iter(variants), "fbgemm-gpu" if shutil.which("nvidia-smi") else "fbgemm-gpu-cpu")
    if len(variants) == 2:
        wanted = "fbgemm-gpu" if shutil.which("nvidia-smi") else "fbgemm-gpu-cpu"
        finding = "fbgemm-gpu and fbgemm-gpu-cpu are both installed; they overwrite each other's files."
        fix = f"{_PIP} uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {_install(wanted, torch, fbgemm=None)}"
        return Check(name, "fail", finding, fix)
    series = _series(torch)
    if series and series > NEWEST and series not in map(_torch_of, variants.values()):
        newest, newest_fbgemm = PAIRS[NEWEST]
        finding = f"torch {torch} has no fbgemm yet: the newest, {newest_fbgemm}, goes with torch {newest}."
        return Check(name, "fail", finding, _install(variant, torch, variants.get(variant)))
    if torch is None or not variants:
        missing = "torch" if torch is None else "fbgemm"
        return Check(name, "fail", f"{missing} is not installed.", _install(variant, torch, variants.get(variant)))
    fbgemm = variants[variant]
    wanted_torch = _torch_of(fbgemm)
    if wanted_torch is None or series != wanted_torch:
        needs = f"needs torch {wanted_torch[0]}.{wanted_torch[1]}" if wanted_torch else "is not of a known series"
        finding = f"{variant} {fbgemm} {needs}, but torch is {torch}."
        return Check(name, "fail", finding, _install(variant, torch, fbgemm))
    found = f"torch {torch}, {variant} {fbgemm}"
    if series not in PAIRS:
        tested = " and ".join(tested for tested, _ in PAIRS.values())
        note = f"{found} belong together, but this package is tested with torch {tested}."
        return Check(name, "warn", note, _install(variant, None, None))
    return Check(name, "ok", found)


def check_by_running(version_of: VersionOf) -> list[Check]:
    """Imports torch and fbgemm in a subprocess, trains one small table and exchanges tensors between two ranks.

    A crash (wrong library, missing CPU instruction) is reported as a failed check.
    """
    variant = "fbgemm-gpu" if version_of("fbgemm-gpu") else "fbgemm-gpu-cpu"
    torch, fbgemm = PAIRS.get(_series(version_of("torch")) or NEWEST, PAIRS[NEWEST])
    index = f" {CPU_WHEELS}" if variant == "fbgemm-gpu-cpu" else ""
    reinstall = f"{_PIP} install --force-reinstall --no-deps torch=={torch} {variant}=={fbgemm}{index}"
    command = [sys.executable, "-m", "dlrm_autoshard.distributed.ranks.smoke"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SMOKE_SECONDS)
    except subprocess.TimeoutExpired:
        return [Check("embedding kernel", "fail", f"no answer within {_SMOKE_SECONDS} s.", reinstall)]
    report = next((line for line in reversed(done.stdout.splitlines()) if line.startswith("{")), None)
    if report is None:
        lines = done.stderr.strip().splitlines()
        how = f"died by {signal.Signals(-done.returncode).name}" if done.returncode < 0 else "failed"
        return [Check("embedding kernel", "fail", f"{how}: {lines[-1] if lines else 'no message'}", reinstall)]
    facts = json.loads(report)
    checks = [
        Check("embedding kernel", "ok", facts["kernel"])
        if facts["kernel_error"] is None
        else Check("embedding kernel", "fail", facts["kernel_error"], reinstall)
    ]
    if variant == "fbgemm-gpu" and not facts["torch_cuda"]:
        finding = "fbgemm-gpu is installed, but torch is a CPU build."
        fix = f"{_PIP} install --force-reinstall --index-url https://pypi.org/simple torch=={torch}"
        checks.append(Check("device", "fail", finding, fix))
    elif variant == "fbgemm-gpu" and not facts["gpus"]:
        fix = f"{_PIP} uninstall -y fbgemm-gpu && {_install('fbgemm-gpu-cpu', torch, fbgemm=None)}"
        checks.append(Check("device", "warn", "fbgemm-gpu is installed, but torch sees no GPU: training on CPU.", fix))
    else:
        checks.append(Check("device", "ok", ", ".join(facts["gpus"]) or "cpu"))
    if facts["exchange_error"] is None:
        nccl = ", nccl" if facts["nccl"] else ""
        checks.append(Check("backend", "ok", f"gloo{nccl}; two ranks exchanged tensors"))
    else:
        fix = "GLOO_SOCKET_IFNAME=lo (one machine) or the name of the interface that the nodes share (`ip addr`)"
        checks.append(Check("backend", "fail", facts["exchange_error"], fix))
    return checks


def check_cores(ranks: int, cores: int) -> Check:
    """Checks that each rank can have a core."""
    finding = f"{cores} for {ranks} rank{'s' * (ranks > 1)}"
    if cores >= ranks:
        return Check("cores", "ok", finding)
    return Check("cores", "warn", f"{finding}: ranks share cores and wait for each other.", f"--ranks {cores}")


def check_memory(ranks: int, available_bytes: float) -> Check:
    """Checks that each rank has a GiB of free memory."""
    gib = available_bytes / 2**30
    finding = (
        f"{gib:.1f} GiB free, {gib / ranks:.1f} GiB for each of {ranks} ranks" if ranks > 1 else f"{gib:.1f} GiB free"
    )
    if gib / ranks >= 1.0:
        return Check("memory", "ok", finding)
    return Check(
        "memory", "warn", f"{finding}; a rank without tables takes about 0.6 GiB.", "fewer ranks, or less data"
    )


def check_disk(folder: Path) -> Check:
    """Checks that a GiB is free for checkpoints."""
    gib = shutil.disk_usage(folder).free / 2**30
    if gib >= 1.0:
        return Check("disk", "ok", f"{gib:.1f} GiB free in {folder}")
    return Check("disk", "warn", f"{gib:.2f} GiB free in {folder}: checkpoints may not fit.", "run.dir=/a/larger/disk")


def _install(variant: str, torch: str | None, fbgemm: str | None) -> str:
    """Returns the install command that changes least: keeps torch if a tested fbgemm fits it, else keeps fbgemm."""
    found, wanted = _series(torch), _torch_of(fbgemm)
    series = next((one for one in (found, wanted) if one and one in PAIRS), NEWEST)
    tested_torch, tested_fbgemm = PAIRS[series]
    parts = []
    if found != series:
        parts.append(f"torch=={tested_torch}")
    if wanted != series:
        parts.append(f"{variant}=={tested_fbgemm}")
    index = f" {CPU_WHEELS}" if variant == "fbgemm-gpu-cpu" and parts[0].startswith("torch") else ""
    return f"{_PIP} install {' '.join(parts)}{index}"


def _series(version: str | None) -> Series | None:
    match = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(match[1]), int(match[2])) if match else None


def _torch_of(fbgemm: str | None) -> Series | None:
    """Returns the torch series that an fbgemm 1.X is built against: (2, 13) for 1.8."""
    series = _series(fbgemm)
    return (2, series[1] + 5) if series and series[0] == 1 else None


def _cores() -> int:
    return len(os.sched_getaffinity(0))
