"""Seeds, saves as JSON and restores a rank's random generators: Python's, NumPy's, torch's and its GPU's."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.formats.json_file import FormatError, checked
from dlrm_autoshard.formats.numbers import Finite


def seed_all(seed: int, rank: int) -> None:
    """Seeds each rank differently, so that ranks do not drop out the same units."""
    words = np.random.SeedSequence([seed % 2**64, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))  # seeds all GPUs, too


def random_state(device: torch.device) -> dict[str, Any]:
    """Returns the state of every random generator that training may use, as JSON."""
    version, words, gauss = random.getstate()
    generator = np.random.get_state(legacy=False)
    state = {
        "python": [version, list(words), gauss],
        "numpy": {**generator, "state": {**generator["state"], "key": generator["state"]["key"].tolist()}},
        "torch": _text(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text(torch.cuda.get_rng_state(device))
    return state


class _NumpyWords(TypedDict):
    key: list[Annotated[int, Field(ge=0, lt=2**32)]]
    pos: Annotated[int, Field(ge=0, le=624)]


class _NumpyState(TypedDict):
    bit_generator: Literal["MT19937"]
    state: _NumpyWords
    has_gauss: Annotated[int, Field(ge=0, le=1)]
    gauss: Finite


class RandomState(TypedDict):
    """The result of `random_state` as JSON."""

    python: list[Any]
    numpy: _NumpyState
    torch: Annotated[str, Field(max_length=10**6)]
    cuda: NotRequired[Annotated[str, Field(max_length=10**6)]]


def check_random_state(state: Any) -> None:
    """Raises FormatError if the state is invalid; tries it on other generators, so these are unchanged."""
    found = checked(RandomState, state)
    try:
        _set(found, random.Random(), np.random.RandomState(), torch.Generator())
    except (TypeError, ValueError, RuntimeError, OverflowError, KeyError) as error:
        raise FormatError(
            f"it is not a state of a random number generator ({str(error).partition(chr(10))[0]})."
        ) from None


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Sets every generator to a state that `random_state` returned."""
    _set(state, random, np.random, torch.default_generator)
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _set(state: Mapping[str, Any], python: Any, numpy: Any, generator: torch.Generator) -> None:
    """python: a `random.Random` or the module; numpy: a RandomState or the module."""
    version, words, gauss = state["python"]
    python.setstate((version, tuple(words), gauss))
    own = state["numpy"]
    numpy.set_state({**own, "state": {**own["state"], "key": np.array(own["state"]["key"], np.uint32)}})
    generator.set_state(_tensor(state["torch"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
