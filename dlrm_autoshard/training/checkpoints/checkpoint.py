"""Checkpoints that outlive a kill at any moment, and load under any placement and number of ranks.

    checkpoints.save(tensors, SavedState(step=640))         # checkpoints/step_00000640
    state, extra = checkpoints.load(path, tensors, shapes)

Files: manifest.json, extra.json, rank_00000.bin, rank_00001.bin, ...: JSON and raw bytes, so nothing executes.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

from torch import Tensor

from dlrm_autoshard.data.columns import Columns
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.formats.step_names import step_name
from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder, remove, sync
from dlrm_autoshard.training.checkpoints.manifest import (
    EXTRA,
    MANIFEST,
    CheckpointError,
    Manifest,
    SavedState,
    SavedTensor,
    bytes_digest,
    check_columns,
    check_dtypes,
    check_shapes,
    read_extra,
    read_manifest,
)
from dlrm_autoshard.training.checkpoints.tensor_file import read_tensors, write_tensors

T = TypeVar("T")


class Checkpoints(CheckpointFolder):
    """The checkpoints of one run, in one folder that all ranks see. Its own methods are collectives.

    Tensors have names that depend on the model alone (`tables.user.weight`, `dense.over_mlp.0.bias`), so that whoever
    owns a table later finds it. A rank that owns columns of one writes and reads `tables.user[0:64].weight`; of the
    whole table the checkpoint is all the same. It is written beside its final name, fsynced, and renamed when rank 0
    sees every file of every rank: a folder with the final name is whole.
    """

    def __init__(
        self,
        folder: Path,
        runtime: Runtime,
        *,
        keep: int = 2,
        asynchronous: bool = False,
        timeout_seconds: float = 300.0,
    ) -> None:
        """asynchronous: `save` returns once there is a copy of the tensors in host memory, and a thread writes it."""
        super().__init__(folder, keep)
        self._asynchronous = asynchronous
        # A group of its own: what is written while training goes on must not mix its messages with training's.
        group = new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._ranks = replace(runtime, control=group)
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, tensors: Mapping[str, Tensor], state: SavedState, extra: Any = None) -> Path:
        """Returns the final path. tensors: each by one rank, or by several alike.
        extra: JSON of any size, rank 0's. CheckpointError, with no draft left, where it cannot be written."""
        self.finish()
        final, text = self.folder / step_name(state.step), json.dumps(extra).encode()
        if not self._asynchronous:
            self._write(tensors, state, text, final)
            return final
        copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}

        def write() -> None:
            try:
                self._write(copies, state, text, final)
            except Exception as error:  # whatever it is, `finish` raises it
                self._failure = error

        self._thread = Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is being written; raises what kept it from being written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _write(self, tensors: Mapping[str, Tensor], state: SavedState, extra: bytes, final: Path) -> None:
        ranks, draft = self._ranks, final.with_name(final.name + ".tmp")
        self._on_rank_0(lambda: self.make_draft(draft), final)
        saved: dict[str, SavedTensor] = {}
        problem = None
        try:
            saved = write_tensors(draft / f"rank_{ranks.rank:05d}.bin", tensors)
        except OSError as error:
            problem = f"{error.strerror} (rank {ranks.rank} on '{platform.node()}')"
        written = ranks.gather((saved, problem)) or []

        def publish() -> None:
            problems = [what for _, what in written if what is not None]
            if problems:
                raise OSError(0, "; ".join(problems))
            (draft / EXTRA).write_bytes(extra)
            sync(draft / EXTRA)
            manifest = _manifest(draft, state, extra, [tensors for tensors, _ in written])
            (draft / MANIFEST).write_bytes(manifest.to_bytes())
            for path in (draft / MANIFEST, draft):
                sync(path)
            draft.rename(final)
            sync(self.folder)
            self.remove_old()

        self._on_rank_0(publish, final, draft)

    def _on_rank_0(self, action: Callable[[], None], final: Path, draft: Path | None = None) -> None:
        """CheckpointError on all ranks, and no draft left, where `action` fails there."""
        failure = None
        if self._ranks.rank == 0:
            try:
                action()
            except OSError as error:
                if draft is not None:
                    remove(draft)
                failure = (
                    f"checkpoint '{final}' cannot be written: {error.strerror or error}. The newest whole one: "
                    f"{self.newest() or 'none'}. Free some space, or let training go on without by "
                    "checkpoint.on_error: warn."
                )
        failure = self._ranks.broadcast(failure)
        if failure is not None:
            raise CheckpointError(failure)

    def latest(self, before: int | None = None) -> Path | None:
        """The newest checkpoint (of a step below `before`), the same on every rank."""
        return self._ranks.broadcast(self.newest(before) if self._ranks.rank == 0 else None)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        columns: Columns | None = None,
    ) -> tuple[SavedState, Any]:
        """Fills `tensors` (this rank's) in place; returns (state, extra). shapes: of every (whole) tensor of the model.
        columns: of its data, in its order.

        CheckpointError, with nothing loaded, where it is of another model; DamagedCheckpoint, on all ranks and perhaps
        with some tensors loaded, where its bytes are not those that were written.
        """

        def check() -> tuple[Manifest, Any]:
            manifest = read_manifest(path)
            check_shapes(path, manifest.shapes(), shapes)
            check_columns(path, manifest.state.columns, columns)
            check_dtypes(path, manifest.tensors, tensors)
            return manifest, read_extra(path, manifest)

        manifest, extra = self._ranks.on_all_ranks(check)
        self._ranks.on_all_ranks(lambda: read_tensors(path, manifest, tensors))
        return manifest.state, extra


def _manifest(draft: Path, state: SavedState, extra: bytes, saved: list[dict[str, SavedTensor]]) -> Manifest:
    """OSError where this rank does not see, whole, what the others have written."""
    tensors: dict[str, SavedTensor] = {}
    sizes = {EXTRA: len(extra)}
    for rank, own in enumerate(saved):
        name = f"rank_{rank:05d}.bin"
        sizes[name] = sum(chunk.bytes for tensor in own.values() for chunk in tensor.chunks)
        found = (draft / name).stat().st_size if (draft / name).exists() else None
        if found != sizes[name]:
            what = "no such file" if found is None else f"{found} bytes"
            raise OSError(0, f"rank {rank} has written {sizes[name]} bytes to '{name}', rank 0 sees {what}")
        tensors = own | tensors  # the lowest rank's, where several have one
    return Manifest.of(state, sizes, bytes_digest(extra), tensors)
