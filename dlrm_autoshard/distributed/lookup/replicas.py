"""Small tables copied to every rank: each rank looks up its own batch, and all make the same update.

looked_up = replicas.look_up(batch)                  # this rank's samples; no ids or vectors travel
looked_up.put(pooled_BD, margin[0]); looked_up.add_gradient(gradient_BD, margin[0])
replicas.update(lr)                                  # once `gradient` is the sum over ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from weakref import WeakSet

import torch
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.device import SideStreams
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.sums import Sum
from dlrm_autoshard.distributed.tables.init import start
from dlrm_autoshard.tables import TableConfig, output_order

# Axes: B samples of this rank, R rows, N ids of one feature. Operations take one feature at a time, so that their data
# stay in the core's cache.


@dataclass(frozen=True)
class _Feature:
    """number: in the batch. column: its first one in the pooled output. elements: its table's range of all weights."""

    number: int
    column: int
    dim: int
    elements: slice
    averages: bool

    def rows(self, flat: Tensor) -> Tensor:
        """Returns [R, dim] of the weights, or of their gradients."""
        return flat[self.elements].view(-1, self.dim)


class Replicas:
    """This rank's copies. `gradient` is flat and dense, so that it can travel with the dense part's.

    outstanding: training lookups whose gradients have not arrived.
    """

    def __init__(
        self,
        features: Features,
        names: Collection[str],
        optimizer: TableOptimizerConfig,
        device: torch.device,
        start_sum: Sum,
        streams: SideStreams | None = None,
        seed: int = 0,
    ) -> None:
        """features: of the whole model; names: of the replicated tables. start_sum: starts summing gradients over
        ranks, unless `join` lets them travel with others."""
        self.optimizer, self.learning_rate, self._device, self._streams = optimizer, optimizer.lr, device, streams
        self.tables = tuple(
            features.tables[i] for i in output_order(features.tables) if features.tables[i].name in names
        )
        self._places: dict[str, tuple[int, int]] = {}  # table -> its first row and element
        rows = elements = 0
        for table in self.tables:
            self._places[table.name] = rows, elements
            rows, elements = rows + table.num_embeddings, elements + table.num_embeddings * table.embedding_dim
        self.weights = torch.zeros(elements, device=device)
        self.gradient = torch.zeros(elements, device=device)
        self._state: Tensor | None = None
        if optimizer.name != "sgd":
            self._state = torch.zeros(rows if optimizer.name == "rowwise_adagrad" else elements, device=device)
        self._features = list(self._looked_up(features))
        self.outstanding: WeakSet[ReplicaLookup] = WeakSet()
        self.joined = False
        self._before, self._after = self._finish_other, self._start_alone
        self._start_sum = start_sum
        self._sum: Pending | None = None  # in progress
        self._added = False
        for table in self.tables:
            start(self.tensors(table.name)["weight"], table, seed)

    def _looked_up(self, features: Features) -> Iterator[_Feature]:
        column = 0
        for number in features.output_order():
            table = features.tables[features.table_of[number]]
            if table.name in self._places:
                averages = features.features[number].pooling == "mean"
                yield _Feature(number, column, table.embedding_dim, self._elements(table), averages)
            column += table.embedding_dim

    def _elements(self, table: TableConfig) -> slice:
        _, first = self._places[table.name]
        return slice(first, first + table.num_embeddings * table.embedding_dim)

    # -- lookups -------------------------------------------------------------------------------------------------------

    def look_up(self, batch: Batch, *, training: bool = True) -> ReplicaLookup:
        """Looks up this rank's samples. training: a backward pass follows."""
        numbers = [feature.number for feature in self._features]
        one_each = (batch.lengths_TB[numbers] == 1).all(1).tolist()
        counts = batch.lengths_TB.sum(1).tolist()
        values, weights_N = batch.values_N.split(counts), batch.weights_N
        weights = [None] * len(counts) if weights_N is None else weights_N.split(counts)
        looked_up = ReplicaLookup(self)
        for feature, single in zip(self._features, one_each, strict=True):
            ids_N, multiplied = self._here(values[feature.number]), weights[feature.number]
            if single and multiplied is None:
                looked_up.bags.append(_Bags(feature, ids_N))
            else:
                lengths_B = self._here(batch.lengths_TB[feature.number])
                own = None if multiplied is None else self._here(multiplied)
                looked_up.bags.append(_Bags(feature, ids_N, lengths_B, own))
        if training:
            self.outstanding.add(looked_up)
        return looked_up

    def _here(self, given: Tensor) -> Tensor:
        if self._streams is None:
            return given
        copied = self._streams.copy(given)
        self._streams.join(copied)
        return copied

    # -- gradients and updates -----------------------------------------------------------------------------------------

    def join(self, gradient: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Lets gradients be added to `gradient`, whose owner sums it over ranks and then calls `update`. before, after:
        called around each lookup's addition."""
        self.gradient, self._before, self._after, self.joined = gradient, before, after, True

    def add(self, looked_up: ReplicaLookup, gradient_BD: Tensor, first_column: int) -> None:
        """Adds a lookup's gradients to the step's."""
        self._before()
        for bags in looked_up.bags:
            bags.add_gradient(gradient_BD, first_column, self.gradient)
        self.outstanding.discard(looked_up)
        self._added = True
        self._after()

    def _finish_other(self) -> None:
        """Finishes an earlier lookup's own sum, which makes its own update."""
        if self._sum is not None:
            self.finish_alone()

    def _start_alone(self) -> None:
        """Starts summing gradients over ranks, unless more are outstanding."""
        if not self.outstanding:
            self._sum = self._start_sum(self.gradient)

    def finish_alone(self) -> None:
        """Updates the copies, unless they are joined to a dense part."""
        if self.joined or not self._added:
            return
        if self._sum is None:
            self.outstanding.clear()
            self._start_alone()
        assert self._sum is not None
        self._sum.wait()
        self._sum, self._added = None, False
        self.update()

    def update(self) -> None:
        """Makes the optimizer's step by the summed gradient and clears it. Rows without gradient stay unchanged."""
        lr, eps, gradient, state = self.learning_rate, self.optimizer.eps, self.gradient, self._state
        smallest = 0.0 if eps else torch.finfo(torch.float32).tiny  # avoids 0 / 0 for rows never looked up
        if state is None:
            self.weights.add_(gradient, alpha=-lr)
        elif self.optimizer.name == "adagrad":
            state.addcmul_(gradient, gradient)
            self.weights.addcdiv_(gradient, state.sqrt().add_(eps).clamp_(min=smallest), value=-lr)
        else:
            for dim, tables in groupby(self.tables, key=lambda table: table.embedding_dim):
                alike = [*tables]
                (row, element), rows = self._places[alike[0].name], sum(table.num_embeddings for table in alike)
                elements, state_R = slice(element, element + rows * dim), state[row : row + rows]
                gradient_RD = gradient[elements].view(rows, dim)
                state_R.add_(gradient_RD.square().mean(1))
                rate_R = lr / state_R.sqrt().add_(eps).clamp_(min=smallest)
                self.weights[elements].view(rows, dim).sub_(gradient_RD * rate_R[:, None])
        gradient.zero_()

    # -- state ---------------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Returns live views {weight, momentum1} of a table, shaped as for an owner."""
        table = next(table for table in self.tables if table.name == name)
        (row, _), rows, dim = self._places[name], table.num_embeddings, table.embedding_dim
        elements = self._elements(table)
        found = {"weight": self.weights[elements].view(rows, dim)}
        if self._state is not None and self.optimizer.name == "rowwise_adagrad":
            found["momentum1"] = self._state[row : row + rows]
        elif self._state is not None:
            found["momentum1"] = self._state[elements].view(rows, dim)
        return found

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (`NAME.weight`, tensor) and the like for all tables."""
        for table in self.tables:
            for key, value in self.tensors(table.name).items():
                yield f"{table.name}.{key}", value

    def fingerprint(self) -> int:
        """Returns a checksum of weights and optimizer state; any single change changes it."""
        kept = [self.weights] if self._state is None else [self.weights, self._state]
        return sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in kept)


@dataclass(frozen=True)
class _Bags:
    """Ids of one feature: one per sample, or `lengths_B` per sample."""

    of: _Feature
    ids_N: Tensor
    lengths_B: Tensor | None = None
    weights_N: Tensor | None = None

    def put(self, weights: Tensor, output_BD: Tensor, first_column: int) -> None:
        table_RD, into_BD = self.of.rows(weights), output_BD.narrow(1, first_column + self.of.column, self.of.dim)
        if self.lengths_B is None:
            torch.index_select(table_RD, 0, self.ids_N, out=into_BD)
            return
        offsets = torch.nn.functional.pad(self.lengths_B.cumsum(0), (1, 0)).to(self.ids_N)
        pooled_BD = torch.nn.functional.embedding_bag(
            self.ids_N, table_RD, offsets, mode="sum", per_sample_weights=self.weights_N, include_last_offset=True
        )
        into_BD.copy_(pooled_BD / self.lengths_B.clamp(min=1)[:, None] if self.of.averages else pooled_BD)

    def add_gradient(self, gradient_BD: Tensor, first_column: int, into: Tensor) -> None:
        """Adds gradients in a fixed order, so that a row's sum is reproducible."""
        rows_ND, into_RD = gradient_BD.narrow(1, first_column + self.of.column, self.of.dim), self.of.rows(into)
        if self.lengths_B is not None:
            if self.of.averages:
                rows_ND = rows_ND / self.lengths_B.clamp(min=1)[:, None]
            rows_ND = rows_ND.repeat_interleave(self.lengths_B, 0, output_size=len(self.ids_N))
            if self.weights_N is not None:
                rows_ND = rows_ND * self.weights_N[:, None]
        ids_N, rows_ND = self.ids_N.long(), rows_ND.contiguous()  # other dtypes and strides are slow here
        if into.device.type == "cpu":
            into_RD.index_add_(0, ids_N, rows_ND)
        else:  # CUDA's index_add_ adds in any order
            into_RD += torch.ops.aten.embedding_dense_backward(rows_ND, ids_N, len(into_RD), -1, False)


class ReplicaLookup:
    """Ids that a batch looks up in the copies, and where its gradients go."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self.bags: list[_Bags] = []

    def put(self, output_BD: Tensor, first_column: int) -> None:
        """Writes the vectors to their columns of the pooled output, which begins at `first_column`."""
        for bags in self.bags:
            bags.put(self._replicas.weights, output_BD, first_column)

    def add_gradient(self, gradient_BD: Tensor, first_column: int) -> None:
        """Adds gradients. gradient_BD: of the pooled output, which begins at `first_column`."""
        self._replicas.add(self, gradient_BD, first_column)
