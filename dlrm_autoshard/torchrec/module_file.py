"""A TorchRec module as a JSON file, for a plan to be made where TorchRec is not: `plan --from-torchrec module.json`.

save_modules(module, Path("module.json"), ids)          # where TorchRec is; ids: a batch, or None
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
    """features: whose ids it looks up. stats: of all of them together; else mean_pooling, its ids a sample, may be
    there (1 if not), and how they repeat is guessed."""

    features: NotRequired[list[Name]]
    mean_pooling: NotRequired[Annotated[float, Field(ge=0, le=1e5)]]
    stats: NotRequired[StatsRecord]


Modules: TypeAlias = Mapping[str, list[TableOfModule]]


class ModuleRecord(TypedDict):
    """module.json."""

    schema: Literal[1]
    modules: Annotated[dict[str, Annotated[list[TableOfModule], Field(min_length=1)]], Field(min_length=1)]


def save_modules(module: nn.Module, path: str | Path, ids: Any = None) -> None:
    """Writes module.json of all EmbeddingBagCollections in `module`. ids: a batch with all features, as
    `dlrm_autoshard.torchrec.plan` takes it, which says what tables cost; statistics of this process's alone."""
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
    """FormatError names the file, the module, the table and what is wrong with it."""
    return read_json(path, ModuleRecord, "TorchRec module file")["modules"]


def shapes_in(modules: Modules) -> dict[str, list[TableConfig]]:
    """Returns each module's tables, by their names in it."""
    return {
        path: [TableConfig(row["name"], row["num_embeddings"], row["embedding_dim"]) for row in rows]
        for path, rows in modules.items()
    }
