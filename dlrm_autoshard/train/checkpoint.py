"""Checkpoints that outlive a kill at any moment, and load under any placement and number of ranks.

    checkpoints = Checkpoints(run_dir / "checkpoints", runtime, keep=2)
    checkpoints.save(tensors, {"step": 640, ...})           # checkpoints/step_00000640
    state = checkpoints.load(checkpoints.latest(), tensors)

Tensors go through torch.distributed.checkpoint under names that depend on the model alone
(`tables.user.weight`, `dense.over_mlp.0.bias`), so that whoever owns a table later finds it. A checkpoint is written
beside its final name and renamed when every rank is done: a folder with the final name is whole.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.records.jsonl import SCHEMA

_STATE, _EXTRA = "state.json", "extra.pt"


class CheckpointError(UserError):
    """A checkpoint that cannot be used: the message says which, and what differs."""


class Checkpoints:
    """The checkpoints of one run, in one folder that all ranks see. Every method is a collective."""

    def __init__(self, folder: Path, runtime: Runtime, *, keep: int = 2, asynchronous: bool = False) -> None:
        self.folder, self._runtime, self._keep, self._asynchronous = folder, runtime, keep, asynchronous
        self._writing: tuple[Future[Any], Path] | None = None
        # Of its own: a checkpoint that is written while training goes on must not mix its messages with training's.
        self._group = dist.new_group(backend="gloo")

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], extra: Any = None) -> Path:
        """state: small JSON, `step` among it. extra: anything torch.save takes, from rank 0. Returns the final path."""
        self.finish()
        final = self.folder / f"step_{state['step']:08d}"
        draft = final.with_name(final.name + ".tmp")
        if self._runtime.rank == 0:
            for left in (*self.folder.glob("*.tmp"), *self.folder.glob("*.old")):  # by a kill
                shutil.rmtree(left)
            draft.mkdir(parents=True)
            (draft / _STATE).write_text(json.dumps({"schema": SCHEMA, **state}, indent=1))
            torch.save(extra, draft / _EXTRA)
        self._runtime.barrier()
        writer = dcp.FileSystemWriter(str(draft), sync_files=True)
        if self._asynchronous:
            future = dcp.async_save(dict(tensors), storage_writer=writer, process_group=self._group)
            self._writing = (future, final)  # type: ignore[assignment]
        else:
            with _said_for_people(f"checkpoint '{final}' cannot be written"):
                dcp.save(dict(tensors), storage_writer=writer, process_group=self._group)
            self._publish(final)
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is being written and publishes it."""
        if self._writing is not None:
            future, final = self._writing
            self._writing = None
            with _said_for_people(f"checkpoint '{final}' cannot be written"):
                future.result()
            self._publish(final)

    def latest(self, before: int | None = None) -> Path | None:
        """The newest whole checkpoint (of a step below `before`), the same on every rank."""
        found = None
        if self._runtime.rank == 0:
            found = self.newest(before)
        return self._runtime.broadcast(found)

    def newest(self, before: int | None = None) -> Path | None:
        """What `latest` finds, as this rank sees it: no collective."""
        whole = [path for path in self._whole() if before is None or step_of(path) < before]
        return whole[-1] if whole else None

    def load(
        self, path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Any], Any]:
        """Fills `tensors` (this rank's) in place; returns (state, extra). shapes: of every tensor of the model.

        CheckpointError, with nothing loaded, where the checkpoint is of another model.
        """
        state = read_state(path)
        try:
            saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
        check_shapes(path, {name: tuple(value.size) for name, value in saved.items()}, shapes)  # type: ignore[union-attr]
        with _said_for_people(f"checkpoint '{path}' cannot be read"):
            dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(str(path)), process_group=self._group)
            extra = torch.load(path / _EXTRA, weights_only=False, map_location="cpu")
        return state, extra

    def _publish(self, final: Path) -> None:
        self._runtime.barrier()
        if self._runtime.rank == 0:
            if final.exists():
                final.rename(final.with_name(final.name + ".old"))
            final.with_name(final.name + ".tmp").rename(final)
            shutil.rmtree(final.with_name(final.name + ".old"), ignore_errors=True)
            for old in self._whole()[: -self._keep]:
                # Out of sight first, so that a kill in mid-deletion leaves no folder that looks whole.
                shutil.rmtree(old.rename(old.with_name(old.name + ".old")))
        self._runtime.barrier()

    def _whole(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if path.suffix == "")


@contextlib.contextmanager
def _said_for_people(what: str) -> Iterator[None]:
    """torch.distributed.checkpoint's errors hold every rank's traceback; people need the last line of each."""
    try:
        yield
    except dcp.api.CheckpointException as error:
        reasons = {f"{type(e).__name__}: {e}" for e, _ in error.failures.values()}
        ranks = ", ".join(str(rank) for rank in sorted(error.failures))
        raise CheckpointError(f"{what} on rank(s) {ranks}: {'; '.join(sorted(reasons))}") from error
    except (OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{what}: {error}") from error


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing, foreign = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    other = [
        f"{name} is {list(saved[name])}, the model has {list(wanted[name])}"
        for name in sorted(set(wanted) & set(saved))
        if saved[name] != tuple(wanted[name])
    ]
    differences = [f"{name} is not in it" for name in missing] + [f"{name} is not in the model" for name in foreign]
    check_same(path, other + differences)


def check_same(path: Path, differences: Sequence[str]) -> None:
    """CheckpointError where there are any between a checkpoint and the model."""
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        raise CheckpointError(
            f"checkpoint '{path}' is of another model: {'; '.join(differences[:5])}{more}. Nothing was loaded. "
            "Use the config it was made with (config.yaml in its run directory), or start a new run."
        )


def read_state(path: Path) -> dict[str, Any]:
    """The small facts of a checkpoint: step, epoch, plan and so on."""
    try:
        state: dict[str, Any] = json.loads((path / _STATE).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
    return state
