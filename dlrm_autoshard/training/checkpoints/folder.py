"""A run's folder of checkpoints: finds the newest and the best, skips damaged ones, sets later ones aside.

folder = CheckpointFolder(run_dir / "checkpoints", keep=2)
folder.newest(), folder.best()
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.step_names import step_in, step_name
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError, DamagedCheckpoint, read_manifest

BEST = "best"
"""Name of a link to the best checkpoint, beside the checkpoints."""


class CheckpointFolder:
    """The folder as one process sees it; no method is a collective. Only rank 0 calls those that change it."""

    def __init__(self, folder: Path, keep: int = 2) -> None:
        """keep: number of newest checkpoints to keep, in addition to the best."""
        self.folder, self._keep = folder, keep

    def newest(self, before: int | None = None) -> Path | None:
        """Returns the newest checkpoint of a step below `before`."""
        found = [path for path in self._whole() if before is None or step_of(path) < before]
        return found[-1] if found else None

    def best(self) -> Path | None:
        """Returns the checkpoint that `point_best_at` named."""
        path = _named_by(self.folder / BEST)
        return path if path in self._whole() else None

    def point_best_at(self, step: int) -> None:
        """Keeps the checkpoint of `step`, if there is one, as the best until another is. `best` beside it is a link,
        which is replaced atomically. CheckpointError if it cannot be written."""
        path, best = self.folder / step_name(step), self.folder / BEST
        if path not in self._whole() or path == self.best():
            return
        try:
            draft = self.folder / f"{BEST}.tmp"
            draft.unlink(missing_ok=True)
            draft.symlink_to(path.name)
            if not best.is_symlink():
                remove(best)  # a copied run may have a folder instead of the link
            draft.replace(best)
        except OSError as error:
            raise CheckpointError(f"'{best}' cannot be written: {error.strerror}.") from error
        self.remove_old()

    def asked_for(self, checkpoint: Path | None) -> Path:
        """Returns the named checkpoint, by default the newest; UserError if there is none."""
        if checkpoint == Path(BEST):
            checkpoint = self.folder / BEST
        found = behind_best(checkpoint) if checkpoint is not None else self.newest()
        if found is None:
            raise UserError(f"'{self.folder.parent}' has no checkpoint.")
        return found

    def choose(self, asked: Path | None, *, fall_back: bool) -> tuple[Path | None, list[str]]:
        """Returns the checkpoint to start from, and sentences about the choice.

        asked: this one only. fall_back: skip damaged ones to the newest that is complete, judged by its manifest and
        file sizes; otherwise DamagedCheckpoint suggests that one.
        """
        path = asked or self.newest()
        said: list[str] = []
        while path is not None:
            try:
                read_manifest(path)
                break
            except DamagedCheckpoint as error:
                path, sentence = self.instead_of(path, error, fall_back=fall_back)
                said.append(sentence)
        return path, said

    def instead_of(self, path: Path, damage: DamagedCheckpoint, *, fall_back: bool) -> tuple[Path, str]:
        """Returns the next older checkpoint and a sentence about it; without fall_back raises DamagedCheckpoint, which
        suggests it."""
        older = self.newest(before=step_of(path))
        if older is None:
            raise DamagedCheckpoint(f"{damage} There is no checkpoint before it: start a new run.")
        if not fall_back:
            raise DamagedCheckpoint(f"{damage} The one before it: --resume {older}")
        return older, f"{damage} Continuing from the one before it, '{older}'."

    def set_aside_after(self, step: int) -> list[str]:
        """Renames checkpoints of later steps, which will now be trained again, so that no start takes them. Returns
        sentences."""
        said = []
        for path in self._whole():
            if step_of(path) > step:
                names = (path.with_name(f"{path.name}.set_aside{n or ''}") for n in range(10_000))
                aside = path.rename(next(name for name in names if not name.exists()))
                said.append(f"'{path.name}' is of a later step; set aside as '{aside}'.")
        return said

    def _whole(self) -> list[Path]:
        return sorted((path for path in self.folder.glob("step_*") if step_of(path) >= 0), key=step_of)

    def remove_old(self) -> None:
        best = self.best()
        for old in self._whole()[: -self._keep]:
            if old != best:
                # Renamed first, so that a kill during deletion leaves no folder that seems complete.
                remove(old.rename(old.with_name(old.name + ".old")))

    def make_draft(self, draft: Path) -> None:
        for left in (*self.folder.glob("*.tmp"), *self.folder.glob("*.old")):  # left by a kill
            remove(left)
        draft.mkdir(parents=True)


def run_and_checkpoint(resume: str | None) -> tuple[str | None, Path | None]:
    """Resolves --resume to (run, checkpoint): RUN/checkpoints/step_00000400 (or best) names a checkpoint of RUN;
    otherwise the checkpoint is None, for the newest."""
    path = behind_best(Path(resume or "").absolute())
    if resume and path.name.startswith("step_") and path.parent.name == "checkpoints":
        run = behind_latest(path.parents[1])
        return str(run), run / "checkpoints" / path.name
    return resume, None


def behind_latest(run: Path) -> Path:
    """Resolves `latest`, because the next job's start will point it elsewhere."""
    return run.resolve() if run.is_symlink() else run


def behind_best(path: Path) -> Path:
    """Returns the checkpoint that a `best` link points to; UserError if it points elsewhere."""
    if path.name != BEST or not path.is_symlink():
        return path
    found = _named_by(path)
    if found is None:
        raise UserError(
            f"'{path}' is a link to '{os.readlink(path)}', which is no checkpoint beside it. Name a checkpoint."
        )
    return found


def _named_by(link: Path) -> Path | None:
    """Returns the checkpoint beside the link that the link names, if any."""
    name = os.readlink(link) if link.is_symlink() else ""
    return None if step_in(name) is None else link.with_name(name)


def step_of(path: Path) -> int:
    """Returns the step of a checkpoint's folder name; -1 for other names."""
    step = step_in(path.name)
    return -1 if step is None else step


def sync(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Removes a folder, or a link to one. Files that cannot be removed now (a network file system keeps open ones) are
    removed before the next checkpoint is written."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)
