"""A rank's random number generators (Python's, NumPy's, torch's and its GPU's): seeded, saved as JSON, restored."""

from __future__ import annotations

import base64
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch


def seed_all(seed: int, rank: int) -> None:
    """Each rank's own stream, so that ranks do not drop the same units out."""
    words = np.random.SeedSequence([seed % 2**64, rank]).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.manual_seed(int(words[2]))  # of all GPUs too


def random_state(device: torch.device) -> dict[str, Any]:
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


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    generator = state["numpy"]
    key = np.array(generator["state"]["key"], np.uint32)
    np.random.set_state({**generator, "state": {**generator["state"], "key": key}})
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_tensor(state["cuda"]), device)


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
