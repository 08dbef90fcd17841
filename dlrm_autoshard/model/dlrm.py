"""The dense part of DLRM, without distribution: bottom MLP, interaction, top MLP.

    logits_B = model.top(model.bottom(dense_BF), pooled_BD)

The bottom MLP is separate because it needs no pooled vectors: it runs while they travel. `make_model` makes a DLRM, or
the user's `DenseArch` that the config names.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dlrm_autoshard import plug_in
from dlrm_autoshard.config import ModelConfig
from dlrm_autoshard.model.interaction import CatInteraction, DotInteraction, LowRankCross, with_dense
from dlrm_autoshard.model.jagged import Jagged
from dlrm_autoshard.tables import TableConfig


class DenseArch(nn.Module):
    """Base class of the dense part. tables: in the order of the pooled columns."""

    @property
    def margin(self) -> tuple[int, int]:
        """Number of columns to leave free before and after the pooled ones, for `top` to write to."""
        return (0, 0)

    def bottom(self, dense_BF: Tensor) -> Tensor:
        """Returns everything that needs no pooled vectors, [B, any], from the dense features [B, F]."""
        raise NotImplementedError

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        """Returns logits [B], or [B, L] for L labels.

        pooled_BD: every table's vectors side by side, with `margin`. If `tables.sequences` names features, their
        vectors by name are a third argument."""
        raise NotImplementedError

    def logits(self, bottom_BD: Tensor, pooled_BD: Tensor, sequences: Mapping[str, Jagged]) -> Tensor:
        """Calls `top`, with the sequences of the same samples if there are any."""
        top: Callable[..., Tensor] = self.top
        if not sequences:
            return top(bottom_BD, pooled_BD)
        return top(bottom_BD, pooled_BD, {name: own.first(pooled_BD.shape[0]) for name, own in sequences.items()})


def make_model(
    num_dense: int,
    tables: Sequence[TableConfig],
    config: ModelConfig,
    seed: int = 0,
    num_labels: int = 1,
    sequences: Mapping[str, TableConfig] | None = None,
) -> DenseArch:
    """Makes the DLRM that the config describes, or calls the user's factory.

    sequences: features that are not pooled; the factory receives them if there are any."""
    if config.factory is None:
        return DLRM(num_dense, tables, config, seed, num_labels)
    factory = plug_in.load(config.factory, "model.factory")
    given = {"sequences": sequences} if sequences else {}
    if given and not plug_in.takes(factory, "sequences"):
        raise plug_in.PlugInError(
            f"model.factory: '{config.factory}' has no parameter `sequences`, but tables.sequences names "
            f"'{next(iter(given['sequences']))}'. Add the parameter, and let `top(bottom, pooled, sequences)` take "
            "their vectors; or remove tables.sequences to have them pooled."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = plug_in.call(factory, "model.options", num_dense, tables, **given, **config.options)
    if not isinstance(made, DenseArch):
        raise plug_in.PlugInError(
            f"model.factory: '{config.factory}' returns a {type(made).__name__}; it must return a "
            "dlrm_autoshard.DenseArch, which is an nn.Module with `bottom` and `top`."
        )
    for name, parameter in made.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise plug_in.PlugInError(
                f"model.factory: '{config.factory}' returns {name} as {str(parameter.dtype).removeprefix('torch.')}; "
                "weights that are trained must be float32. Remove `.to(...)` or its dtype; for bf16 matrix products "
                "set train.dense_dtype: bf16."
            )
    return made


class DLRM(DenseArch):
    """DLRM's dense part. tables: in the order of the pooled columns, tables of one dim side by side
    (`output_order`)."""

    def __init__(
        self, num_dense: int, tables: Sequence[TableConfig], config: ModelConfig, seed: int = 0, num_labels: int = 1
    ) -> None:
        super().__init__()
        dim = config.dense_arch_layer_sizes[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom_mlp = mlp([max(num_dense, 1), *config.dense_arch_layer_sizes], last_activation=True)
            self.interaction = make_interaction(tables, dim, config)
            # The dot interaction needs vectors of one dim; `cat` and `dcn` take any.
            mixed = config.interaction == "dot" and any(table.embedding_dim != dim for table in tables)
            self.projection = Projection(tables, dim, self.interaction.padding) if mixed else None
            self.dim = dim
            hidden = config.over_arch_layer_sizes[:-1]
            self.over_mlp = mlp([self.interaction.out_features, *hidden, num_labels], last_activation=False)

    def bottom(self, dense_BF: Tensor) -> Tensor:
        """Returns the dense vector [B, D]; without dense features it is computed from a constant."""
        if dense_BF.shape[1] == 0:
            dense_BF = dense_BF.new_ones(dense_BF.shape[0], 1)
        result: Tensor = self.bottom_mlp(dense_BF)
        return result

    @property
    def margin(self) -> tuple[int, int]:
        """Number of columns that `top` needs free before and after the pooled ones, so that the dense vector and the
        padding go there without a copy; none if vectors are projected, which copies them."""
        return (self.dim, self.dim * self.interaction.padding) if self.projection is None else (0, 0)

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        """Returns logits from the dense vector and the pooled vectors. Writes to the `margin` around them."""
        if self.projection is not None:
            pooled_BD = self.projection(pooled_BD).flatten(1)
        x_BX = with_dense(bottom_BD, pooled_BD, self.interaction.padding)
        result: Tensor = self.over_mlp(self.interaction(x_BX))
        return result.squeeze(1)  # [B] for one label


def make_interaction(
    tables: Sequence[TableConfig], dim: int, config: ModelConfig
) -> DotInteraction | CatInteraction | LowRankCross:
    """Makes the interaction that the config names."""
    width = dim + sum(table.embedding_dim for table in tables)
    if config.interaction == "dot":
        return DotInteraction(len(tables), dim)
    if config.interaction == "cat":
        return CatInteraction(width)
    return LowRankCross(width, config.dcn_num_layers, config.dcn_low_rank_dim)


class Projection(nn.Module):
    """Projects pooled vectors of several dims to one: [B, sum of dims] -> [B, 1 + T + padding, dim].

    Leaves one vector free before for the dense vector and `padding` after; one matrix per table of another dim."""

    def __init__(self, tables: Sequence[TableConfig], dim: int, padding: int) -> None:
        super().__init__()
        self.dim, self.padding = dim, padding
        self.groups: list[tuple[int, int]] = []  # (dim, how many tables have it), in column order
        self.weights = nn.ParameterDict()
        for own, group in itertools.groupby(tables, key=lambda table: table.embedding_dim):
            count = len(list(group))
            if any(own == other for other, _ in self.groups):
                raise ValueError("tables of one dim must lie side by side")
            self.groups.append((own, count))
            if own != dim:
                bound = math.sqrt(6.0 / (own + dim))
                self.weights[str(own)] = nn.Parameter(torch.empty(count, own, dim).uniform_(-bound, bound))

    def forward(self, pooled_BD: Tensor) -> Tensor:
        projected = []
        # `split` writes its gradient once; slicing would make a tensor as large as all of them per slice.
        columns = pooled_BD.split([own * count for own, count in self.groups], 1)
        for (own, count), group in zip(self.groups, columns, strict=True):
            group = group.reshape(-1, count, own)
            if own != self.dim:
                group = torch.bmm(group.transpose(0, 1), self.weights[str(own)].to(group.dtype)).transpose(0, 1)
            projected.append(group)
        margin = [projected[0].new_zeros(pooled_BD.shape[0], count, self.dim) for count in (1, self.padding)]
        return torch.cat([margin[0], *(group.to(margin[0].dtype) for group in projected), margin[1]], 1)


def mlp(sizes: Sequence[int], *, last_activation: bool) -> nn.Sequential:
    """Alternates Linear and ReLU; weights normal with variance 2 / (in + out), biases 1 / out, as in DLRM."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(2.0 / (fan_in + fan_out)))
        nn.init.normal_(linear.bias, std=math.sqrt(1.0 / fan_out))
        layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[: len(layers) - (0 if last_activation else 1)])
