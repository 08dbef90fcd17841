"""Turns a config's mistakes into sentences: the key, its value, and what is allowed.

sentences(Config, error)
# ["unknown key 'train.batchsize'. Did you mean 'train.batch_size'?",
#  "'train.epochs' is 'ten'; it must be a whole number."]
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import pydantic

from dlrm_autoshard.formats.sentences import sentence, show

_LONGEST_KEY = 200  # characters that a message repeats
_ALIKE, _ALIKE_ELSEWHERE = 0.76, 0.85
"""Least similarity of a key to a misspelling: in its own section, and in others, where chance matches are more
likely."""

FOREIGN = {
    "tables.rows": "the data sets the rows of a table: num_embeddings in data.tables",
    "pretrained pretrained_path init_from load_from warm_start": (
        "tables.per_table: {TABLE: {init: ...}} starts a table from a file; --resume RUN continues from a checkpoint"
    ),
    "pos_weight scale_pos_weight class_weight class_weights": (
        "class weights are not supported; in parquet files data.sample_weight weighs rows, data.labels weighs tasks"
    ),
    "row_wise rowwise table_row_wise": "the planner chooses what is split; autoshard.splits.rows is about rows",
    "column_wise table_wise sharding sharding_type sharding_types": (
        "the planner chooses what is split; autoshard.splits sets bounds, autoshard.pinned the rank of a table"
    ),
    "data_parallel replicated ddp fsdp strategy": (
        "not supported; tables are model parallel (tables.replicate copies some), the dense part is data parallel"
    ),
    "tables.optimizer.momentum": "tables have no momentum; dense_optimizer has",
    "tables.weight_decay data.tables.weight_decay": (
        "set tables.optimizer.weight_decay, for one table tables.per_table: {TABLE: {optimizer: {weight_decay: "
        "0.01}}}, for the dense part dense_optimizer.weight_decay"
    ),
    "data.tables.lr data.tables.optimizer data.tables.dtype data.tables.init data.tables.frozen": (
        "set them in tables.per_table: {TABLE: {lr: 0.01}}"
    ),
    "l1 l2 regularization": "see tables.optimizer.weight_decay and dense_optimizer.weight_decay",
    "gradient_accumulation gradient_accumulation_steps accumulate_grad_batches accumulation_steps": (
        "write train.accumulate: N, which divides train.batch_size into N parts"
    ),
    "grad_clip gradient_clipping clip_grad clip_grad_norm max_norm": (
        "see dense_optimizer.max_gradient_norm, and tables.optimizer.max_gradient for each number"
    ),
    "fp8 int8 quantization quantize": "see train.exchange_dtype, train.dense_dtype and tables.dtype",
    "amp mixed_precision precision bf16 fp16": "see train.dense_dtype, train.exchange_dtype and tables.dtype",
    "early_stop early_stop_metric early_stop_patience early_stopping_patience": (
        "write train.early_stopping: {metric: auc, patience: 3}"
    ),
    "lr learning_rate": "there are two, tables.optimizer.lr and dense_optimizer.lr",
    "optimizer": "there are two, tables.optimizer.name and dense_optimizer.name",
    "dropout batch_norm activation": "not supported; model.factory takes your own dense part",
    "model.name model.type model.arch": "see model.interaction (dot, cat, dcn) and model.factory",
    "hidden_size hidden_units layers num_layers mlp": (
        "see model.dense_arch_layer_sizes and model.over_arch_layer_sizes"
    ),
    "loss loss_fn criterion": "not supported; the loss is binary cross-entropy",
    "sampler negative_sampling": "not supported; samples are used as the data has them",
    "freeze frozen trainable requires_grad": "set it per table: tables.per_table: {TABLE: {frozen: true}}",
    "ema": "not supported",
    "init initializer init_std": "tables start by name and run.seed, or by init in tables.per_table",
    "compile torch_compile": "not supported; train.cuda_graphs is for GPUs",
    "compute_kernel uvm": "see tables.location",
    "workers num_workers": "see data.reader_threads",
    "checkpoint_dir output_dir save_dir log_dir": "everything of a run is in run.dir/run.name",
    "num_epochs max_epochs": "see train.epochs",
    "steps num_steps max_iters": "see train.max_steps",
    "warmup": "see schedule.warmup_steps",
    "gpus num_gpus num_ranks world_size nproc nproc_per_node": "the number of ranks is an option: --ranks N",
}
"""Keys of other trainers -> what to do here. `section.key` applies to that section only."""

_PER_TABLE = re.compile(r"^(tables\.per_table\.)[^.]+\.")

_FOREIGN = {word: said for words, said in FOREIGN.items() for word in words.split()}


def sentences(model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> list[str]:
    """Returns a sentence per wrong key, in the order of the file."""
    found: dict[str, str] = {}
    for detail in error.errors():
        sources = _sources(model)
        tag = next((part for part in detail["loc"][1:2] if detail["loc"][0] == "data" and part in sources), None)
        known = list(all_keys(model, source=sources.get(tag)))
        key = _key(detail["loc"], tag)
        # All members of a union (a number, or a list of numbers) complain; keep the one that the value fits best.
        if key not in found or detail["type"] not in ("list_type", "dict_type"):
            found[key] = _sentence(key, detail, known, list(sources))
    # If a list's item is wrong, drop the complaint that the list is not a number (the union's other member).
    return [said for key, said in found.items() if not any(other.startswith(f"{key}.") for other in found)]


def unknown_key(keys: Sequence[str], key: str) -> str:
    """Returns the end of a message on an unknown key: the nearest key, or the section's keys."""
    key = _without_numbers(key)
    if foreign := in_other_words(key):
        return f": {foreign}."
    return f".{_did_you_mean(nearest_key(keys, key)) or _keys_there(keys, key)}"


def in_other_words(key: str) -> str | None:
    """Returns what to do instead of a key that other trainers have; None for other keys."""
    return _FOREIGN.get(key) or _FOREIGN.get(key.rpartition(".")[2].lower().replace("-", "_"))


def nearest_key(keys: Sequence[str], key: str) -> str | None:
    """Returns the known key that an unknown one may be a misspelling of, or has the same name in another section; None
    if none is similar. Prefers the key's own section, then the least nested."""
    section, _, last = key.rpartition(".")
    keys = sorted(keys, key=lambda known: known.count("."))
    own = [known for known in keys if known.rpartition(".")[0] == section]
    elsewhere = [known for known in keys if not known.startswith("tables.per_table.")]  # those need a table's name
    for candidates, least in ((own, _ALIKE), (elsewhere, _ALIKE_ELSEWHERE)):
        names = {known.rpartition(".")[2]: known for known in reversed(candidates)}
        close = difflib.get_close_matches(last, names, n=1, cutoff=least)
        if close and (candidates is own or close[0][0] == last[0]):
            return names[close[0]]
    return None


def _sentence(key: str, detail: Mapping[str, Any], known: Sequence[str], sources: Sequence[str]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        said, own = unknown_key(known, key), _PER_TABLE.match(key)
        return f"unknown key '{key}'{said if own is None else said.replace(own[1], own[0])}"
    if kind == "invalid_key":
        return f"the key {show(value)} must be text; no key here is a number."
    if kind == "union_tag_not_found":
        return f"'{key}.source' is missing; it must be {_one_of(sources)}."
    if kind == "union_tag_invalid":
        allowed = [tag.strip(" '") for tag in context["expected_tags"].split(",")]
        return (
            f"'{key}.source' is '{context['tag']}'; it must be {_one_of(allowed)}.{_nearest(context['tag'], allowed)}"
        )
    if kind == "literal_error":
        allowed = [part.strip(" '") for part in context["expected"].replace(" or ", ", ").split(",")]
        return f"'{key}' is {show(value)}; it must be {_one_of(allowed)}.{_nearest(value, allowed)}"
    if kind in ("model_type", "model_attributes_type"):  # the latter in unions such as `data:`
        return f"'{key}' is {show(value)}; it is a section.{_section_instead(key, value, known, sources)}"
    if kind == "list_type" and isinstance(value, dict):
        return f"'{key}' is {show(value)}; it must be a list: each item begins with '- '."
    if kind == "value_error":  # a whole sentence by the config's own checks
        return detail["msg"].removeprefix("Value error, ").rstrip(".") + "."
    return sentence(key, detail)


def _section_instead(key: str, value: object, known: Sequence[str], sources: Sequence[str]) -> str:
    """Returns advice for a value that stands where a section is needed."""
    if isinstance(value, bool) and f"{key}.enabled" in known:
        return _did_you_mean(f"{key}.enabled")
    if isinstance(value, str) and re.match(r"\w+:\S", value):
        return f" A blank is missing after the colon: {value.replace(':', ': ', 1)}"
    if key == "data":
        return f" Its key 'source' must be {_one_of(sources)}."
    if isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return " Its lines are 'key: value', without '- '."
    return _keys_there(known, _without_numbers(key) + ".")


def _without_numbers(key: str) -> str:
    """data.tables.0.name -> data.tables.name, tables.per_table.item.dim -> tables.per_table.dim"""
    key = _PER_TABLE.sub(r"\1", key)
    return ".".join(part for part in key.split(".") if not part.isdecimal()) or key


def _key(location: Sequence[str | int], tag: str | int | None) -> str:
    """Joins the location without union members' types and the source's tag, which are not in the file."""
    parts = [str(part) for i, part in enumerate(location) if not (i == 1 and part == tag)]
    key = ".".join(part for part in parts if "[" not in part and part != "constrained-float")
    return key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 3]}..."


def _keys_there(known: Sequence[str], key: str) -> str:
    section = key.rpartition(".")[0]
    there = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    what = f"Section '{section}' has" if section else "The sections are"
    return f" {what} {', '.join(there)}." if there else ""


def all_keys(
    model: type[pydantic.BaseModel], prefix: str = "", source: type[pydantic.BaseModel] | None = None
) -> Iterator[str]:
    """Yields dotted names of all keys; of `data:` only those of `source`, if given."""
    for name, info in model.model_fields.items():
        yield prefix + name
        options = _models(info.annotation)
        for option in [source] if source is not None and source in options else options:
            yield from all_keys(option, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """Returns the sections that a key may hold, also inside unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _sources(model: type[pydantic.BaseModel]) -> dict[Any, type[pydantic.BaseModel]]:
    """Returns the classes of the `data:` section by their tag."""
    options = _models(model.model_fields["data"].annotation)
    return {get_args(option.model_fields["source"].annotation)[0]: option for option in options}


def _one_of(allowed: Sequence[str]) -> str:
    return f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]


def _nearest(value: object, allowed: Sequence[str]) -> str:
    value = "cuda" if value == "gpu" else value  # else 'cpu' would be nearer
    close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.6)
    return _did_you_mean(close[0] if close else None)


def _did_you_mean(name: str | None) -> str:
    return f" Did you mean '{name}'?" if name else ""
