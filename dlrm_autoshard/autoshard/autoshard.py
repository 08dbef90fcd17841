"""Autoshard behind anybody's training loop: plan, profile, learn, decide, move and report, at each call of `step()`.

autoshard = Autoshard(bags, every_steps=500, run_dir="runs/mine")    # on every rank, before the first step
autoshard.step()                                                     # on every rank, after each optimizer step
autoshard.finish()                                                   # writes runs/mine/report.html
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dlrm_autoshard.autoshard.decision import Decision
from dlrm_autoshard.autoshard.initial_plan import Placement, place
from dlrm_autoshard.autoshard.intervals import Ended, Intervals, random_numbers_kept
from dlrm_autoshard.autoshard.table_observer import TableObserver, of_whole_tables
from dlrm_autoshard.config import Config, parse_sections
from dlrm_autoshard.distributed.moves.movable import ArrivedIds, MovableBags
from dlrm_autoshard.distributed.moves.reshard import ReshardRefused
from dlrm_autoshard.distributed.ranks.agreement import agree
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.local_path import checked_path
from dlrm_autoshard.formats.streams import unfailing
from dlrm_autoshard.formats.words import some_of
from dlrm_autoshard.formats.yaml_file import flat
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.plan.replicated import bytes_of_copies, said_of
from dlrm_autoshard.records.folder import REPLACED, RunFolder
from dlrm_autoshard.records.interval import epochs_file
from dlrm_autoshard.records.jsonl import forget_after
from dlrm_autoshard.records.plans import write_replicated
from dlrm_autoshard.report.drawing import last_page
from dlrm_autoshard.tables import TableStats

LOG = logging.getLogger("dlrm_autoshard")


class Autoshard:
    """Plans tables, profiles steps and moves tables in a custom training loop. The first step's ids give the
    statistics for the first plan, to which tables move after that step."""

    def __init__(
        self,
        bags: MovableBags,
        *,
        run_dir: str | Path,
        every_steps: int = 500,
        sample_every: int | None = None,
        total_steps: int | None = None,
        state: Mapping[str, Any] | None = None,
        planned: Placement | None = None,
        quiet: bool = False,
        **settings: Any,
    ) -> None:
        """every_steps: steps between decisions. sample_every: steps between sampled steps, whose stages are timed with
        barriers; None: 20, rising while nothing changes.

        total_steps: of the whole training, within which the first plan and each move must pay for themselves; None: as
        many steps are expected to come as have been done. state: from `state_dict()`, to resume after the next step in
        the same run_dir, with the bags' own state loaded. planned: what the live plan rests on if it was already
        planned by measurements; otherwise a plan is made after the first step. quiet: print no lines on rank 0 (by
        default one at the start and one per decision, by Python's logging if the program shows it, else on stderr).
        settings: other keys of the YAML's `autoshard:` section; with enabled=False it only profiles, and tables stay
        unless a `placement` is given.
        """

        def parsed() -> Config:
            section = {"enabled": True, **settings}
            if isinstance(given := section.get("reshard", {}), dict):
                for key in ("every_steps", "every_epochs"):
                    if key in given:
                        raise UserError(
                            f"reshard.{key} was given: here Autoshard's own `every_steps` says when to decide."
                        )
                section["reshard"] = {**given, "every_steps": every_steps}
            return parse_sections(profile={"every_steps": sample_every}, autoshard=section)

        config = bags.runtime.on_all(parsed)
        own = {"run_dir": str(run_dir), "sample_every": sample_every, "total_steps": total_steps}
        own["state"] = None if state is None else f"of step {state['steps']}"
        facts = dict(flat({"autoshard": config.autoshard.model_dump(mode="json"), "Autoshard's argument": own}))
        agree(bags.runtime, {key.replace("argument.", ""): value for key, value in facts.items()})
        self.settings, self._profile = config.autoshard, config.profile
        self.run_dir, self.steps, self._every = checked_path(Path(run_dir), "run_dir"), 0, every_steps
        self._bags, self._runtime, self._total = bags, bags.runtime, total_steps
        self._observer = TableObserver(bags.sharded)
        self._intervals: Intervals | None = None
        self._state, self._planned, self._quiet = state, planned, quiet
        self._samples = 0  # of one rank's batch
        self._paused = False
        self._step = ExitStack()  # the step that is being timed
        self._decision: Decision | None = None  # after the last one
        bags.on_lookup(self._hear)
        self._runtime.from_rank_0(lambda: self._claim(state))
        self._folder = None if self._runtime.rank else RunFolder(self.run_dir)
        if state is not None:
            self.steps = state["steps"]

    def step(self) -> Decision | None:
        """Counts an optimizer step; call it after each, on every rank. Returns the decision if one was due, in which
        case tables may have moved."""
        self._step.close()
        if self._samples == 0:
            raise UserError("Autoshard.step() was called before the embeddings were looked up in training.")
        self.steps += 1
        self._decision = None
        if self._intervals is None:
            stats = self._first_stats()
            if stats is None:
                return None
            with random_numbers_kept(self._bags.device):
                self._intervals = self._start(stats)
        else:
            self._intervals.after_step(
                (self.steps - 1) // self._every,
                self.steps,
                self._samples,
                self.steps if self._total is None else max(0, self._total - self.steps),
                whole=self.steps % self._every == 0,
                tell=self._tell,
            )
        self._step.enter_context(self._bags.clock.step(sampled=self._intervals.is_sampled(self.steps)))
        return self._decision

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Excludes time between steps that is not training (an evaluation, a checkpoint). May be nested."""
        outer, self._paused = self._paused, True
        started = time.perf_counter()
        try:
            with self._bags.clock.paused():
                yield
        finally:
            self._paused = outer
            if self._intervals is not None and not outer:
                self._intervals.exclude(time.perf_counter() - started)

    def finish(self) -> Path | None:
        """Writes the report of the intervals so far and returns its path on rank 0; None, with a warning, if it
        cannot be drawn."""
        self._step.close()
        if self._runtime.rank or not epochs_file(self.run_dir).exists():
            return None
        from dlrm_autoshard.records.run import RunRecord

        path, sentence = last_page(self.run_dir, RunRecord.read(self.run_dir))
        if path is None:
            LOG.warning("%s", sentence)
        return path

    def state_dict(self) -> dict[str, Any]:
        """Returns all that was learned and decided, as JSON, the same on every rank. Call it at an interval's end or
        before the first step: measurements since the last interval are not included. Collective."""
        if self._intervals is None:
            return dict(self._state or {"steps": 0})
        state = {"steps": self.steps, "plan": self._bags.plan.to_json(), **self._intervals.state_dict()}
        return self._runtime.broadcast(state)

    # -- how -----------------------------------------------------------------------------------------------------------

    def _claim(self, state: Mapping[str, Any] | None) -> None:
        if state is not None:
            forget_after(self.run_dir, state["steps"])
        elif epochs_file(self.run_dir).exists():
            raise UserError(
                f"'{self.run_dir}' has the records of another run: name another run_dir, or move it away; to go on "
                "with that run give its state (`state_dict()`)."
            )
        self.run_dir.mkdir(parents=True, exist_ok=True)

    def _hear(self, ids: ArrivedIds, batch_size: int) -> None:
        self._samples = batch_size
        if self._intervals is None:
            self._observer.observe(ids, batch_size * self._runtime.world_size)
        elif self._bags.clock.sampled:
            self._intervals.observe(ids, batch_size * self._runtime.world_size)

    def _first_stats(self) -> tuple[TableStats, ...] | None:
        """Returns all tables' statistics; None if tables have moved since the lookup. Collective."""
        by_rank = self._runtime.all_gather(self._observer.summary())
        seen = of_whole_tables(by_rank)
        tables = self._bags.sharded.tables
        found = [seen[table.name] for table in tables if table.name in seen]
        return tuple(found) if len(found) == len(tables) else None

    def _start(self, stats: tuple[TableStats, ...]) -> Intervals:
        """Moves tables to the first plan, or to the saved state's if it is for these ranks."""
        bags, runtime, sharded = self._bags, self._runtime, self._bags.sharded
        settings, optimizer = self.settings, sharded.config.optimizer
        stays = not settings.enabled and settings.placement is None
        placement = None if settings.placement else self._planned
        current: ShardingPlan | None = None
        resumed = self._state if self._state and self._state["steps"] else None
        if resumed is not None:
            stats = tuple(TableStats.from_json(record) for record in resumed["stats"])
            current, placement = ShardingPlan.from_json(resumed["plan"]), None
        if stays:
            current = bags.plan
        placement = placement or place(
            settings,
            runtime,
            sharded.tables,
            lambda: stats,
            batch_size=self._samples * runtime.world_size,
            optimizer=optimizer,
            exchange_dtype=bags.exchange_dtype,
            shared_memory=bags.shared_memory,
            steps=self._total,
            interval_steps=self._every,
            current=current,
            stays=stays,
            held_bytes=sum(t.weight_bytes + t.optimizer_bytes(optimizer.name) for t in sharded.local_shards),
            reserved_bytes=bytes_of_copies(sharded.replicated, optimizer.name),
        )
        try:
            bags.move_to(placement.plan)
        except ReshardRefused as refusal:
            if not placement.task.allows(bags.plan):
                raise
            placement = replace(placement, plan=bags.plan)  # no reason to stop training under a plan that works
            if runtime.rank == 0:
                LOG.warning("the first plan is not taken: %s", refusal)
        if runtime.rank == 0:
            placement.save(self.run_dir, self.steps)
            write_replicated(self.run_dir, sharded.replicated)
        places = "; ".join(f"rank {rank}: {some_of(bags.plan.shards_on(rank))}" for rank in range(runtime.world_size))
        self._say(f"{len(bags.tables)} tables on {runtime.world_size} rank(s), run directory {self.run_dir}; {places}")
        if sharded.replicated:
            self._say(said_of([table.name for table in sharded.replicated]))
        intervals = Intervals(
            self.settings, self._profile, runtime, sharded, bags.move_to, bags.clock, placement, self.run_dir
        )
        if resumed is not None:
            intervals.load_state_dict(resumed)
        intervals.begin(self.steps)
        return intervals

    def _tell(self, ended: Ended) -> None:
        self._decision = ended.decision
        if self._folder is not None and self._folder.was_replaced():
            LOG.warning(REPLACED, self.run_dir)
        if ended.decision is not None:
            self._say(f"step {self.steps}  {ended.decision.text}")

    def _say(self, text: str) -> None:
        if self._quiet or self._runtime.rank:
            return
        if LOG.isEnabledFor(logging.INFO) and LOG.hasHandlers():
            LOG.info(text)
        else:
            print(text, file=unfailing(sys.stderr), flush=True)  # standard output is the loop's own
