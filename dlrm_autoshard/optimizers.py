"""The optimizers of tables, a record each: adding one that fbgemm has takes a record here, and nothing elsewhere.

OPTIMIZERS["adagrad"].state_shapes(rows=100, dim=16)      # {"momentum1": (100, 16)}
TableOptimizerConfig(name="sgd", lr=0.1).record.fbgemm    # "EXACT_SGD"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

import pydantic
from pydantic import NonNegativeFloat, PositiveFloat

from dlrm_autoshard.formats.section import Section


@dataclass(frozen=True)
class OptimizerRecord:
    """fbgemm: the name of its EmbOptimType. states: what is kept beside the weights, for each row or each element.
    settings: those it takes beside the learning rate. devices: for which fbgemm has kernels. updates: False where the
    backward pass leaves the weights as they are. replicates: copies on every rank are updated by it (replicas.py)."""

    fbgemm: str
    states: Mapping[str, Literal["row", "element"]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    updates: bool = True
    replicates: bool = False

    @property
    def elementwise(self) -> bool:
        """Whether columns are updated without regard to one another, so that splitting a table changes no bit."""
        return "row" not in self.states.values()

    def state_shapes(self, rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Optimizer state by name: what a checkpoint or a move must carry beside the weight."""
        return {state: (rows,) if each == "row" else (rows, dim) for state, each in self.states.items()}


OPTIMIZERS: Mapping[str, OptimizerRecord] = {
    "rowwise_adagrad": OptimizerRecord(
        "EXACT_ROWWISE_ADAGRAD", {"momentum1": "row"}, ("eps", "weight_decay"), replicates=True
    ),
    "adagrad": OptimizerRecord("EXACT_ADAGRAD", {"momentum1": "element"}, ("eps",), replicates=True),
    "sgd": OptimizerRecord("EXACT_SGD", replicates=True),
    "adam": OptimizerRecord(
        "ADAM", {"momentum1": "element", "momentum2": "element"}, ("eps", "weight_decay"), ("cuda",)
    ),
    "frozen": OptimizerRecord("EXACT_SGD", updates=False),  # fbgemm's lookup alone
}

if TYPE_CHECKING:
    TableOptimizer: TypeAlias = str
else:
    TableOptimizer = Literal[tuple(OPTIMIZERS)]


class TableOptimizerConfig(Section):
    """Optimizer of the tables."""

    name: TableOptimizer = "rowwise_adagrad"
    lr: PositiveFloat = 0.02
    eps: NonNegativeFloat = 1e-8
    # rowwise_adagrad: each part of a split table keeps its own sum of squares a row, which is another optimizer than
    # one sum over all columns. false: no table is split. The others are elementwise: a split changes no bit.
    per_part: bool = False
    # In steps that look a row up: times its weights, is added to its gradient (rowwise_adagrad); as AdamW's (adam).
    weight_decay: NonNegativeFloat = 0.0
    max_gradient: PositiveFloat | None = None  # of each number of a pooled vector's gradient; what is beyond is cut

    @pydantic.model_validator(mode="after")
    def _has_weight_decay(self) -> TableOptimizerConfig:
        if self.weight_decay and "weight_decay" not in self.record.settings:
            able = " and ".join(name for name, own in OPTIMIZERS.items() if "weight_decay" in own.settings)
            raise ValueError(f"weight_decay of tables is {able}'s; '{self.name}' has none")
        return self

    @property
    def record(self) -> OptimizerRecord:
        return OPTIMIZERS[self.name]

    @property
    def splits_tables(self) -> bool:
        return self.per_part or self.record.elementwise


class OptimizerChanges(Section):
    """Keys of an optimizer that are not those of the other tables' one."""

    name: TableOptimizer | None = None
    lr: PositiveFloat | None = None
    eps: NonNegativeFloat | None = None
    per_part: bool | None = None
    weight_decay: NonNegativeFloat | None = None
    max_gradient: PositiveFloat | None = None
