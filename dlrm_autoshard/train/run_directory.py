"""Where a run writes: `runs/<name>/`, with `runs/latest` pointing at the newest.

with claimed_run_dir(config, resume=None, job=frozenset()) as path:      # no other job can have it meanwhile
    record_start(path, config, world_size=2)             # once all is built and loaded: only now it is this start's
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from dlrm_autoshard.config import Config
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.formats.yaml_file import read_yaml

# In a run directory: config.yaml  environment.json  job.json  plan/  metrics.jsonl  costs/  decisions.jsonl
# checkpoints/  report.html. `job.json` names the job whose run it is: a start of the same job, by whoever and wherever,
# continues the run.

CONFIG, ENVIRONMENT = "config.yaml", "environment.json"
_LOCK, _JOB = ".lock", "job.json"
_ENDING_SECONDS = 40.0  # that ranks of the job's last start may take to end, torchrun's patience with them included


class RunDirectoryError(UserError):
    """A run directory that cannot be made or found."""


@contextmanager
def claimed_run_dir(config: Config, resume: str | None, job: Set[str] = frozenset()) -> Iterator[Path]:
    """A new run's directory, or that of the run to continue; this job's alone until it ends, however it ends.

    job: what this job is known by, of all ranks (see `job_of_this_process`). Empty: it continues what it is told to.
    """
    path = run_to_continue(config, resume, job)
    try:
        if path is not None:
            refuse_links(path)
            lock = lock_directory(path, patience=_ENDING_SECONDS if job & job_of(path) else 0.0)
            if lock is None:
                raise RunDirectoryError(
                    f"another job ({(path / _LOCK).read_text().strip()}) is still writing to '{path}'. End it first, "
                    "or leave --resume out to start a new run."
                )
        else:
            path, lock = free_directory(config)
        write_whole(path / _JOB, json.dumps({"job": sorted(job)}) + "\n")
    except OSError as error:
        where = error.filename or path or config.run.dir
        raise RunDirectoryError(f"run directory '{where}' cannot be made: {error.strerror}. Set run.dir.") from error
    try:
        yield path
    finally:
        os.close(lock)


def run_to_continue(config: Config, resume: str | None, job: Set[str]) -> Path | None:
    """The directory that was asked for (""; the newest of the config's name), else the one that this job had before."""
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
    own = [path for path in earlier if job & job_of(path)]
    return own[-1] if own else None


def free_directory(config: Config) -> tuple[Path, int]:
    """<dir>/<name>, or <name>-2, <name>-3 ... after the last run of that name; with its lock. The last one is taken
    again where a failed start left it behind (by a mistake in the config, say)."""
    earlier = earlier_runs(config)
    number = _number(earlier[-1], config.run.name) if earlier else 1
    while True:
        path = Path(config.run.dir) / (config.run.name if number == 1 else f"{config.run.name}-{number}")
        if not _used(path):
            path.mkdir(parents=True, exist_ok=True)
            refuse_links(path)
            lock = lock_directory(path)
            if lock is not None and not _used(path):
                return path, lock
            if lock is not None:
                os.close(lock)
        number += 1


def _used(run: Path) -> bool:
    return (run / "checkpoints").exists() or (run / "metrics.jsonl").exists()


def refuse_links(run: Path) -> None:
    """What a run writes must land in the run: through a link somebody else's file would be overwritten. Only
    `checkpoints` may lie elsewhere."""
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and path != run / "checkpoints":
                raise RunDirectoryError(
                    f"'{path}' is a symbolic link to '{os.readlink(path)}', which this run would write to. Remove it."
                )
        if Path(folder) == run and "checkpoints" in folders:
            folders.remove("checkpoints")


def lock_directory(path: Path, patience: float = 0.0) -> int | None:
    """The lock's file descriptor: the system lets go of it with the process. None where another job has it, also
    after `patience` seconds."""
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    deadline = time.monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                return None
            time.sleep(0.1)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):  # a file system without locks
                raise
            break
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {platform.node()}\n".encode())
    return lock


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


def write_whole(path: Path, text: str) -> None:
    """All of it or, in a crash, what was there before. A link in its place is replaced, not followed."""
    draft = path.with_name(f".{path.name}.new")
    with open(draft, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def point_latest_at(run: Path) -> None:
    """`latest` beside the run; a link is replaced whole or not at all, by any number of jobs at once."""
    draft = run.with_name(f".latest-{secrets.token_hex(8)}")
    draft.symlink_to(run.name)
    draft.replace(run.with_name("latest"))


def changes_since_last_start(run: Path) -> list[str]:
    """'train.epochs 2 -> 4' for every key that this start's config has otherwise than the one before."""
    earlier = sorted((run / "starts").glob(f"*/{CONFIG}"))
    if not earlier:
        return []
    try:
        before, now = (dict(_flat(read_yaml(path, "config file"))) for path in (earlier[-1], run / CONFIG))
    except FormatError:  # damaged since: nothing that this start needs
        return []
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def _flat(section: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(section, Mapping):
        raise FormatError("it has no sections")
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def earlier_runs(config: Config) -> list[Path]:
    """The directories of that name, oldest first: numbers are never given twice."""
    base, name = Path(config.run.dir), config.run.name
    found = [path for path in base.glob("*") if _number(path, name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: _number(path, name))


def _number(path: Path, name: str) -> int:
    """1 for <name>, n for <name>-n, 0 for all else."""
    if path.name == name:
        return 1
    number = path.name.removeprefix(f"{name}-")
    is_numbered = path.name != number and number.isdecimal() and number.isascii() and number[0] != "0"
    return int(number) if is_numbered and number != "1" else 0


def job_of_this_process() -> str | None:
    """What the job of this rank is known by: the id that torchrun was given (the same on all machines and in all
    restarts); where it was given none, the torchrun process above this one, which outlives its ranks. A job without an
    id is known by any torchrun process of it that is left."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    if given is None:
        return None
    if given not in ("", "none"):
        return f"id {given}"
    above = os.getppid()
    try:  # processes are numbered anew after a while, and after each boot
        started = Path(f"/proc/{above}/stat").read_text().rsplit(")", 1)[1].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = boot = "?"
    return f"torchrun process {above} started {started} on {platform.node()} {boot}"


def job_of(run: Path) -> frozenset[str]:
    """What the job was known by that wrote to this run last."""
    try:
        return frozenset(map(str, json.loads((run / _JOB).read_text())["job"]))
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


def environment(world_size: int) -> dict[str, object]:
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
    """Of the checkout that this code runs from; '-dirty' where it has uncommitted changes. None for a wheel."""
    repository = Path(__file__).parents[2]
    if not (repository / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
