"""The optimizers of tables, one record each; another optimizer of fbgemm needs only a record here.

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
    """Properties of a table optimizer.

    fbgemm: its EmbOptimType. states: what it keeps beside the weights, per row or per element. settings: those it takes
    beside the learning rate. devices: for which fbgemm has kernels. updates: False if backward leaves the weights
    alone. replicates: copies on every rank can be updated with it (replicas.py)."""

    fbgemm: str
    states: Mapping[str, Literal["row", "element"]] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    devices: tuple[str, ...] = ("cpu", "cuda")
    updates: bool = True
    replicates: bool = False

    @property
    def elementwise(self) -> bool:
        """Whether columns are updated independently, so that splitting a table changes no bit."""
        return "row" not in self.states.values()

    def state_shapes(self, rows: int, dim: int) -> dict[str, tuple[int, ...]]:
        """Returns shapes of the optimizer state by name, which checkpoints and moves carry beside the weight."""
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
    "frozen": OptimizerRecord("EXACT_SGD", updates=False),  # lookup only
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
    # rowwise_adagrad: split tables, with a sum of squares per row of each shard, which differs from one sum over all
    # columns. false: split no table. Other optimizers are elementwise: a split changes no bit.
    per_part: bool = False
    # Added to the gradient of looked-up rows, times their weights (rowwise_adagrad); decoupled as in AdamW (adam).
    weight_decay: NonNegativeFloat = 0.0
    max_gradient: PositiveFloat | None = (
        None  # limit of each number of a pooled vector's gradient; larger ones are clipped
    )

    @pydantic.model_validator(mode="after")
    def _has_weight_decay(self) -> TableOptimizerConfig:
        if self.weight_decay and "weight_decay" not in self.record.settings:
            able = " and ".join(name for name, own in OPTIMIZERS.items() if "weight_decay" in own.settings)
            raise ValueError(f"only {able} have weight_decay for tables; '{self.name}' has none")
        return self

    @property
    def record(self) -> OptimizerRecord:
        return OPTIMIZERS[self.name]

    @property
    def splits_tables(self) -> bool:
        return self.per_part or self.record.elementwise


class OptimizerChanges(Section):
    """Keys of an optimizer that differ from the common one."""

    name: TableOptimizer | None = None
    lr: PositiveFloat | None = None
    eps: NonNegativeFloat | None = None
    per_part: bool | None = None
    weight_decay: NonNegativeFloat | None = None
    max_gradient: PositiveFloat | None = None
