"""A planner's state as JSON in checkpoints and files of `fit`; read strictly, so that damage is reported.

load_planner(planner, Path("fitted/planner.json"))        # FormatError names the file and the key
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.costs import StepRecord
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.arrays import MOST
from dlrm_autoshard.formats.json_file import FormatError, read_json
from dlrm_autoshard.planner.corrections.conditioning import Spread
from dlrm_autoshard.planner.costs.replay import CommsRecord, ShardRecord

Price = Annotated[float, Field(ge=0, le=MOST)]
Weights = dict[str, Any]


class SpreadsRecord(TypedDict):
    """The posterior's spreads, and the number of start-up shards that they were estimated from."""

    likeliest: dict[Spread, Annotated[float, Field(gt=0, le=10)]]
    shards: Annotated[int, Field(ge=-1)]


class CorrectionsRecord(TypedDict):
    """State of the corrections."""

    eras: list[Annotated[int, Field(ge=0)]]
    spreads: NotRequired[SpreadsRecord]  # missing in states of older versions


class ReplayRecord(TypedDict):
    """Measurements that the costs are fitted to."""

    shards: list[ShardRecord]
    comms: list[CommsRecord]
    profiles: list[StepRecord]


class Sequences(TypedDict):
    """Weights of the sequence policies."""

    autoshard: Weights
    rnn: Weights


class CostsRecord(TypedDict):
    """Result of `LearnedCosts.to_json`."""

    cost_model: Weights
    comms: Annotated[list[Annotated[list[Price], Field(min_length=4, max_length=5)]], Field(min_length=2, max_length=2)]
    corrections: CorrectionsRecord
    replay: ReplayRecord
    costs_from: str


class PlannerRecord(TypedDict):
    """Result of `Planner.state_dict`."""

    schema: Literal[2]
    algorithm: str
    costs: CostsRecord
    policy: Weights | None  # None if it was never used
    sequences: Sequences | None
    reference: Weights | None


def load_planner(planner: Any, path: Path) -> None:
    """Loads a file into a Planner. FormatError names the file and the wrong key."""
    state = read_json(path, dict[str, Any], "planner file")
    try:
        planner.load_state_dict(state)
    except UserError as error:
        raise FormatError(f"planner file '{path}': {error}") from error
