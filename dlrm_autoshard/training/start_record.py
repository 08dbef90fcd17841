"""Records each start of a run: config.yaml and environment.json, the earlier ones' kept, `latest` beside the run.

record_start(path, config, world_size=2)             # once all is built and loaded: only now it is this start's
"""

from __future__ import annotations

import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path

from dlrm_autoshard.config import Config, ConfigError, load_config
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.formats.yaml_file import flat, read_yaml
from dlrm_autoshard.training.run_directory import RunDirectoryError, job_of_this_process

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"


def check_run(run: Path) -> None:
    """UserError where `run` is not the directory of a run."""
    if run.is_file():
        such_as = run.parent if (run.parent / ENVIRONMENT).is_file() else "runs/latest"
        raise RunDirectoryError(f"'{run}' is a file. Name a run's directory, such as {such_as}.")
    if not (run / CONFIG).exists():
        raise RunDirectoryError(f"'{run}' is no run directory: it has no {CONFIG}.")


def as_started(run: Path, config: Config) -> Config:
    """The config with what it leaves open of parquet columns (`hash`) as the run's last start found it: files that are
    of other types since are held against that, and rows stay those that were trained."""
    if not (isinstance(config.data, ParquetData) and (run / CONFIG).exists()):
        return config
    try:
        before = load_config(run / CONFIG).data
    except ConfigError:  # damaged since: nothing that this start needs
        return config
    known = {table.column: table.hash for table in before.tables} if isinstance(before, ParquetData) else {}
    tables = [
        table.model_copy(update={"hash": known.get(table.column)}) if table.hash is None else table
        for table in config.data.tables
    ]
    return config.model_copy(update={"data": config.data.model_copy(update={"tables": tables})})


def record_start(run: Path, config: Config, world_size: int) -> None:
    """Writes down what this start runs with. A start that fails before (another model's checkpoint, say) leaves the
    run as it was; one that is killed in here leaves the earlier start's files or its own.

    config.yaml and environment.json are those of the latest start. A run that is continued keeps the earlier ones in
    `starts/<when>/`, so that what a step was trained with can always be found out.
    """
    keep_earlier_start(run)
    write_whole(run / CONFIG, config.to_yaml())
    write_whole(run / ENVIRONMENT, json.dumps(environment(world_size), indent=1) + "\n")
    point_latest_at(run.resolve())


def keep_earlier_start(run: Path) -> None:
    """Copies the config and environment of the run's last start to starts/<when>/."""
    if not ((run / CONFIG).exists() and (run / ENVIRONMENT).exists()):
        return
    when = datetime.fromtimestamp((run / CONFIG).stat().st_mtime, timezone.utc)
    kept = run / "starts" / when.strftime("%Y-%m-%dT%H-%M-%SZ")
    kept.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, ENVIRONMENT):
        shutil.copy2(run / name, kept / name)


def point_latest_at(run: Path) -> None:
    """`latest` beside the run; a link is replaced whole or not at all, by any number of jobs at once."""
    latest = run.with_name("latest")
    if latest.is_dir() and not latest.is_symlink():
        raise RunDirectoryError(
            f"'{latest}' is a folder (a copy of runs, perhaps); a link to the newest run is to be there. Rename it."
        )
    draft = run.with_name(f".latest-{secrets.token_hex(8)}")
    draft.symlink_to(run.name)
    draft.replace(latest)


def changes_since_last_start(run: Path) -> list[str]:
    """'train.epochs 2 -> 4' for every key that this start's config has otherwise than the one before."""
    earlier = sorted((run / "starts").glob(f"*/{CONFIG}"))
    if not earlier:
        return []
    try:
        before, now = (dict(flat(read_yaml(path, "config file"))) for path in (earlier[-1], run / CONFIG))
    except FormatError:  # damaged since: nothing that this start needs
        return []
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def environment(world_size: int) -> dict[str, object]:
    """Versions, machine and command of this start."""
    versions = {}
    for package in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "torchmetrics", "dlrm_autoshard"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": job_of_this_process(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "world_size": world_size,
        "versions": versions,
        "commit": commit(),
        "command": sys.orig_argv,
    }


def commit() -> str | None:
    """Commit of the checkout that this code runs from; '-dirty' where it has uncommitted changes. None for a wheel."""
    repository = Path(__file__).parents[2]
    if not (repository / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
