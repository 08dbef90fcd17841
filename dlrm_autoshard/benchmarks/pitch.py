"""What it is all worth, in the README's first sentences: their figures are of the records.

pitch({"race-short": record, "planner-quality": record})         # of what has no record that counts, nothing is said
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from dlrm_autoshard.benchmarks.race_worlds import IN_WORDS

RACES = ("race", "race-short")
NET = ", steps, deciding and moving"
"""As a race's figures by that clock are named."""
_WORLDS = ("abrupt", "straggler", "calm")
_TORCHREC = """- **Against TorchRec with its own planner**, ranks on one host: lookup-heavy models train {:.1f} times as
fast, MLP-heavy ones {:.1f} times; whole jobs, from the process's start to the last step, {:.1f} to {:.1f} times."""
_ON_A_GPU = " On one H200, steps alone: {:.1f} and {:.1f} times; ours replays its dense part as CUDA graphs."
_RESHARDING = """- **With resharding against without**, jobs of half a minute, the steps of both jobs' plans in turns,
deciding and moving counted: {} time where the data drift once, {} where another process takes half of a rank's core
for three of eight epochs, {} where nothing changes. By wall clock, by which such jobs differ by more than that from one
to the next: {}, {}, {}."""
_SPLITS = """- **Tables split by columns**, where their optimizer is elementwise (SGD, Adagrad, Adam) or allows it by
parts: with 20 tables on 8 devices (exchanges modelled, the ids that go to several owners not counted) that takes away
{:.0%} of what the best heuristic leaves above perfect balance; whole tables {:.0%}."""


def pitch(counted: Mapping[str, Mapping[str, Any]]) -> str:
    """counted: records by benchmark."""
    of = {name: record["figures"] for name, record in counted.items()}
    said = []
    if {"train-wemb", "train-wsmall", "race-short"} <= of.keys():
        steps = [of[name]["2 ranks: over torchrec"] for name in ("train-wemb", "train-wsmall")]
        keys = [f"{world}: torchrec / loop on" for world in IN_WORDS]
        whole = [of[race][key] for race in RACES if race in of for key in keys if of[race].get(key) is not None]
        said.append(_TORCHREC.format(*steps, min(whole), max(whole)))
        seen = of.get("gpu-all", {})
        on_a_gpu = [seen.get(f"peer.{name}: over the fastest of them") for name in ("w_emb", "w_small")]
        if None not in on_a_gpu:
            said[-1] += _ON_A_GPU.format(*on_a_gpu)
    if "race-short" in of:
        keys = [f"{world}: loop on / loop off{clock}" for clock in (NET, "") for world in _WORLDS]
        said.append(_RESHARDING.format(*(_less(of["race-short"].get(key)) for key in keys)))
    if "planner-quality" in of:
        keys = [f"20x8 auto{what}: excess removed" for what in (", tables split", "")]
        said.append(_SPLITS.format(*(of["planner-quality"][key] for key in keys)))
    lines = [" ".join(one.split()) for one in said]
    return "\n".join(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False) for line in lines)


def _less(ratio: float | None) -> str:
    """Of time: '5% less'."""
    if ratio is None:
        return "(not measured)"
    return f"{abs(1 - ratio):.0%} {'less' if ratio < 1 else 'more'}" if abs(1 - ratio) >= 0.005 else "as much"
