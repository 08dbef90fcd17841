"""A planner's state as JSON, as `fit` and checkpoints keep it: read strictly, so that a damaged one is named, not used.

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
from dlrm_autoshard.planner.replay import CommsRecord, ShardRecord

Factor = Annotated[float, Field(ge=-MOST, le=MOST)]
Price = Annotated[float, Field(ge=0, le=MOST)]
Pair = Annotated[list[Factor], Field(min_length=2, max_length=2)]
RankNumber = Annotated[str, Field(pattern=r"^[0-9]{1,5}$")]
Weights = dict[str, Any]


class AnchorRecord(TypedDict):
    tables: dict[str, Pair]
    exchange: dict[RankNumber, Pair]


class ReplayRecord(TypedDict):
    shards: list[ShardRecord]
    comms: list[CommsRecord]
    profiles: list[StepRecord]


class Sequences(TypedDict):
    autoshard: Weights
    rnn: Weights


class PlannerRecord(TypedDict):
    """What `Planner.state_dict` gives."""

    schema: Literal[1]
    cost_model: Weights
    comms: Annotated[list[Annotated[list[Price], Field(min_length=4, max_length=6)]], Field(min_length=2, max_length=2)]
    speed: dict[RankNumber, Pair]
    anchor: NotRequired[AnchorRecord]  # checkpoints of before there were any have none
    replay: ReplayRecord
    costs_from: str
    policy: Weights
    sequences: Sequences
    reference: Weights | None


def load_planner(planner: Any, path: Path) -> None:
    """Into a Planner. FormatError names the file, and the key that is wrong."""
    state = read_json(path, PlannerRecord, "planner file")
    try:
        planner.load_state_dict(state)
    except UserError as error:
        raise FormatError(f"planner file '{path}': {error}") from error
