"""Checkpoints that outlive a kill at any moment, and load under any placement and number of ranks.

    checkpoints = Checkpoints(run_dir / "checkpoints", runtime, keep=2)
    checkpoints.save(tensors, {"step": 640, ...})           # checkpoints/step_00000640
    state = checkpoints.load(checkpoints.latest(), tensors)

Tensors go through torch.distributed.checkpoint under names that depend on the model alone
(`tables.user.weight`, `dense.over_mlp.0.bias`), so that whoever owns a table later finds it. A checkpoint is written
beside its final name and renamed when every rank is done: a folder with the final name is whole.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from dlrm_autoshard.distributed.runtime import Runtime
from dlrm_autoshard.report.jsonl import SCHEMA

_STATE, _EXTRA = "state.json", "extra.pt"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: the message says which, and what differs."""


class Checkpoints:
    """The checkpoints of one run, in one folder that all ranks see. Every method is a collective."""

    def __init__(self, folder: Path, runtime: Runtime, *, keep: int = 2, asynchronous: bool = False) -> None:
        self.folder, self._runtime, self._keep, self._asynchronous = folder, runtime, keep, asynchronous
        self._writing: tuple[Future[Any], Path] | None = None

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any], extra: Any = None) -> Path:
        """state: small JSON, `step` among it. extra: anything torch.save takes, from rank 0. Returns the final path."""
        self.finish()
        final = self.folder / f"step_{state['step']:08d}"
        draft = final.with_name(final.name + ".tmp")
        if self._runtime.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            draft.mkdir(parents=True)
            (draft / _STATE).write_text(json.dumps({"schema": SCHEMA, **state}, indent=1))
            torch.save(extra, draft / _EXTRA)
        self._runtime.barrier()
        writer = dcp.FileSystemWriter(str(draft), sync_files=True)
        group = self._runtime.control
        if self._asynchronous:
            future = dcp.async_save(dict(tensors), storage_writer=writer, process_group=group)
            self._writing = (future, final)  # type: ignore[assignment]
        else:
            dcp.save(dict(tensors), storage_writer=writer, process_group=group)
            self._publish(final)
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is being written and publishes it."""
        if self._writing is not None:
            future, final = self._writing
            future.result()
            self._writing = None
            self._publish(final)

    def latest(self) -> Path | None:
        """The newest whole checkpoint, the same on every rank."""
        found = None
        if self._runtime.rank == 0:
            whole = self._whole()
            found = whole[-1] if whole else None
        return self._runtime.broadcast(found)

    def load(
        self, path: Path, tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[dict[str, Any], Any]:
        """Fills `tensors` (this rank's) in place; returns (state, extra). shapes: of every tensor of the model.

        CheckpointError, with nothing loaded, where the checkpoint is of another model.
        """
        try:
            state = json.loads((path / _STATE).read_text())
            saved = dcp.FileSystemReader(str(path)).read_metadata().state_dict_metadata
        except (OSError, ValueError) as error:
            raise CheckpointError(f"checkpoint '{path}' cannot be read: {error}") from error
        check_shapes(path, {name: tuple(value.size) for name, value in saved.items()}, shapes)  # type: ignore[union-attr]
        dcp.load(dict(tensors), storage_reader=dcp.FileSystemReader(str(path)), process_group=self._runtime.control)
        return state, torch.load(path / _EXTRA, weights_only=False, map_location="cpu")

    def _publish(self, final: Path) -> None:
        self._runtime.barrier()
        if self._runtime.rank == 0:
            shutil.rmtree(final, ignore_errors=True)
            final.with_name(final.name + ".tmp").rename(final)
            for old in self._whole()[: -self._keep]:
                # Out of sight first, so that a kill in mid-deletion leaves no folder that looks whole.
                shutil.rmtree(old.rename(old.with_name(old.name + ".old")))
        self._runtime.barrier()

    def _whole(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if path.suffix == "")


def check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    missing, foreign = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    other = [
        f"{name} is {list(saved[name])}, the model has {list(wanted[name])}"
        for name in sorted(set(wanted) & set(saved))
        if saved[name] != tuple(wanted[name])
    ]
    differences = [f"{name} is not in it" for name in missing] + [f"{name} is not in the model" for name in foreign]
    if differences or other:
        every = other + differences
        more = f" and {len(every) - 5} more" if len(every) > 5 else ""
        raise CheckpointError(
            f"checkpoint '{path}' is of another model: {'; '.join(every[:5])}{more}. Nothing was loaded. "
            "Use the config it was made with (config.yaml in its run directory), or start a new run."
        )
