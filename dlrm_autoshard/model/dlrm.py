"""The dense part of DLRM: bottom MLP, interaction, top MLP. No distribution in here.

    logits_B = model.top(model.bottom(dense_BF), pooled_BD)

The two halves are separate because the bottom MLP needs no vectors: it runs while they travel. `make_model` gives DLRM,
or the `DenseArch` of the user's own that the config names.
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
    """The dense part, as the training step uses it. tables: in the order of the pooled columns."""

    @property
    def margin(self) -> tuple[int, int]:
        """Columns to be left free before and after the pooled ones, for `top` to write to."""
        return (0, 0)

    def bottom(self, dense_BF: Tensor) -> Tensor:
        """[B, any] from the dense features [B, F]: all that needs no pooled vectors."""
        raise NotImplementedError

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        """Logits [B]; [B, L] for L labels. pooled_BD: every table's vectors side by side, with `margin`. Where
        `tables.sequences` names some, their vectors by name are a third argument."""
        raise NotImplementedError

    def logits(self, bottom_BD: Tensor, pooled_BD: Tensor, sequences: Mapping[str, Jagged]) -> Tensor:
        """Returns what `top` gives, from sequences as well where there are some: those of as many samples."""
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
    """Makes the dense part that the config describes, or a user's own by its factory, which is given `sequences`, the
    features that are not pooled, where there are some."""
    if config.factory is None:
        return DLRM(num_dense, tables, config, seed, num_labels)
    factory = plug_in.load(config.factory, "model.factory")
    given = {"sequences": sequences} if sequences else {}
    if given and not plug_in.takes(factory, "sequences"):
        raise plug_in.PlugInError(
            f"model.factory: '{config.factory}' has no parameter `sequences`, and tables.sequences has "
            f"'{next(iter(given['sequences']))}'. Let it take them, and `top(bottom, pooled, sequences)` their "
            "vectors; or take them out to have them pooled."
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = plug_in.call(factory, "model.options", num_dense, tables, **given, **config.options)
    if not isinstance(made, DenseArch):
        raise plug_in.PlugInError(
            f"model.factory: '{config.factory}' gives a {type(made).__name__}; it must give a "
            "dlrm_autoshard.DenseArch, which is an nn.Module with `bottom` and `top`."
        )
    for name, parameter in made.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            raise plug_in.PlugInError(
                f"model.factory: '{config.factory}' gives {name} as {str(parameter.dtype).removeprefix('torch.')}; "
                "weights that are trained must be float32. Leave `.to(...)`, or its dtype, out; for products of bf16 "
                "set train.dense_dtype: bf16."
            )
    return made


class DLRM(DenseArch):
    """tables: in the order of the pooled columns, tables of one dim side by side (see `output_order`)."""

    def __init__(
        self, num_dense: int, tables: Sequence[TableConfig], config: ModelConfig, seed: int = 0, num_labels: int = 1
    ) -> None:
        super().__init__()
        dim = config.dense_arch_layer_sizes[-1]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.bottom_mlp = mlp([max(num_dense, 1), *config.dense_arch_layer_sizes], last_activation=True)
            self.interaction = make_interaction(tables, dim, config)
            # Products are of vectors of one dim; `cat` and `dcn` take vectors of any.
            mixed = config.interaction == "dot" and any(table.embedding_dim != dim for table in tables)
            self.projection = Projection(tables, dim, self.interaction.padding) if mixed else None
            self.dim = dim
            hidden = config.over_arch_layer_sizes[:-1]
            self.over_mlp = mlp([self.interaction.out_features, *hidden, num_labels], last_activation=False)

    def bottom(self, dense_BF: Tensor) -> Tensor:
        """[B, D] from the dense features; without any, from a constant."""
        if dense_BF.shape[1] == 0:
            dense_BF = dense_BF.new_ones(dense_BF.shape[0], 1)
        result: Tensor = self.bottom_mlp(dense_BF)
        return result

    @property
    def margin(self) -> tuple[int, int]:
        """Columns that `top` wants free before and after the pooled ones, so that the dense vector and the padding
        can take their places without anything being copied; none where vectors are projected, which copies them."""
        return (self.dim, self.dim * self.interaction.padding) if self.projection is None else (0, 0)

    def top(self, bottom_BD: Tensor, pooled_BD: Tensor) -> Tensor:
        """Logits from the dense vector and the concatenated pooled vectors, `margin` around them, which is written
        to."""
        if self.projection is not None:
            pooled_BD = self.projection(pooled_BD).flatten(1)
        x_BX = with_dense(bottom_BD, pooled_BD, self.interaction.padding)
        result: Tensor = self.over_mlp(self.interaction(x_BX))
        return result.squeeze(1)  # of one label


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
    """Pooled vectors of several dims to one, with a margin for the dense vector before and `padding` vectors after:
    [B, sum of dims] -> [B, 1 + T + padding, dim]; one matrix for each table that has another."""

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
        # `split`, whose gradient is written once; that of each slice would be a tensor as large as all of them.
        columns = pooled_BD.split([own * count for own, count in self.groups], 1)
        for (own, count), group in zip(self.groups, columns, strict=True):
            group = group.reshape(-1, count, own)
            if own != self.dim:
                group = torch.bmm(group.transpose(0, 1), self.weights[str(own)].to(group.dtype)).transpose(0, 1)
            projected.append(group)
        margin = [projected[0].new_zeros(pooled_BD.shape[0], count, self.dim) for count in (1, self.padding)]
        return torch.cat([margin[0], *(group.to(margin[0].dtype) for group in projected), margin[1]], 1)


def mlp(sizes: Sequence[int], *, last_activation: bool) -> nn.Sequential:
    """Linear and ReLU in turn; weights normal with variance 2 / (in + out), biases 1 / out, as DLRM starts them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(sizes):
        linear = nn.Linear(fan_in, fan_out)
        nn.init.normal_(linear.weight, std=math.sqrt(2.0 / (fan_in + fan_out)))
        nn.init.normal_(linear.bias, std=math.sqrt(1.0 / fan_out))
        layers += [linear, nn.ReLU(inplace=True)]
    return nn.Sequential(*layers[: len(layers) - (0 if last_activation else 1)])
