"""Which tables send each id of a rank's batch once, and the choice of these by exchanging one batch both ways.

dedup = Dedup(features, ["item"], group, device)         # or None: the first batch chooses
asked = dedup.asked(asked, exchange)                     # its bags, each once
choice = choose_dedup(exchange, batch)                   # collective; the same on all ranks
choice.tables                                            # () where once each is not faster
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.data.bags_once import bags_once
from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.data.features import Features, near_to
from dlrm_autoshard.distributed.lookup.exchange import Exchange
from dlrm_autoshard.distributed.lookup.filled_bags import Chunks, FilledBags
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.lookup.sequences import MOST_DIFFERENT, Asked
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import some_of

ROUNDS = 6
"""Exchanges each way, in turns. Once each must be faster in all: with no difference that is so once in 64."""


class Dedup:
    """Sends the ids of `tables` once each, where their features are pooled and the job has several ranks. chosen: the
    tables that are to do so, whatever the number of ranks; None until the first batch has chosen."""

    def __init__(
        self, features: Features, chosen: Collection[str] | None, group: dist.ProcessGroup, device: torch.device
    ) -> None:
        """UserError where there is no such table, or on a GPU."""
        self._all, self._several = features, dist.get_world_size(group) > 1
        names = [table.name for table in features.tables]
        for name in chosen or ():
            if name not in names:
                raise UserError(f"dedup names table '{name}', which the model does not have.{near_to(name, names)}")
        if chosen and device.type != "cpu":
            raise UserError("dedup sends each id once between CPU ranks (run.device: cpu). Leave it out on a GPU.")
        self._chunks: Chunks | None = None  # of the newest exchange
        self.choose(chosen)

    def choose(self, tables: Collection[str] | None) -> None:
        """None: the next batch chooses."""
        self.chosen = None if tables is None else tuple(tables)
        self.tables = self.chosen or () if self._several else ()
        self._features = self._all.pooled_of(self.tables)

    def asked(self, asked: Asked, exchange: Exchange) -> Asked:
        """Returns one rank's batch with each id of these tables once. Collective where it chooses."""
        if self.chosen is None:
            self.choose(choose_dedup(exchange, asked.batch).tables)
        if not self._features:
            return asked
        sent, bags = bags_once(asked.sent, self._features)
        return replace(asked, sent=sent, bags=bags)

    def exchange_of(self, exchange: Exchange, ids: LocalIds, asked: Asked) -> Exchange | FilledBags:
        """Returns what brings one batch's pooled vectors to the ranks that asked, and their gradients back."""
        if asked.bags is None:
            return exchange
        if self._chunks is None or self._chunks.exchange is not exchange:
            self._chunks = Chunks(exchange)
        return FilledBags(self._chunks, ids, asked.sent, asked.bags)


@dataclass(frozen=True)
class DedupChoice:
    """tables: those that send each id once. ms: medians of exchanging a batch, vectors and gradients, with ids as they
    come, and with those of `tried` once each; None where nothing had to be measured."""

    tables: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    ms: tuple[float, float] | None = None

    def __str__(self) -> str:
        """A sentence for people."""
        if self.ms is None:
            return "tables.dedup: auto leaves ids as they come: no table has what it needs."
        came, once = self.ms
        does = "sends each id of a batch once" if self.tables else "leaves ids as they come"
        return (
            f"tables.dedup: auto {does}: an exchange takes {once:.1f} ms with each id once of {some_of(self.tried)}, "
            f"{came:.1f} ms otherwise."
        )


def choose_dedup(exchange: Exchange, batch: Batch) -> DedupChoice:
    """Returns what is faster on this link with this batch, which is as long on every rank; ids as they come where all
    ranks share memory, or on a GPU. Lookups, which once each makes shorter, are not timed. Collective."""
    if exchange.world_size == 1 or exchange.link is not None or exchange.device.type != "cpu":
        return DedupChoice()
    tried = _repeating_tables(exchange, batch)
    if not tried:
        return DedupChoice()
    group, seconds = exchange.id_group, torch.zeros(ROUNDS + 1, 2, dtype=torch.float64)
    ways = [Dedup(exchange.features, tables, group, exchange.device) for tables in ((), tried)]
    local = torch.zeros(exchange.world_size * batch.padded_size, exchange.local_dim)
    for number in range(ROUNDS + 1):
        for way in (0, 1) if number % 2 else (1, 0):
            dist.barrier(group)
            began = time.perf_counter()
            _exchanged(exchange, ways[way], batch, local)
            seconds[number, way] = time.perf_counter() - began
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX, group=group)
    came, once = seconds[1:].T  # the first is to warm up
    faster = bool((once < came).all())
    return DedupChoice(tried if faster else (), tried, (1e3 * float(came.median()), 1e3 * float(once.median())))


def _repeating_tables(exchange: Exchange, batch: Batch) -> tuple[str, ...]:
    """Returns the tables of which no bag has several ids, or weights, and so few ids differ that once each may pay."""
    features, tables = exchange.features, exchange.features.tables
    counts, most = torch.zeros(2, len(tables), dtype=torch.float64), torch.zeros(len(tables))
    by_feature = batch.values_N.split(batch.lengths_TB.sum(1).tolist())
    for feature in features.output_order():
        table, ids = features.table_of[feature], by_feature[feature]
        counts[:, table] += torch.tensor([len(ids), len(ids.unique())])
        longest = 2 if batch.weights_N is not None else int(batch.lengths_TB[feature].max())
        most[table] = most[table].clamp(min=longest)
    dist.all_reduce(counts, group=exchange.id_group)
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=exchange.id_group)
    repeating = (most == 1) & (counts[1] <= MOST_DIFFERENT["network"] * counts[0])
    names = [table.name for table, repeats in zip(tables, repeating.tolist(), strict=True) if repeats]
    return tuple(name for name in names if name not in exchange.replicated)


def _exchanged(exchange: Exchange, dedup: Dedup, batch: Batch, local: Tensor) -> None:
    """Does all that a training step does to exchange a batch's ids, vectors and gradients."""
    asked = dedup.asked(Asked(batch, batch), exchange)
    ids = IdDistribution(exchange, asked.sent).finish()
    own = dedup.exchange_of(exchange, ids, asked)
    pooled_BD = own.in_output_order(own.send_pooled(local).wait())
    own.as_gradient(own.send_gradients(pooled_BD).wait())
