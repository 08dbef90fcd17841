"""Where a run writes: `runs/<name>/`, with `runs/latest` pointing at the newest.

config.yaml  environment.json  plan/  metrics.jsonl  costs/  decisions.jsonl  checkpoints/  report.html
"""

from __future__ import annotations

import json
import os
import platform
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from dlrm_autoshard.config import Config
from dlrm_autoshard.errors import UserError


class RunDirectoryError(UserError):
    """A run directory that cannot be made or found."""


def find_run_dir(config: Config, world_size: int, resume: str | None) -> Path:
    """A new run's directory, or that of the run to continue."""
    if resume:
        if not (Path(resume) / "checkpoints").is_dir():
            raise RunDirectoryError(f"'{resume}' is no run directory: it has no checkpoints. Leave --resume out.")
        return Path(resume)
    restarted = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    found = last_run(config) if resume == "" or restarted else None
    if resume == "" and found is None:
        raise RunDirectoryError(f"there is no run '{config.run.name}' in '{config.run.dir}' to resume.")
    return found or new_run(config, world_size)


def new_run(config: Config, world_size: int) -> Path:
    """Makes a fresh directory: <dir>/<name>, or <name>-2, <name>-3 ... where a run of that name has been. One that a
    failed start left behind (a mistake in the config, say) is taken again."""
    base = Path(config.run.dir)
    for path in _candidates(base, config.run.name):
        if not (path / "checkpoints").exists() and not (path / "metrics.jsonl").exists():
            break
    try:
        path.mkdir(parents=True, exist_ok=True)
        (path / "config.yaml").write_text(config.to_yaml())
        (path / "environment.json").write_text(json.dumps(environment(world_size), indent=1) + "\n")
        link = base / "latest.new"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.replace(base / "latest")
    except OSError as error:
        raise RunDirectoryError(f"run directory '{path}' cannot be made: {error.strerror}. Set run.dir.") from error
    return path


def last_run(config: Config) -> Path | None:
    """The newest directory of that name."""
    found = None
    for path in _candidates(Path(config.run.dir), config.run.name):
        if not path.exists():
            return found
        found = path
    return found


def _candidates(base: Path, name: str) -> list[Path]:
    return [base / name] + [base / f"{name}-{number}" for number in range(2, 10_000)]


def environment(world_size: int) -> dict[str, object]:
    versions = {}
    for package in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "torchmetrics", "dlrm_autoshard"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "world_size": world_size,
        "versions": versions,
    }
