"""What is wrong with a config, in sentences: the key as people write it, the value that they gave, what is allowed.

sentences(Config, error)
# ["unknown key 'train.batchsize'. Did you mean 'train.batch_size'?",
#  "'train.epochs' is 'ten'; it must be a whole number."]
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import pydantic

from dlrm_autoshard.formats.sentences import sentence, show

_LONGEST_KEY = 200  # characters that a message repeats


def sentences(model: type[pydantic.BaseModel], error: pydantic.ValidationError) -> list[str]:
    """One for each key that is wrong, in the order of the file."""
    found: dict[str, str] = {}
    for detail in error.errors():
        sources = _sources(model)
        tag = next((part for part in detail["loc"][1:2] if detail["loc"][0] == "data" and part in sources), None)
        known = list(_all_keys(model, source=sources.get(tag)))
        key = _key(detail["loc"], tag)
        # Of a union's members (a number, or a list of them) all complain; one that the value nearly fits says more.
        if key not in found or detail["type"] not in ("list_type", "dict_type"):
            found[key] = _sentence(key, detail, known, list(sources))
    # Where a list's element is wrong, that the list is no number (the union's other member) says nothing.
    return [said for key, said in found.items() if not any(other.startswith(f"{key}.") for other in found)]


def nearest_key(keys: Sequence[str], key: str) -> str | None:
    """The known key most like an unknown one: in its own section first, then anywhere, least nested first."""
    section, _, last = key.rpartition(".")
    keys = sorted(keys, key=lambda known: known.count("."))
    own = [known for known in keys if known.rpartition(".")[0] == section]
    for candidates in (own, keys):
        names = {known.rpartition(".")[2]: known for known in reversed(candidates)}
        close = difflib.get_close_matches(last, names, n=1, cutoff=0.6)
        if close:
            return names[close[0]]
    return None


def _sentence(key: str, detail: Mapping[str, Any], known: Sequence[str], sources: Sequence[str]) -> str:
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind == "extra_forbidden":
        return f"unknown key '{key}'.{_did_you_mean(nearest_key(known, key)) or _keys_there(known, key)}"
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
    if kind == "model_type":
        return f"'{key}' is {show(value)}; it is a section.{_keys_there(known, key + '.')}"
    if kind == "value_error":  # written by the config's own checks, as a whole sentence
        return detail["msg"].removeprefix("Value error, ").rstrip(".") + "."
    return sentence(key, detail)


def _key(location: Sequence[str | int], tag: str | int | None) -> str:
    """The location without what people never wrote: union members' types and the source's tag."""
    parts = [str(part) for i, part in enumerate(location) if not (i == 1 and part == tag)]
    key = ".".join(part for part in parts if "[" not in part and part != "constrained-float")
    return key if len(key) <= _LONGEST_KEY else f"{key[: _LONGEST_KEY - 3]}..."


def _keys_there(known: Sequence[str], key: str) -> str:
    section = key.rpartition(".")[0]
    there = [name.rpartition(".")[2] for name in known if name.rpartition(".")[0] == section]
    what = f"Section '{section}' has" if section else "The sections are"
    return f" {what} {', '.join(there)}." if there else ""


def _all_keys(
    model: type[pydantic.BaseModel], prefix: str = "", source: type[pydantic.BaseModel] | None = None
) -> Iterator[str]:
    """Dotted names of all keys; of the `data:` section only those of `source`, where it is known."""
    for name, info in model.model_fields.items():
        yield prefix + name
        options = _models(info.annotation)
        for option in [source] if source is not None and source in options else options:
            yield from _all_keys(option, f"{prefix}{name}.")


def _models(annotation: Any) -> list[type[pydantic.BaseModel]]:
    """The sections that a key may hold, also inside of unions and lists."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _sources(model: type[pydantic.BaseModel]) -> dict[Any, type[pydantic.BaseModel]]:
    """The classes that the `data:` section may have, by their tag."""
    options = _models(model.model_fields["data"].annotation)
    return {get_args(option.model_fields["source"].annotation)[0]: option for option in options}


def _one_of(allowed: Sequence[str]) -> str:
    return f"one of {', '.join(allowed)}" if len(allowed) > 1 else allowed[0]


def _nearest(value: object, allowed: Sequence[str]) -> str:
    value = "cuda" if value == "gpu" else value  # nearer in letters to 'cpu'
    close = difflib.get_close_matches(str(value), allowed, n=1, cutoff=0.6)
    return _did_you_mean(close[0] if close else None)


def _did_you_mean(name: str | None) -> str:
    return f" Did you mean '{name}'?" if name else ""
