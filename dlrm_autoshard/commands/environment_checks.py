"""Is this environment fit to train? Each check says what it found and, where it fails, the exact line that fixes it.

    check_pair(version_of={"torch": "2.13.0", "fbgemm-gpu-cpu": "1.6.0"}.get).finding

fbgemm 1.X is built against torch 2.(X+5) and crashes beside any other, so the pair is read from package metadata before
either is imported. This module imports neither: it has to work where they do not.
"""

from __future__ import annotations

import importlib.metadata
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

TORCH, FBGEMM = "2.13.0", "1.8.0"  # the pair that this package is tested with
CPU_WHEELS = "--extra-index-url https://download.pytorch.org/whl/cpu"  # elsewhere torch brings gigabytes of CUDA
_PIP = f"{sys.executable} -m pip"
_SMOKE_SECONDS = 120

VersionOf = Callable[[str], str | None]


class EnvironmentProblem(UserError):
    """Packages that cannot work together: the message names them and the line that fixes it."""


@dataclass(frozen=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    finding: str
    fix: str | None = None


def installed_version(package: str) -> str | None:
    """What pip would show; nothing is imported."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def examine(ranks: int, version_of: VersionOf = installed_version) -> list[Check]:
    """All checks, cheapest first. Those that import fbgemm run in a subprocess and only if the pair is right."""
    checks = [check_python(sys.version_info[:2]), check_pair(version_of)]
    if checks[-1].status != "fail":
        checks += check_by_running(version_of)
    return [*checks, check_cores(ranks, _cores()), check_memory(ranks, free_host_memory()), check_disk(Path.cwd())]


def require_pair(version_of: VersionOf = installed_version) -> None:
    """For programs that are about to import fbgemm: raises instead of letting a wrong pair crash."""
    check = check_pair(version_of)
    if check.status == "fail":
        raise EnvironmentProblem(f"{check.finding} Fix it with:\n    {check.fix}")


def check_python(version: tuple[int, int]) -> Check:
    found = f"Python {version[0]}.{version[1]}"
    if (3, 10) <= version <= (3, 12):
        return Check("python", "ok", found)
    return Check(
        "python", "fail", f"{found}; torch and fbgemm are pinned for 3.10 to 3.12.", "python3.12 -m venv .venv"
    )


def check_pair(version_of: VersionOf = installed_version) -> Check:
    """torch 2.(X+5) beside fbgemm 1.X, and one fbgemm, not both."""
    name = "torch/fbgemm pair"
    torch = version_of("torch")
    variants = {package: v for package in ("fbgemm-gpu-cpu", "fbgemm-gpu") if (v := version_of(package)) is not None}
    variant = next(iter(variants), "fbgemm-gpu" if shutil.which("nvidia-smi") else "fbgemm-gpu-cpu")
    if len(variants) == 2:
        wanted = "fbgemm-gpu" if shutil.which("nvidia-smi") else "fbgemm-gpu-cpu"
        finding = "fbgemm-gpu and fbgemm-gpu-cpu are both installed; they overwrite each other's files."
        fix = f"{_PIP} uninstall -y fbgemm-gpu fbgemm-gpu-cpu && {_install(wanted, torch, fbgemm=None)}"
        return Check(name, "fail", finding, fix)
    if torch is None or not variants:
        missing = "torch" if torch is None else "fbgemm"
        return Check(name, "fail", f"{missing} is not installed.", _install(variant, torch, variants.get(variant)))
    fbgemm = variants[variant]
    wanted_torch = _torch_of(fbgemm)
    if wanted_torch is None or _minor(torch) != wanted_torch:
        needs = f"needs torch {wanted_torch[0]}.{wanted_torch[1]}" if wanted_torch else "is not of a known series"
        finding = f"{variant} {fbgemm} {needs}, but torch is {torch}."
        return Check(name, "fail", finding, _install(variant, torch, fbgemm))
    found = f"torch {torch}, {variant} {fbgemm}"
    if _minor(torch) != _minor(TORCH):
        note = f"{found} belong together, but this package is tested with torch {TORCH}."
        return Check(name, "warn", note, _install(variant, None, None))
    return Check(name, "ok", found)


def check_by_running(version_of: VersionOf) -> list[Check]:
    """Imports torch and fbgemm in a subprocess, trains one small table and exchanges tensors between two ranks.

    A crash there (wrong library, missing CPU instruction) becomes a sentence here.
    """
    variant = "fbgemm-gpu" if version_of("fbgemm-gpu") else "fbgemm-gpu-cpu"
    reinstall = f"{_PIP} install --force-reinstall --no-deps torch=={TORCH} {variant}=={FBGEMM}"
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
        fix = f"{_PIP} install --force-reinstall --index-url https://pypi.org/simple torch=={TORCH}"
        checks.append(Check("device", "fail", finding, fix))
    elif variant == "fbgemm-gpu" and not facts["gpus"]:
        fix = f"{_PIP} uninstall -y fbgemm-gpu && {_install('fbgemm-gpu-cpu', None, None)}"
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
    finding = f"{cores} for {ranks} rank{'s' * (ranks > 1)}"
    if cores >= ranks:
        return Check("cores", "ok", finding)
    return Check("cores", "warn", f"{finding}: ranks share cores and wait for each other.", f"--ranks {cores}")


def check_memory(ranks: int, available_bytes: float) -> Check:
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
    gib = shutil.disk_usage(folder).free / 2**30
    if gib >= 1.0:
        return Check("disk", "ok", f"{gib:.1f} GiB free in {folder}")
    return Check("disk", "warn", f"{gib:.2f} GiB free in {folder}: checkpoints may not fit.", "run.dir=/a/larger/disk")


def _install(variant: str, torch: str | None, fbgemm: str | None) -> str:
    """The line that changes least: only the half of the pair that is off."""
    parts = []
    if torch is None or _minor(torch) != _minor(TORCH):
        parts.append(f"torch=={TORCH}")
    if fbgemm is None or _torch_of(fbgemm) != _minor(TORCH):
        parts.append(f"{variant}=={FBGEMM}")
    index = f" {CPU_WHEELS}" if variant == "fbgemm-gpu-cpu" and parts[0].startswith("torch") else ""
    return f"{_PIP} install {' '.join(parts)}{index}"


def _minor(version: str) -> tuple[int, int] | None:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def _torch_of(fbgemm: str) -> tuple[int, int] | None:
    """The torch series that an fbgemm 1.X is built against: 1.8 -> (2, 13)."""
    minor = _minor(fbgemm)
    return (2, minor[1] + 5) if minor and minor[0] == 1 else None


def _cores() -> int:
    return len(os.sched_getaffinity(0))
