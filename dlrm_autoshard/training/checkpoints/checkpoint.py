"""Checkpoints that survive a kill at any moment, and load under any plan and number of ranks.

    checkpoints.save(tensors, SavedState(step=640))         # checkpoints/step_00000640
    state, extra = checkpoints.load(path, tensors, shapes)

Files: manifest.json, extra.json, rank_00000.bin, rank_00001.bin, ...: JSON and raw bytes, so loading runs no code.
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
    """The checkpoints of a run, in a folder that all ranks see. Methods of this class are collectives.

    Names of tensors depend on the model alone (`tables.user.weight`, `dense.over_mlp.0.bias`), so any later owner of a
    table finds it. The owner of a column shard writes and reads `tables.user[0:64].weight` of the same whole tensor. A
    checkpoint is written under a draft name, fsynced, and renamed once rank 0 sees every file of every rank: a folder
    with the final name is complete.
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
        """asynchronous: `save` copies the tensors to host memory and returns; a thread writes them."""
        super().__init__(folder, keep)
        self._asynchronous = asynchronous
        # A group of its own, so that writing in the background does not mix its messages with training's.
        group = new_group(backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        self._ranks = replace(runtime, control=group)
        self._thread: Thread | None = None
        self._failure: Exception | None = None

    # -- writing -----------------------------------------------------------------------------------------------------

    def save(self, tensors: Mapping[str, Tensor], state: SavedState, extra: Any = None) -> Path:
        """Writes a checkpoint and returns its final path; on failure raises CheckpointError and leaves no draft.

        tensors: each from one rank, or equal on several. extra: rank 0's JSON of any size."""
        self.finish()
        final, text = self.folder / step_name(state.step), json.dumps(extra).encode()
        if not self._asynchronous:
            self._write(tensors, state, text, final)
            return final
        copies = {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}

        def write() -> None:
            try:
                self._write(copies, state, text, final)
            except Exception as error:  # `finish` raises it
                self._failure = error

        self._thread = Thread(target=write, name="checkpoint", daemon=True)
        self._thread.start()
        return final

    def finish(self) -> None:
        """Waits for a checkpoint that is being written; raises its error."""
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
        """Runs `action` on rank 0; if it fails, removes the draft and raises CheckpointError on all ranks."""
        failure = None
        if self._ranks.rank == 0:
            try:
                action()
            except OSError as error:
                if draft is not None:
                    remove(draft)
                failure = (
                    f"checkpoint '{final}' cannot be written: {error.strerror or error}. The newest complete one: "
                    f"{self.newest() or 'none'}. Free some space, or set checkpoint.on_error: warn to train on without "
                    "checkpoints."
                )
        failure = self._ranks.broadcast(failure)
        if failure is not None:
            raise CheckpointError(failure)

    def latest(self, before: int | None = None) -> Path | None:
        """Returns the newest checkpoint (of a step below `before`), the same on every rank."""
        return self._ranks.broadcast(self.newest(before) if self._ranks.rank == 0 else None)

    # -- loading -----------------------------------------------------------------------------------------------------

    def load(
        self,
        path: Path,
        tensors: Mapping[str, Tensor],
        shapes: Mapping[str, tuple[int, ...]],
        columns: Columns | None = None,
    ) -> tuple[SavedState, Any]:
        """Fills this rank's `tensors` in place; returns (state, extra).

        shapes: of all whole tensors of the model. columns: of its data, in order. CheckpointError, with nothing loaded,
        if the checkpoint is of another model; DamagedCheckpoint, on all ranks and perhaps with some tensors loaded, if
        its bytes have changed.
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
    """Makes the manifest; OSError if this rank does not see the other ranks' files complete."""
    tensors: dict[str, SavedTensor] = {}
    sizes = {EXTRA: len(extra)}
    for rank, own in enumerate(saved):
        name = f"rank_{rank:05d}.bin"
        sizes[name] = sum(chunk.bytes for tensor in own.values() for chunk in tensor.chunks)
        found = (draft / name).stat().st_size if (draft / name).exists() else None
        if found != sizes[name]:
            what = "no such file" if found is None else f"{found} bytes"
            raise OSError(0, f"rank {rank} has written {sizes[name]} bytes to '{name}', rank 0 sees {what}")
        tensors = own | tensors  # the lowest rank's, if several have one
    return Manifest.of(state, sizes, bytes_digest(extra), tensors)
