"""manifest.json of a checkpoint: what it holds, and the digest of every byte, as plain JSON.

{"schema": 4, "digest": ..., "state": {"step": 640, ...}, "files": {"rank_00000.bin": 8192, "extra.json": 90},
 "tensors": {"tables.user.weight": {"dtype": "float32", "shape": [943, 32], "chunks": [...]}}, ...}
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import pydantic
import xxhash
from pydantic import Field, NonNegativeInt
from torch import Tensor

from dlrm_autoshard.data.columns import Columns
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.numbers import Count
from dlrm_autoshard.formats.sentences import show
from dlrm_autoshard.formats.step_names import step_name
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import Shard

_BLOCK = 1 << 18
"""Bytes per block: small enough to be still in the cache when digested."""


ALGORITHM = "xxh3_64"
"""Digest of each chunk."""


def digest_of(data: memoryview, each: Callable[[int, memoryview], None]) -> str:
    """Returns the digest of `data`. each(start, block): called before each block is digested, to read or to write
    it."""
    digest = xxhash.xxh3_64()
    for start in range(0, len(data), _BLOCK):
        block = data[start : start + _BLOCK]
        each(start, block)
        digest.update(block)
    return digest.hexdigest()


MANIFEST, EXTRA = "manifest.json", "extra.json"
SCHEMA = 4
"""Schema of a checkpoint. 2 and 3 lacked the data's columns; 1 was torch.distributed.checkpoint's format with
pickles."""


class CheckpointError(UserError):
    """A checkpoint cannot be written or used; the message says which, and why."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint differs from what was written; the message names the file. An older one may be intact."""


class _Strict(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True, frozen=True)


class Chunk(_Strict):
    """Bytes [offset, offset + bytes) of a file. A tensor's chunks in order are its bytes, row-major.

    columns, rows: [start, stop) of the tensor, if not all; chunks of the same range are its bytes. Row-wise state has a
    value per row for each column shard.
    """

    file: str = pydantic.Field(pattern=r"^rank_\d{5}\.bin$")
    offset: Count
    bytes: Count
    digest: str
    columns: list[NonNegativeInt] | None = pydantic.Field(default=None, min_length=2, max_length=2)
    rows: list[NonNegativeInt] | None = pydantic.Field(default=None, min_length=2, max_length=2)

    @pydantic.model_serializer(mode="wrap")
    def _columns_where_split(self, handler: Callable[[Chunk], dict[str, Any]]) -> dict[str, Any]:
        return {key: value for key, value in handler(self).items() if value is not None}


class SavedTensor(_Strict):
    """Shape, dtype and chunks of a tensor."""

    dtype: str
    shape: list[NonNegativeInt]
    chunks: list[Chunk]


class SavedState(_Strict):
    """Progress of training. plan: of the ranks that wrote it. replicated: tables outside the plan, copied to every
    rank. dedup: tables that send each id once. columns: of the data, in the model's order."""

    step: Count
    epoch: Count = 0
    sample: Count = 0
    plan: dict[str, Any] | None = None
    replicated: list[str] = []
    dedup: list[str] = []
    columns: Columns | None = None
    table_updates: Count = 0
    optimizer_steps: Annotated[int, Field(ge=0, le=2**53)] = 0

    @pydantic.field_validator("plan")
    @classmethod
    def _is_a_plan(cls, plan: dict[str, Any] | None) -> dict[str, Any] | None:
        return None if plan is None else ShardingPlan.from_json(plan).to_json()


class Manifest(_Strict):
    """A checkpoint's contents. files: name -> bytes. extra: digest of extra.json."""

    schema_: int = pydantic.Field(alias="schema")
    state: SavedState
    algorithm: str
    files: dict[str, NonNegativeInt]
    extra: str
    tensors: dict[str, SavedTensor]

    def to_bytes(self) -> bytes:
        record = self.model_dump(by_alias=True)
        return json.dumps({"digest": _digest(record), **record}).encode()

    @staticmethod
    def of(state: SavedState, files: dict[str, int], extra: str, saved: Mapping[str, SavedTensor]) -> Manifest:
        """Combines tensors saved under their ranks' names, which may be of shards: `tables.item[0:64].weight`."""
        tensors: dict[str, SavedTensor] = {}
        for key, part in saved.items():
            name, shard = name_and_shard(key)
            if shard.is_whole:
                tensors[name] = part
                continue
            others = tensors.get(name)
            ranges = (shard.rows, shard.columns)[: len(part.shape)]
            ends = [held[1] if held else size for held, size in zip(ranges, part.shape, strict=True)]
            shape = [max(pair) for pair in zip(ends, others.shape if others else ends, strict=True)]
            at = {key: list(held) for key in ("columns", "rows") if (held := getattr(shard, key)) is not None}
            chunks = [chunk.model_copy(update=at) for chunk in part.chunks]
            tensors[name] = SavedTensor(
                dtype=part.dtype, shape=shape, chunks=(others.chunks if others else []) + chunks
            )
        return Manifest(schema=SCHEMA, state=state, algorithm=ALGORITHM, files=files, extra=extra, tensors=tensors)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}


def name_and_shard(key: str) -> tuple[str, Shard]:
    """Splits a rank's `tables.item[0:64].weight` into `tables.item.weight` and its shard."""
    owner, dot, tensor = key.rpartition(".")
    shard = Shard(owner)
    return f"{shard.table}{dot}{tensor}", shard


def read_manifest(path: Path) -> Manifest:
    """Reads the manifest of the checkpoint `path`. DamagedCheckpoint names the key or file that has changed."""
    file = path / MANIFEST
    if not os.path.exists(file) and os.path.exists(path / "state.json"):  # os.path takes names that are too long
        raise _of_an_earlier_format(path, "it executed code")
    try:
        record = json.loads(file.read_bytes())
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint file '{file}' cannot be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"checkpoint file '{file}' is damaged: it is not JSON ({error}).") from error
    if not isinstance(record, dict):
        raise DamagedCheckpoint(f"checkpoint file '{file}' is damaged: it is not a JSON object.")
    digest = record.pop("digest", None)
    if record.get("schema") in (2, 3):
        raise _of_an_earlier_format(path, "it does not record the order of the data's columns")
    if record.get("schema") != SCHEMA:
        raise DamagedCheckpoint(
            f"checkpoint file '{file}': schema is {show(record.get('schema'))}; this version reads {SCHEMA}."
        )
    if digest != _digest(record):
        raise DamagedCheckpoint(f"checkpoint file '{file}' is damaged: its digest does not match its contents.")
    try:
        manifest = Manifest.model_validate(record)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DamagedCheckpoint(f"checkpoint file '{file}': {key[:200]} is wrong ({first['msg'][:200]}).") from error
    if manifest.algorithm != ALGORITHM:
        raise CheckpointError(
            f"checkpoint '{path}' has digests of {show(manifest.algorithm)}; this version reads {ALGORITHM}."
        )
    if path.name != step_name(manifest.state.step):
        raise DamagedCheckpoint(
            f"checkpoint file '{file}': state.step is {manifest.state.step}, but its folder is named otherwise."
        )
    for name, size in manifest.files.items():
        found = os.path.getsize(path / name) if os.path.isfile(path / name) else None
        if found != size:
            what = "is missing" if found is None else f"has {found} bytes"
            raise DamagedCheckpoint(f"checkpoint file '{path / name[:200]}' {what}; {size} were written.")
    return manifest


def _of_an_earlier_format(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{path}' has an earlier format, which this version does not read ({why}). Continue it with the "
        "version that wrote it, or start a new run."
    )


def read_extra(path: Path, manifest: Manifest) -> Any:
    """Reads extra.json of a checkpoint and checks its digest."""
    file = path / EXTRA
    try:
        data = file.read_bytes()
    except OSError as error:
        raise DamagedCheckpoint(f"checkpoint file '{file}' cannot be read: {error.strerror}.") from error
    if bytes_digest(data) != manifest.extra:
        raise DamagedCheckpoint(f"checkpoint file '{file}' is damaged: its digest does not match its contents.")
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f"checkpoint file '{file}' holds JSON that no job writes ({error}).") from error


def check_shapes(path: Path, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> None:
    """Raises CheckpointError if the checkpoint's tensors differ from the model's in name or shape."""
    missing, foreign = sorted(set(wanted) - set(saved)), sorted(set(saved) - set(wanted))
    other = [
        f"{name} is {list(saved[name])}, the model has {list(wanted[name])}"
        for name in sorted(set(wanted) & set(saved))
        if saved[name] != tuple(wanted[name])
    ]
    differences = [f"{name} is not in it" for name in missing] + [f"{name} is not in the model" for name in foreign]
    check_same(path, other + differences)


def check_dtypes(path: Path, saved: Mapping[str, SavedTensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises CheckpointError if tensors, or shards of them, have other dtypes than the model's."""
    types = {name_and_shard(key)[0]: str(tensor.dtype).removeprefix("torch.") for key, tensor in wanted.items()}
    differ = [(name, dtype) for name, dtype in types.items() if saved[name].dtype != dtype]
    check_same(path, [f"{name} is {saved[name].dtype}, the model's is {dtype}" for name, dtype in differ])


def check_columns(path: Path, saved: Columns | None, wanted: Columns | None) -> None:
    """Raises CheckpointError if the checkpoint's model takes its columns in another order than `wanted`."""
    if wanted is not None and saved != wanted:
        raise CheckpointError(
            f"checkpoint '{path}' takes the data's columns in another order than this job's first checkpoint: "
            f"{saved}; here {wanted}. Resume from it by name: --resume {path}"
        )


def check_same(path: Path, differences: Sequence[str]) -> None:
    """Raises CheckpointError if there are differences between checkpoint and model."""
    if differences:
        more = f" and {len(differences) - 5} more" if len(differences) > 5 else ""
        said = "; ".join(difference[:300] for difference in differences[:5])
        raise CheckpointError(
            f"checkpoint '{path}' is of another model: {said}{more}. Nothing was loaded. "
            "Use the config it was made with (config.yaml in its run directory), or start a new run."
        )


def bytes_digest(data: bytes) -> str:
    """Returns the digest of bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _digest(record: Mapping[str, Any]) -> str:
    """Returns the digest of the content, independent of spacing and order."""
    return bytes_digest(json.dumps(record, sort_keys=True).encode())
