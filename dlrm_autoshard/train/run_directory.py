"""Where a run writes: `runs/<name>/`, with `runs/latest` pointing at the newest.

    with claimed_run_dir(config, resume=None) as path:        # no other job can have it meanwhile
        ...build and load everything that the run needs...
        record_start(path, config, world_size=2)              # only now is it this start's

config.yaml  environment.json  plan/  metrics.jsonl  costs/  decisions.jsonl  checkpoints/  report.html

config.yaml and environment.json are those of the latest start. A run that is continued keeps the earlier ones in
`starts/<when>/`, so that what a step was trained with can always be found out.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from dlrm_autoshard.config import Config
from dlrm_autoshard.errors import UserError

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
_LOCK = ".lock"


class RunDirectoryError(UserError):
    """A run directory that cannot be made or found."""


@contextmanager
def claimed_run_dir(config: Config, resume: str | None) -> Iterator[Path]:
    """A new run's directory, or that of the run to continue; this job's alone until it ends, however it ends."""
    path = run_to_continue(config, resume)
    try:
        if path is not None:
            lock = lock_directory(path)
            if lock is None:
                raise RunDirectoryError(
                    f"another job ({(path / _LOCK).read_text().strip()}) is still writing to '{path}'. End it first, "
                    "or leave --resume out to start a new run."
                )
        else:
            path, lock = free_directory(config)
    except OSError as error:
        where = error.filename or path or config.run.dir
        raise RunDirectoryError(f"run directory '{where}' cannot be made: {error.strerror}. Set run.dir.") from error
    try:
        yield path
    finally:
        os.close(lock)


def run_to_continue(config: Config, resume: str | None) -> Path | None:
    """The directory that was asked for (""; the newest of the config's name), or that torchrun's restart implies."""
    if resume:
        if not (Path(resume) / "checkpoints").is_dir():
            raise RunDirectoryError(f"'{resume}' is no run directory: it has no checkpoints. Leave --resume out.")
        return Path(resume)
    earlier = earlier_runs(config)
    if resume == "":
        saved = [path for path in earlier if any((path / "checkpoints").glob("step_*"))]
        if not saved:
            raise RunDirectoryError(
                f"there is no run '{config.run.name}' with a checkpoint in '{config.run.dir}' to resume."
            )
        return saved[-1]
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0:
        own = [path for path in earlier if started_by(path) == this_job()]
        return own[-1] if own else None
    return None


def free_directory(config: Config) -> tuple[Path, int]:
    """<dir>/<name>, or <name>-2, <name>-3 ... where a run of that name has been or is; with its lock. One that a failed
    start left behind (a mistake in the config, say) is taken again."""
    for path in _candidates(config):
        if (path / "checkpoints").exists() or (path / "metrics.jsonl").exists():
            continue
        path.mkdir(parents=True, exist_ok=True)
        lock = lock_directory(path)
        if lock is not None:
            return path, lock
    raise RunDirectoryError(f"'{config.run.dir}' is full of runs named '{config.run.name}'. Set run.name.")


def lock_directory(path: Path) -> int | None:
    """The lock's file descriptor: the system lets go of it with the process. None where another job has it."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
            raise
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}\n".encode())
    return lock


def record_start(run: Path, config: Config, world_size: int) -> None:
    """Writes down what this start runs with. A start that fails before (another model's checkpoint, say) leaves the
    run as it was."""
    keep_earlier_start(run)
    (run / CONFIG).write_text(config.to_yaml())
    (run / ENVIRONMENT).write_text(json.dumps(environment(world_size), indent=1) + "\n")
    point_latest_at(run.resolve())


def keep_earlier_start(run: Path) -> None:
    """Moves the config and environment of the run's last start to starts/<when>/."""
    if (run / CONFIG).exists() and (run / ENVIRONMENT).exists():
        when = datetime.fromtimestamp((run / CONFIG).stat().st_mtime, timezone.utc)
        kept = run / "starts" / when.strftime("%Y-%m-%dT%H-%M-%SZ")
        kept.mkdir(parents=True, exist_ok=True)
        for name in (CONFIG, ENVIRONMENT):
            (run / name).replace(kept / name)


def point_latest_at(run: Path) -> None:
    """`latest` beside the run; a link is replaced whole or not at all."""
    link = run.with_name("latest.new")
    link.unlink(missing_ok=True)
    link.symlink_to(run.name)
    link.replace(link.with_name("latest"))


def changes_since_last_start(run: Path) -> list[str]:
    """'train.epochs 2 -> 4' for every key that this start's config has otherwise than the one before."""
    earlier = sorted((run / "starts").glob(f"*/{CONFIG}"))
    if not earlier:
        return []
    before, now = (dict(_flat(yaml.safe_load(path.read_text()))) for path in (earlier[-1], run / CONFIG))
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def earlier_runs(config: Config) -> list[Path]:
    """The directories of that name, oldest first."""
    found = []
    for path in _candidates(config):
        if not path.exists():
            break
        found.append(path)
    return found


def _candidates(config: Config) -> list[Path]:
    base, name = Path(config.run.dir), config.run.name
    return [base / name] + [base / f"{name}-{number}" for number in range(2, 10_000)]


def this_job() -> str | None:
    """The same for all of torchrun's restarts of a job."""
    return os.environ.get("TORCHELASTIC_RUN_ID")


def started_by(run: Path) -> str | None:
    try:
        return str(json.loads((run / ENVIRONMENT).read_text())["job"])
    except (OSError, ValueError, KeyError):
        return None


def environment(world_size: int) -> dict[str, object]:
    versions = {}
    for package in ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "torchmetrics", "dlrm_autoshard"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": this_job(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "world_size": world_size,
        "versions": versions,
    }
