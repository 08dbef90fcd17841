"""Ids of a batch that are sent to the tables' owners before they are looked up, while another batch is trained.

ahead = IdsAhead(clock)                              # on every rank; one batch at a time is on its way
sent = SentIds(batch, embeddings); ahead.send(sent)
ahead.send_values(); ahead.arrive()                  # in the other batch's backward pass; both may be left out
local = sent.arrived or ahead.bring(sent)            # LocalIds: this rank's tables, the whole global batch
"""

from __future__ import annotations

from contextlib import nullcontext

from dlrm_autoshard.data.batch import Batch
from dlrm_autoshard.distributed.lookup.device_ids import DeviceIdDistribution
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.id_distribution import IdDistribution, LocalIds
from dlrm_autoshard.distributed.stage_clock import StageClock
from dlrm_autoshard.plan import ShardingPlan


class SentIds:
    """Keeps the batch: ids that reached their tables' former owners are sent once more."""

    def __init__(self, batch: Batch, embeddings: ShardedEmbeddings) -> None:
        self.batch, self.embeddings = batch, embeddings
        self._on_the_way: IdDistribution | DeviceIdDistribution | None = None
        self._arrived: LocalIds | None = None
        self._plan: ShardingPlan | None = None

    @property
    def arrived(self) -> LocalIds | None:
        """None where they have not, or tables have moved since."""
        return self._arrived if self._plan is self.embeddings.plan else None

    def start(self) -> None:
        self._plan, self._arrived = self.embeddings.plan, None
        self._on_the_way = self.embeddings.distribute(self.batch)

    def send_values(self) -> None:
        """Once after `start`, where there is something else to do before `finish`."""
        if self._on_the_way is not None:
            self._on_the_way.send_values()

    def finish(self) -> LocalIds:
        """Waits until they are with the owners under the live plan."""
        while self.arrived is None:
            if self._on_the_way is None:
                self.start()
            assert self._on_the_way is not None
            self._arrived, self._on_the_way = self._on_the_way.finish(), None
        assert self._arrived is not None
        return self._arrived


class IdsAhead:
    """What was sent last, until it has arrived. Sampled steps send nothing early: each stage's time is its own."""

    def __init__(self, clock: StageClock) -> None:
        self._clock = clock
        self._travelling: SentIds | None = None

    def send(self, sent: SentIds) -> None:
        self.arrive(timed=False)
        self._travelling = sent
        if not self._clock.sampled:
            sent.start()

    def send_values(self) -> None:
        if self._travelling is not None:
            self._travelling.send_values()

    def arrive(self, *, timed: bool) -> None:
        """timed: as a stage of the training step."""
        if self._travelling is not None:
            self.bring(self._travelling, timed=timed)

    def bring(self, sent: SentIds, *, timed: bool) -> LocalIds:
        """What is on its way, and after it `sent`."""
        if timed:
            self._clock.barrier("input_dist")
        with self._clock.stage("input_dist") if timed else nullcontext():
            if self._travelling is not None:
                self._travelling.finish()
                self._travelling = None
            return sent.finish()
