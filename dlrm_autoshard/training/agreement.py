"""Checks before the first step that all ranks share one run directory, run the same code, and have the same config.

agree(config, runtime)                  # UserError on every rank; names the key and the rank that differ
check_shared(run_dir, runtime)          # names the host that does not see rank 0's files
"""

from __future__ import annotations

import hashlib
import platform
import secrets
import time
from pathlib import Path

import torch

import dlrm_autoshard
from dlrm_autoshard.config import Config
from dlrm_autoshard.distributed.dense import DataParallelDense
from dlrm_autoshard.distributed.ranks.agreement import DisagreementError, difference
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.formats.yaml_file import flat

_NOTE = ".seen_by_all_ranks"
_PATIENCE_SECONDS = 10.0
"""Seconds to wait until a network file system shows one host what another wrote."""


def agree(config: Config, runtime: Runtime) -> None:
    """Raises DisagreementError if configs, dlrm_autoshard's code or torch differ between ranks."""
    mine = {**dict(flat(config.model_dump(mode="json"))), "dlrm_autoshard": code_digest(), "torch": torch.__version__}
    everybody = runtime.all_gather((platform.node(), mine))
    found = difference([facts for _, facts in everybody])
    if found is not None:
        cure = (
            "Install the same version everywhere"
            if found.fact in ("dlrm_autoshard", "torch")
            else "Give all one config"
        )
        rank = found.ranks[0]
        raise DisagreementError(
            f"rank {rank} on '{everybody[rank][0]}' has {found.fact} {found.value!r}, rank 0 has {found.first!r}. "
            f"{cure}."
        )


def agree_on_dense(dense: DataParallelDense, runtime: Runtime) -> None:
    """Copies rank 0's dense weights to all ranks; DisagreementError if names, shapes or order differ."""
    mine = {name: f"{value.dtype} {list(value.shape)}" for name, value in dense.named_tensors()}
    everybody = runtime.all_gather(mine)
    if (found := difference(everybody)) is not None:
        raise DisagreementError(
            f"the model of rank {found.ranks[0]} has {found.fact} as {found.value}, rank 0's as {found.first}. "
            "model.factory must build the same model on every rank."
        )
    for rank, other in enumerate(everybody):
        for name, instead in zip(everybody[0], other, strict=True):
            if name != instead:  # gradients are summed by position
                raise DisagreementError(
                    f"the model of rank {rank} has {instead} where rank 0's has {name}. model.factory must add its "
                    "layers in the same order on every rank, for example not by iterating over a set."
                )
    dense.broadcast()


def check_shared(run_dir: Path, runtime: Runtime) -> None:
    """Raises DisagreementError if a rank does not see what rank 0 writes to `run_dir`."""
    note = run_dir / _NOTE
    nonce = secrets.token_hex(8)
    if runtime.rank == 0:
        note.write_text(nonce)
    nonce = runtime.broadcast(nonce)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not (seen := _read(note) == nonce) and time.monotonic() < deadline:
        time.sleep(0.05)
    for rank, (host, sees) in enumerate(runtime.all_gather((platform.node(), seen))):
        if not sees:
            raise DisagreementError(
                f"rank {rank} on host '{host}' does not see what rank 0 writes to the run directory '{run_dir}': its "
                "tables could not be saved. Set run.dir to a folder that all hosts share, by its full path."
            )
    if runtime.rank == 0:
        note.unlink()


def code_digest() -> str:
    """Returns a digest of every source file of the package."""
    digest, package = hashlib.blake2b(digest_size=6), Path(dlrm_autoshard.__file__).parent
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(package)).encode() + file.read_bytes())
    return digest.hexdigest()


def _read(note: Path) -> str | None:
    try:
        return note.read_text()
    except OSError:
        return None
