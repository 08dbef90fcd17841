"""Small tables that every rank has a copy of: each looks its own batch up, and all make the same update.

looked_up = replicas.look_up(batch)                  # this rank's samples; no id and no vector travels
looked_up.put(pooled_BD, margin[0]); looked_up.add_gradient(gradient_BD, margin[0])
replicas.update(lr)                                  # once `gradient` is the sum over ranks
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.config import TableOptimizerConfig
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features
from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.shared_memory import SharedMemory
from dlrm_autoshard.distributed.lookup.side_streams import SideStreams
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.tables import TableConfig

# Axes: B samples of this rank, F features of one dim, D columns of all replicated features, R rows, N ids.


@dataclass(frozen=True)
class _Dim:
    """The features of one embedding dim: their rows lie in one weight, in which ids are counted on from `first_rows_F`.

    features: numbers in the batch. columns: in the replicas' own [B, D]. rows: [start, stop) of all rows. elements: of
    all weights. averages_F: which features divide by their bags' lengths.
    """

    dim: int
    features: list[int]
    first_rows_F: Tensor
    columns: slice
    rows: slice
    elements: slice
    averages_F: Tensor

    def weight(self, flat: Tensor) -> Tensor:
        """[R, dim] of the weights, or of what is kept beside each."""
        return flat[self.elements].view(-1, self.dim)


@dataclass(frozen=True)
class Reduce:
    """Starts sums over ranks in place: through shared memory where there is a link, which nothing else sums by."""

    group: dist.ProcessGroup
    link: SharedMemory | None

    def __call__(self, values: Tensor) -> Pending:
        if self.link is not None:
            return Pending(self.link.all_reduce(values), values)
        work = dist.all_reduce(values, group=self.group, async_op=True)
        return Pending(work.wait, values)


class Replicas:
    """The copies of this rank. `gradient` is flat and dense, so that it can travel with the dense part's.

    outstanding: training lookups whose gradients are still to come.
    """

    def __init__(
        self,
        features: Features,
        names: Collection[str],
        optimizer: TableOptimizerConfig,
        device: torch.device,
        reduce: Reduce,
        streams: SideStreams | None = None,
        seed: int = 0,
    ) -> None:
        """features: of the whole model; names: of the replicated tables among its tables. reduce: sums gradients,
        unless `join` has them travel with others."""
        self.optimizer, self.learning_rate, self._device, self._streams = optimizer, optimizer.lr, device, streams
        order, of = features.output_order(), features.features
        own = [number for number in order if features.tables[features.table_of[number]].name in names]
        self.tables = tuple(dict.fromkeys(features.tables[features.table_of[number]] for number in own))
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
        self._dims = list(self._by_dim(features, own))
        self.runs = list(_runs(order, own, of))
        """(first column of the pooled output, first of the replicas' own, number) of columns that lie side by side."""
        self.outstanding: WeakSet[ReplicaLookup] = WeakSet()
        self.joined = False
        self._before, self._after = self._finish_other, self._start_alone
        self._reduce = reduce
        self._sum: Pending | None = None  # on its way
        self._added = False
        for table in self.tables:
            initialise(self.tensors(table.name)["weight"], table.name, seed)

    def _by_dim(self, features: Features, own: list[int]) -> Iterator[_Dim]:
        first_column = 0
        for dim in dict.fromkeys(features.features[number].embedding_dim for number in own):
            alike = [number for number in own if features.features[number].embedding_dim == dim]
            tables = [table for table in self.tables if table.embedding_dim == dim]
            first_row, first_element = self._places[tables[0].name]
            rows = sum(table.num_embeddings for table in tables)
            starts = [self._places[features.tables[features.table_of[n]].name][0] - first_row for n in alike]
            averages = [features.features[number].pooling == "mean" for number in alike]
            yield _Dim(
                dim,
                alike,
                torch.tensor(starts),
                slice(first_column, first_column + dim * len(alike)),
                slice(first_row, first_row + rows),
                slice(first_element, first_element + rows * dim),
                torch.tensor(averages),
            )
            first_column += dim * len(alike)

    # -- lookups -------------------------------------------------------------------------------------------------------

    def look_up(self, batch: Batch, *, training: bool = True) -> ReplicaLookup:
        """Vectors of this rank's samples. training: a backward pass follows."""
        counts = batch.lengths_TB.sum(1).tolist()
        values, weights = batch.values_N.split(counts), None
        if batch.weights_N is not None:
            weights = batch.weights_N.split(counts)
        looked_up = ReplicaLookup(self, [self._bags(of, batch, values, weights) for of in self._dims])
        if training:
            self.outstanding.add(looked_up)
        return looked_up

    def _bags(self, of: _Dim, batch: Batch, values: tuple[Tensor, ...], weights: tuple[Tensor, ...] | None) -> _Bags:
        lengths_FB = batch.lengths_TB[of.features]
        starts_F = of.first_rows_F.to(batch.values_N)
        if weights is None and bool((lengths_FB == 1).all()):
            ids_FB = torch.stack([values[number] for number in of.features]) + starts_F[:, None]
            return _Bags(of, self._here(ids_FB.T.reshape(-1)))
        lengths_F = torch.tensor([len(values[number]) for number in of.features], device=starts_F.device)
        ids_N = torch.cat([values[number] for number in of.features]) + starts_F.repeat_interleave(lengths_F)
        weights_N = None if weights is None else self._here(torch.cat([weights[number] for number in of.features]))
        return _Bags(of, self._here(ids_N), self._here(lengths_FB), weights_N)

    def _here(self, given: Tensor) -> Tensor:
        if self._streams is None:
            return given
        copied = self._streams.copy(given)
        self._streams.join(copied)
        return copied

    # -- gradients and updates -----------------------------------------------------------------------------------------

    def join(self, gradient: Tensor, before: Callable[[], None], after: Callable[[], None]) -> None:
        """Gradients are added to `gradient`, which somebody else sums over ranks, and who calls `update` then. before,
        after: called around each lookup's."""
        self.gradient, self._before, self._after, self.joined = gradient, before, after, True

    def add(self, looked_up: ReplicaLookup, gradients: Sequence[tuple[_Bags, Tensor]]) -> None:
        """gradients: of a lookup, by dim."""
        self._before()
        for bags, gradient_BD in gradients:
            bags.add_gradient(gradient_BD, bags.of.weight(self.gradient))
        self.outstanding.discard(looked_up)
        self._added = True
        self._after()

    def _finish_other(self) -> None:
        """Another lookup's gradients may be on their way by themselves: they make an update of their own."""
        if self._sum is not None:
            self.finish_alone()

    def _start_alone(self) -> None:
        """Sums the gradients over ranks, unless another lookup's are still to come."""
        if not self.outstanding:
            self._sum = self._reduce(self.gradient)

    def finish_alone(self) -> None:
        """Updates the copies, where nobody was joined who does."""
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
        """Makes the optimizer's step by the summed gradient, and clears that. Rows without any stay as they are."""
        lr, eps, gradient, state = self.learning_rate, self.optimizer.eps, self.gradient, self._state
        smallest = 0.0 if eps else torch.finfo(torch.float32).tiny  # 0 / 0 of a row that was never looked up
        if state is None:
            self.weights.add_(gradient, alpha=-lr)
        elif self.optimizer.name == "adagrad":
            state.addcmul_(gradient, gradient)
            self.weights.addcdiv_(gradient, state.sqrt().add_(eps).clamp_(min=smallest), value=-lr)
        else:
            for of in self._dims:
                gradient_RD, state_R = of.weight(gradient), state[of.rows]
                state_R.add_(gradient_RD.square().mean(1))
                rate_R = lr / state_R.sqrt().add_(eps).clamp_(min=smallest)
                of.weight(self.weights).sub_(gradient_RD * rate_R[:, None])
        gradient.zero_()

    # -- state ---------------------------------------------------------------------------------------------------------

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Live views {weight, momentum1} of a table, shaped as its owner's would be."""
        table = next(table for table in self.tables if table.name == name)
        (row, element), rows, dim = self._places[name], table.num_embeddings, table.embedding_dim
        elements = slice(element, element + rows * dim)
        found = {"weight": self.weights[elements].view(rows, dim)}
        if self._state is not None and self.optimizer.name == "rowwise_adagrad":
            found["momentum1"] = self._state[row : row + rows]
        elif self._state is not None:
            found["momentum1"] = self._state[elements].view(rows, dim)
        return found

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """(`NAME.weight`, ...) of all of them."""
        for table in self.tables:
            for key, value in self.tensors(table.name).items():
                yield f"{table.name}.{key}", value

    def fingerprint(self) -> int:
        """The same for the same weights and optimizer state, bit by bit; any single change changes it."""
        kept = [self.weights] if self._state is None else [self.weights, self._state]
        return sum(int(tensor.view(torch.int32).sum(dtype=torch.int64)) for tensor in kept)


@dataclass(frozen=True)
class _Bags:
    """Ids of one dim's features, as rows of its weight: sample by sample where each bag has one, else feature by
    feature, in bags of `lengths_FB`."""

    of: _Dim
    rows_N: Tensor
    lengths_FB: Tensor | None = None
    weights_N: Tensor | None = None

    def vectors(self, weight_RD: Tensor) -> Tensor:
        """[B, F * dim]"""
        if self.lengths_FB is None:
            return weight_RD.index_select(0, self.rows_N).view(-1, len(self.of.features) * self.of.dim)
        offsets = torch.nn.functional.pad(self.lengths_FB.reshape(-1).cumsum(0), (1, 0)).to(self.rows_N)
        pooled = torch.nn.functional.embedding_bag(
            self.rows_N, weight_RD, offsets, mode="sum", per_sample_weights=self.weights_N, include_last_offset=True
        )
        pooled_BFD = self._averaged(pooled.view(*self.lengths_FB.shape, self.of.dim).transpose(0, 1))
        return pooled_BFD.reshape(len(pooled_BFD), -1)

    def add_gradient(self, gradient_BD: Tensor, into_RD: Tensor) -> None:
        """In one order: the sum over the samples of a row is the same each time."""
        rows_ND = gradient_BD.reshape(-1, self.of.dim)
        if self.lengths_FB is not None:
            features, samples = self.lengths_FB.shape
            by_feature = self._averaged(gradient_BD.view(samples, features, self.of.dim)).transpose(0, 1)
            bags_N = torch.arange(features * samples, device=into_RD.device).repeat_interleave(
                self.lengths_FB.reshape(-1), output_size=len(self.rows_N)
            )
            rows_ND = by_feature.reshape(-1, self.of.dim).index_select(0, bags_N)
            if self.weights_N is not None:
                rows_ND = rows_ND * self.weights_N[:, None]
        if into_RD.device.type == "cpu":
            into_RD.index_add_(0, self.rows_N, rows_ND)
        else:  # whose index_add_ adds in any order
            into_RD += torch.ops.aten.embedding_dense_backward(rows_ND, self.rows_N, len(into_RD), -1, False)

    def _averaged(self, values_BFD: Tensor) -> Tensor:
        if self.lengths_FB is None or not bool(self.of.averages_F.any()):
            return values_BFD
        averages_F1 = self.of.averages_F.to(self.lengths_FB.device)[:, None]
        return values_BFD / torch.where(averages_F1, self.lengths_FB.clamp(min=1), 1).T[:, :, None]


class ReplicaLookup:
    """The vectors that one batch looked up, and where its gradients go."""

    def __init__(self, replicas: Replicas, bags: list[_Bags]) -> None:
        self._replicas, self._bags = replicas, bags
        found = [own.vectors(own.of.weight(replicas.weights)) for own in bags]
        self._vectors_BD: Tensor | None = found[0] if len(found) == 1 else torch.cat(found, 1)

    def put(self, pooled_BD: Tensor, first_column: int) -> None:
        """Writes the vectors to where they belong in the pooled output, which begins at `first_column`."""
        vectors, self._vectors_BD = self._vectors_BD, None
        assert vectors is not None
        for output, own, width in self._replicas.runs:
            pooled_BD.narrow(1, first_column + output, width).copy_(vectors.narrow(1, own, width))

    def add_gradient(self, gradient_BD: Tensor, first_column: int) -> None:
        """gradient_BD: of the pooled output, which begins at `first_column`."""
        runs = [gradient_BD.narrow(1, first_column + output, width) for output, _, width in self._replicas.runs]
        own_BD = torch.cat(runs, 1).float()
        self._replicas.add(self, [(bags, own_BD[:, bags.of.columns]) for bags in self._bags])


def _runs(order: list[int], own: list[int], features: tuple[TableConfig, ...]) -> Iterator[tuple[int, int, int]]:
    output = column = width = 0
    wanted = set(own)
    for number in order:
        dim = features[number].embedding_dim
        if number in wanted:
            width += dim
        elif width:
            yield output - width, column, width
            column, width = column + width, 0
        output += dim
    if width:
        yield output - width, column, width
