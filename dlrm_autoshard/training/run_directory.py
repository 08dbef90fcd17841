"""Finds or makes a run's directory `runs/<name>/`, with `runs/latest` pointing at the newest run.

with claimed_run_dir(config, resume=None, job=frozenset()) as path:      # no other job can use it meanwhile
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import re
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from dlrm_autoshard.config import Config, ConfigError, load_config
from dlrm_autoshard.config_data import ParquetData
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import FormatError
from dlrm_autoshard.formats.versions import commit, installed_version
from dlrm_autoshard.formats.whole_file import write_whole
from dlrm_autoshard.formats.yaml_file import flat, read_yaml
from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder, behind_latest

# A run directory has: config.yaml  environment.json  job.json  plan/  metrics.jsonl  costs/  decisions.jsonl
# checkpoints/  report.html. `job.json` names the job that writes the run and the --resume that it has followed; another
# start of the same job, on any machine, continues the run.

_LOCK, _JOB = ".lock", "job.json"
_ENDING_SECONDS = 40.0  # for ranks of the job's last start to end, including torchrun's grace period


class RunDirectoryError(UserError):
    """A run directory cannot be made or found."""


@contextmanager
def claimed_run_dir(
    config: Config, resume: str | None, job: Set[str] = frozenset(), obeyed: str | None = None
) -> Iterator[Path]:
    """Yields a new run's directory, or that of the run to continue, locked until this job ends.

    job: the names of this job on all ranks (see `job_of_this_process`). obeyed: the --resume that an earlier start of
    this job has followed.
    """
    path = run_to_continue(config, resume, job)
    own = path is None or bool(job & job_of(path))
    try:
        if path is not None:
            refuse_links(path)
            lock = lock_directory(path, patience=_ENDING_SECONDS if own else 0.0)
            if lock is None:
                raise RunDirectoryError(
                    f"another job ({(path / _LOCK).read_text().strip()}) is still writing to '{path}'. End it first, "
                    "or leave out --resume to start a new run."
                )
        else:
            path, lock = free_directory(config)
        if own:  # another job's run stays its own until this job has started in it
            write_job(path, job, obeyed)
    except OSError as error:
        where = error.filename or path or config.run.dir
        raise RunDirectoryError(f"run directory '{where}' cannot be made: {error.strerror}. Set run.dir.") from error
    try:
        yield path
    finally:
        os.close(lock)


def check_run_dir(config: Config) -> None:
    """Raises UserError if the folder for runs neither exists nor can be made."""
    path = Path(config.run.dir).absolute()
    while not os.path.lexists(path):
        path = path.parent
    reason = None if path.is_dir() else os.strerror(errno.ENOTDIR)
    if reason is None and not os.access(path, os.W_OK | os.X_OK):
        reason = f"'{path}': {os.strerror(errno.EACCES)}"
    if reason is not None:
        raise RunDirectoryError(f"run directory '{config.run.dir}' cannot be made: {reason}. Set run.dir.")


def run_to_continue(config: Config, resume: str | None, job: Set[str]) -> Path | None:
    """Returns the directory named by --resume (""; the newest of the config's name), else this job's earlier one."""
    if resume:
        if not (Path(resume) / "checkpoints").is_dir():
            raise RunDirectoryError(f"'{resume}' is no run directory: it has no checkpoints. Leave out --resume.")
        if CheckpointFolder(Path(resume) / "checkpoints").newest() is None:
            raise RunDirectoryError(f"'{resume}' has no checkpoint to resume from. Leave out --resume.")
        return behind_latest(Path(resume))
    earlier = earlier_runs(config)
    if resume == "":
        for path in reversed(earlier):
            if CheckpointFolder(path / "checkpoints").newest() is not None and not _of_another_name(path, config):
                return path
        raise RunDirectoryError(
            f"there is no run '{config.run.name}' with a checkpoint in '{config.run.dir}' to resume."
        )
    own = [path for path in earlier if job & job_of(path)]
    return own[-1] if own else None


def free_directory(config: Config) -> tuple[Path, int]:
    """Returns a new directory <dir>/<name>, or <name>-2, <name>-3 ... after the last of that name, and its lock. Reuses
    the last one if a failed start left it without records."""
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
    """Refuses links in a run, through which another file would be overwritten. Only `checkpoints` may be one; W&B makes
    links in its own folder."""
    for folder, folders, files in os.walk(run):
        for name in (*folders, *files):
            path = Path(folder, name)
            if path.is_symlink() and path != run / "checkpoints":
                raise RunDirectoryError(
                    f"'{path}' is a symbolic link to '{os.readlink(path)}', which this run would write to. Remove it."
                )
        if Path(folder) == run:
            folders[:] = set(folders) - {"checkpoints", "wandb"}


def lock_directory(path: Path, patience: float = 0.0) -> int | None:
    """Returns a file descriptor that holds the lock until the process ends; None if another job still has it after
    `patience` seconds."""
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


def earlier_runs(config: Config) -> list[Path]:
    """Returns the directories of that name, oldest first; numbers are never reused."""
    base, name = Path(config.run.dir), config.run.name
    found = [path for path in base.glob("*") if _number(path, name) and path.is_dir() and not path.is_symlink()]
    return sorted(found, key=lambda path: _number(path, name))


def _of_another_name(run: Path, config: Config) -> bool:
    """Returns whether <name>-2 is the first run of that very name instead of the second of <name>."""
    if run.name == config.run.name:
        return False
    try:
        return dict(flat(read_yaml(run / "config.yaml", "config file"))).get("run.name") == run.name
    except FormatError:
        return False


def _number(path: Path, name: str) -> int:
    """Returns 1 for <name>, n for <name>-n, 0 for all others."""
    found = re.fullmatch(re.escape(name) + r"(-(?!1$)[1-9]\d*)?", path.name, re.ASCII)
    return 0 if found is None else int((found[1] or "-1")[1:])


def job_of_this_process(number: int = 1) -> str | None:
    """Returns the name of this rank's job: torchrun's run id, which is the same on all machines and restarts; without
    one, the parent torchrun process, which outlives its ranks.

    A job without an id is known by any of its torchrun processes that is left. number: counts jobs of this process."""
    given = os.environ.get("TORCHELASTIC_RUN_ID")
    if given is None:
        return None
    which = "" if number == 1 else f", job {number}"
    if given not in ("", "none"):
        return f"id {given}{which}"
    above = os.getppid()
    try:  # process numbers are reused after a while, and after each boot
        started = Path(f"/proc/{above}/stat").read_text().rsplit(")", 1)[1].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        started = boot = "?"
    return f"torchrun process {above} started {started} on {platform.node()} {boot}{which}"


def job_of(run: Path) -> frozenset[str]:
    """Returns the names of the job that last wrote to this run."""
    return _read_job(run)[0]


def run_that_obeyed(config: Config, run: str | None, resume: str, job: Set[str]) -> Path | None:
    """Returns the run in which an earlier start of this job followed its --resume.

    --resume is on the command line of every start, but its checkpoint may be gone by now, or another run be the newest.
    run: the one that `resume` names, if any."""
    folders = {Path(config.run.dir).absolute(), Path(run or config.run.dir).absolute().parent}
    for path in (found.parent for folder in folders for found in folder.glob(f"*/{_JOB}")):
        known, obeyed = _read_job(path)
        if job & known and obeyed == resume:
            return path.resolve()
    return None


def write_job(run: Path, job: Set[str], obeyed: str | None) -> None:
    """Records the job's names, and the --resume that it has followed."""
    write_whole(run / _JOB, json.dumps({"job": sorted(job), "resume": obeyed}) + "\n")


def _read_job(run: Path) -> tuple[frozenset[str], str | None]:
    try:
        record = json.loads((run / _JOB).read_text())
        return frozenset(map(str, record["job"])), record.get("resume")
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return frozenset(), None


CONFIG, ENVIRONMENT = "config.yaml", "environment.json"


def check_run(run: Path) -> None:
    """Raises UserError if `run` is not a run's directory."""
    if run.is_file():
        such_as = run.parent if (run.parent / ENVIRONMENT).is_file() else "runs/latest"
        raise RunDirectoryError(f"'{run}' is a file. Name a run's directory, such as {such_as}.")
    if not (run / CONFIG).exists():
        raise RunDirectoryError(f"'{run}' is no run directory: it has no {CONFIG}.")


def as_started(run: Path, config: Config) -> Config:
    """Completes `hash` of parquet columns as in the run's last start, so that rows stay those that were trained even if
    files have other types since."""
    if not (isinstance(config.data, ParquetData) and (run / CONFIG).exists()):
        return config
    try:
        before = load_config(run / CONFIG).data
    except ConfigError:  # damaged since; this start does not need it
        return config
    known = {table.column: table.hash for table in before.tables} if isinstance(before, ParquetData) else {}
    tables = [
        table.model_copy(update={"hash": known.get(table.column)}) if table.hash is None else table
        for table in config.data.tables
    ]
    return config.model_copy(update={"data": config.data.model_copy(update={"tables": tables})})


def record_start(run: Path, config: Config, world_size: int) -> None:
    """Writes config.yaml and environment.json of this start, and moves an earlier start's to `starts/<when>/`.

    Called after everything that can fail, so a failed start changes nothing; a kill in here leaves the earlier files or
    the new ones. The history shows what any step was trained with.
    """
    keep_earlier_start(run)
    write_whole(run / CONFIG, config.to_yaml())
    write_whole(run / ENVIRONMENT, json.dumps(environment(world_size), indent=1) + "\n")
    point_latest_at(run.resolve())


def keep_earlier_start(run: Path) -> None:
    """Copies the last start's config and environment to starts/<when>/."""
    if not ((run / CONFIG).exists() and (run / ENVIRONMENT).exists()):
        return
    when = datetime.fromtimestamp((run / CONFIG).stat().st_mtime, timezone.utc)
    kept = run / "starts" / when.strftime("%Y-%m-%dT%H-%M-%SZ")
    kept.mkdir(parents=True, exist_ok=True)
    for name in (CONFIG, ENVIRONMENT):
        shutil.copy2(run / name, kept / name)


def point_latest_at(run: Path) -> None:
    """Points the link `latest` at the run; replaced atomically, also by several jobs at once."""
    latest = run.with_name("latest")
    if latest.is_dir() and not latest.is_symlink():
        raise RunDirectoryError(
            f"'{latest}' is a folder (a copied run, perhaps) where the link to the newest run should be. Rename it."
        )
    draft = run.with_name(f".latest-{secrets.token_hex(8)}")
    draft.symlink_to(run.name)
    draft.replace(latest)


def changes_since_last_start(run: Path) -> list[str]:
    """Returns 'train.epochs 2 -> 4' for every key that differs from the last start's config."""
    earlier = sorted((run / "starts").glob(f"*/{CONFIG}"))
    if not earlier:
        return []
    try:
        before, now = (dict(flat(read_yaml(path, "config file"))) for path in (earlier[-1], run / CONFIG))
    except FormatError:  # damaged since; this start does not need it
        return []
    keys = [key for key in {**before, **now} if before.get(key) != now.get(key)]
    return [f"{key} {before.get(key)} -> {now.get(key)}" for key in keys]


def environment(world_size: int) -> dict[str, object]:
    """Returns versions, machine and command of this start."""
    packages = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "torchmetrics", "dlrm_autoshard")
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "job": job_of_this_process(),
        "host": platform.node(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "world_size": world_size,
        "versions": {name: version for name in packages if (version := installed_version(name)) is not None},
        "commit": commit(),
        "command": sys.orig_argv,
    }
