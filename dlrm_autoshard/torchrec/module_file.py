"""Saves a TorchRec module as JSON, to plan without TorchRec: `plan --from-torchrec module.json`.

save_modules(module, Path("module.json"), ids)          # with TorchRec; ids: a batch, or None
modules = load_modules(Path("module.json"))             # {path: [table, ...]}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field
from torch import nn
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.formats.numbers import Name
from dlrm_autoshard.tables import StatsRecord, TableConfig, TableRecord


class TableOfModule(TableRecord):
    """A table in module.json. features: those that look it up. stats: of all of them together; without stats,
    mean_pooling is its ids per sample (default 1), and reuse is guessed."""

    features: NotRequired[list[Name]]
    mean_pooling: NotRequired[Annotated[float, Field(ge=0, le=1e5)]]
    stats: NotRequired[StatsRecord]


Modules: TypeAlias = Mapping[str, list[TableOfModule]]


class ModuleRecord(TypedDict):
    """module.json."""

    schema: Literal[1]
    modules: Annotated[dict[str, Annotated[list[TableOfModule], Field(min_length=1)]], Field(min_length=1)]


def save_modules(module: nn.Module, path: str | Path, ids: Any = None) -> None:
    """Writes module.json for all EmbeddingBagCollections in `module`. ids: a batch with all features, as for
    `dlrm_autoshard.torchrec.plan`, for statistics of this process's batch."""
    from dlrm_autoshard.torchrec.statistics import ids_by_table, statistics
    from dlrm_autoshard.torchrec.tables import configs_of, embedding_bags, table_configs, table_key

    collections = embedding_bags(module)
    tables = {table.name: table for table in table_configs(collections)}
    stats, _ = ({}, 0) if ids is None else statistics([ids_by_table(collections, ids)])
    modules: dict[str, list[dict[str, Any]]] = {}
    for at, collection in collections.items():
        modules[at] = []
        for config in configs_of(collection):
            key = table_key(at, config.name, collections)
            row = {**tables[key].to_json(), "name": config.name, "features": list(config.feature_names)}
            modules[at].append(row | ({"stats": stats[key].to_json()} if key in stats else {}))
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"schema": 1, "modules": modules}, indent=1) + "\n")


def load_modules(path: Path) -> Modules:
    """Reads module.json. FormatError names the file, module, table and problem."""
    return read_json(path, ModuleRecord, "TorchRec module file")["modules"]


def shapes_in(modules: Modules) -> dict[str, list[TableConfig]]:
    """Returns each module's tables, under their names in it."""
    return {
        path: [TableConfig(row["name"], row["num_embeddings"], row["embedding_dim"]) for row in rows]
        for path, rows in modules.items()
    }
