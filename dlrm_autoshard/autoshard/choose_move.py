"""The next move, if there is one: the planner's candidates, weighed by what they pay, cut to what may move at a time.

    chooser = MoveChooser(config.reshard, planner, bytes_of, trigger)
    decision = chooser.choose(base, task, interval, plan)        # base: says when, and what was measured

A gain is what the planner predicts of the planned stages, with its uncertainty, taken of the step that was measured.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decision import Decision, Interval, Proposal, moving
from dlrm_autoshard.autoshard.move_history import History
from dlrm_autoshard.autoshard.partial_move import first_part, movable
from dlrm_autoshard.autoshard.payoff import MoveCost, reason_to_stay, saved_on_average, seconds_saved
from dlrm_autoshard.autoshard.search_trigger import SearchTrigger
from dlrm_autoshard.config import ReshardConfig
from dlrm_autoshard.formats.json_file import FormatError, made
from dlrm_autoshard.formats.words import gib, some_of
from dlrm_autoshard.plan import PlanError, ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.result import Gain
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import ShardTimer
from dlrm_autoshard.probe.mid_run import dominant_halves, learn_half
from dlrm_autoshard.tables import Shard

LASTING = 1 << 40
"""Steps. A change that has lasted for so many is expected to last to the end."""


class MoveChooser:
    """bytes_of: weight and optimizer state of each table, which a move carries."""

    def __init__(
        self, config: ReshardConfig, planner: Planner, bytes_of: Mapping[str, int], trigger: SearchTrigger
    ) -> None:
        self.config, self.planner, self.bytes_of, self.trigger = config, planner, bytes_of, trigger
        self.move_cost, self.history = MoveCost(), History()
        most_gib = config.max_move_gib_per_step
        self._most_bytes = None if most_gib is None else int(most_gib * 2**30)  # that may move at a time
        self.target: ShardingPlan | None = None  # of a move that is made in parts, and not yet at its end
        self._unmeasurable: set[str] = set()  # shards that a rank had no memory to measure
        self._halved: list[ShardingPlan] = []  # of the shards that no plan balances whole, now
        self.left: list[ShardingPlan] = []  # live ones, the newest last: what they cost is known better than of others

    def moved(self, old_plan: ShardingPlan, num_bytes: int, seconds: float, *, in_parts: bool) -> None:
        """From that plan, which may be the best again when what changed is over."""
        self.move_cost = self.move_cost.learned(num_bytes, seconds)
        self.history.moved(old_plan, in_parts=in_parts)
        self.left = [*(plan for plan in self.left if plan != old_plan), old_plan][-thresholds.MEMORY :]

    def refused(self, plan: ShardingPlan) -> None:
        """Nor is what it is a part of asked for again soon: others may fit."""
        for one in filter(None, (plan, self.target)):
            self.history.refused_at[one.fingerprint] = self.history.intervals
        self.give_up()

    def give_up(self) -> None:
        """The move that is made in parts ends where it is."""
        self.target, self.history.in_parts = None, False

    def learn_halves(
        self, task: PlacementTask, interval: Interval, plan: ShardingPlan, measure_shards: ShardTimer
    ) -> None:
        """Measures half of a shard that no plan balances whole, where knowing it is worth more than that takes. Plans
        with it halved are candidates in any case: searches may end before they come to splits."""
        self._halved = []
        if not task.splits.allowed or self.trigger.balance_gain < self.config.min_gain or interval.remaining_steps <= 0:
            return
        deadline = time.perf_counter() + self.trigger.halves_seconds
        for halved in list(dominant_halves(self.planner, task, plan, deadline)):  # before any is measured
            self._halved.append(halved.plan.ordered(task.names))
            if halved.known or halved.shard in self._unmeasurable:
                continue
            at_once = self.proposals(task, interval, plan, [halved.plan])
            saved = saved_on_average(at_once, interval, self.move_cost, self.config.min_gain)
            if self._saved_once_known(task, interval, plan, halved.plan, halved.half) > saved + halved.seconds:
                if learn_half(self.planner, task, plan, measure_shards, halved):
                    self.trigger.search_anew()
                else:
                    self._unmeasurable.add(halved.shard)

    def choose(self, base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan) -> Decision:
        """`plan` is the live one."""
        try:
            paying, best, why = self._best_first(self._proposed(task, interval, plan), interval)
        except PlanError as error:  # no reason to stop training under a plan that works
            return replace(base, why=str(error))
        base = replace(base, predicted_gain=best.gain, uncertainty=best.uncertainty)
        if not paying or best.plan != self.target:
            self.give_up()
        if not paying:
            settled = replace(interval, changed_steps=None if interval.changed_steps is None else LASTING)
            if self._reason_to_stay(best, settled, cautious=False) is not None:  # else time alone may change it
                self.trigger.found_nothing(why, best.gain)
            return replace(base, why=why)
        self.target = None
        kept = list[Decision]()  # of moves no part of which may be made
        for one in paying:
            decision = self._decision(one, base, task, interval, plan)
            if decision.new_plan is not None:
                self.trigger.search_anew()
                return decision
            kept.append(decision)
        self.trigger.found_nothing(kept[0].why)
        return kept[0]

    def _proposed(self, task: PlacementTask, interval: Interval, plan: ShardingPlan) -> list[Proposal]:
        started = time.perf_counter()
        # Of each step that a plan will serve for, what moving a byte takes.
        ms_per_byte = 1000 / self.move_cost.bytes_per_second / max(1, interval.lasting_steps)
        tasks = [task]
        if self._most_bytes is not None and task.allows(plan):
            in_reach = movable(task, plan, self.bytes_of, self._most_bytes)
            tasks += [] if in_reach is None else [in_reach]
        seconds = self.trigger.search_seconds / 4 / len(tasks)
        candidates = list[ShardingPlan]()
        for one in tasks:
            found = self.planner.propose(one, plan, ms_per_byte, budget_seconds=seconds)
            plans = [candidate.ordered(task.names) for candidate, _ in found]
            candidates += [candidate for candidate in plans if candidate not in candidates]
        for other in filter(None, (self.target, *self._halved, *self.left)):
            if other not in [plan, *candidates] and task.splits_enough(other):
                candidates.append(other)
        proposals = self.proposals(task, interval, plan, [one for one in candidates if self._may_be(task, one)])
        if not proposals:
            raise PlanError("there is no other plan that is legal and was not refused lately")
        self.trigger.searched(time.perf_counter() - started)
        return proposals

    def _best_first(self, proposals: Sequence[Proposal], interval: Interval) -> tuple[list[Proposal], Proposal, str]:
        """The proposals that pay, by what they save, those last of which more of a table moves than may at a time; the
        best of them, or of all; and why that one does not pay."""

        def merit(one: Proposal) -> tuple[bool, float]:
            in_reach = self._most_bytes is None or one.largest <= self._most_bytes
            return in_reach, seconds_saved(one, interval, self.move_cost)

        ordered = sorted(proposals, key=merit, reverse=True)
        reasons = [self._reason_to_stay(one, interval) for one in ordered]
        paying = [one for one, why in zip(ordered, reasons, strict=True) if why is None]
        return paying, (paying or ordered)[0], "" if paying else reasons[0] or ""

    def _saved_once_known(
        self, task: PlacementTask, interval: Interval, plan: ShardingPlan, move: ShardingPlan, measuring: str
    ) -> float:
        """Seconds, on average over draws of what measuring this shard may tell, that the move saves where it pays then.
        What measuring leaves open, it must gain all the same; caution after moves does not count: it will be over, and
        the shard still be known."""
        known_D = self.planner.gain_once_measured(task, plan, move, measuring)
        [now] = self.planner.gains(task, plan, [move])
        left_open = Gain(0.0, math.sqrt(max(0.0, now.std**2 - known_D.var())))
        known = self._proposal(task, interval, plan, move, left_open)
        outcomes = [replace(known, gain=self._of_step(interval, gain)) for gain in known_D.tolist()]
        return saved_on_average(outcomes, interval, self.move_cost, self.config.min_gain)

    def proposals(
        self, task: PlacementTask, interval: Interval, plan: ShardingPlan, candidates: list[ShardingPlan]
    ) -> list[Proposal]:
        gains_of = zip(candidates, self.planner.gains(task, plan, candidates), strict=True)
        return [self._proposal(task, interval, plan, candidate, gain) for candidate, gain in gains_of]

    def _proposal(
        self, task: PlacementTask, interval: Interval, plan: ShardingPlan, candidate: ShardingPlan, gain: Gain
    ) -> Proposal:
        moving_bytes = self._moving(task, plan, candidate)
        num_bytes = sum(moving_bytes.values())
        return Proposal(
            candidate,
            self._of_step(interval, gain.mean),
            max(self.trigger.gain_scatter, interval.planned_part * gain.std),
            len(moving_bytes),
            num_bytes,
            1 if self._most_bytes is None else max(1, math.ceil(num_bytes / self._most_bytes)),
            max(moving_bytes.values(), default=0),
        )

    def _of_step(self, interval: Interval, gain: float) -> float:
        """What is gained of the planned stages, as a part of the whole step. The best of many predictions is one that
        errs to the good, so none is taken to be beyond perfect balance."""
        return min(interval.planned_part * gain, self.trigger.balance_gain)

    def _reason_to_stay(self, proposal: Proposal, interval: Interval, *, cautious: bool = True) -> str | None:
        min_gain, caution = self.config.min_gain, 0.0
        if proposal.plan == self.target:  # was sure enough before its first part was made
            proposal = replace(proposal, uncertainty=0.0)
        elif cautious:
            caution = self.history.caution(min_gain, proposal.plan, interval.moves_since)
        return reason_to_stay(proposal, interval, self.move_cost, min_gain, caution)

    def pays(self, proposal: Proposal, interval: Interval) -> bool:
        """Whatever was moved lately."""
        return self._reason_to_stay(proposal, interval, cautious=False) is None

    def _decision(
        self, whole: Proposal, base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan
    ) -> Decision:
        """To move, as much of it as may be moved at a time: the rest follows after the next intervals."""
        if whole.parts == 1:
            return _moved(base, whole, plan)
        limit = self._most_bytes
        assert limit is not None
        cost_ms, legal = self.planner.step_costs(task), partial(self._may_be, task)
        moving_bytes = self._moving(task, plan, whole.plan)
        part = first_part(plan, whole.plan, moving_bytes, limit, cost_ms, legal, task.constraints)
        said = f"{moving(whole.tables, whole.bytes)}: predicted gain {whole.gain:.1%}"
        if isinstance(part, str):
            return replace(base, why=f"it moves {said}, at most {gib(limit)} may move at a time, and {part}")
        self.target = whole.plan
        [proposal] = self.proposals(task, interval, plan, [part])
        said = f"a part of {said}; at most {gib(limit)} may move at a time"
        return replace(_moved(base, proposal, plan), part_of=said)

    def _may_be(self, task: PlacementTask, plan: ShardingPlan) -> bool:
        """Whether it is legal, and was not refused lately."""
        return not self.history.refused_lately(plan) and task.allows(plan)

    def _moving(self, task: PlacementTask, plan: ShardingPlan, candidate: ShardingPlan) -> dict[str, int]:
        """Bytes that move of each table, all of its parts."""
        tables = {table.name: table for table in task.wholes}
        found: dict[str, int] = {}
        for move in plan.moves_to(candidate):
            shard, whole = move.shard, tables[move.shard.table]
            part = whole.holding(shard)
            share = part.num_embeddings * part.embedding_dim
            moved = -(-self.bytes_of[shard.table] * share // (whole.num_embeddings * whole.embedding_dim))
            found[shard.table] = found.get(shard.table, 0) + moved
        return found

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        target = None if self.target is None else self.target.to_json()
        left = [plan.to_json() for plan in self.left]
        return {"history": asdict(self.history), "move_cost": asdict(self.move_cost), "target": target, "left": left}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """FormatError names the key that is wrong."""
        self.history, self.move_cost = made(History, state["history"]), made(MoveCost, state["move_cost"])
        self.target = None if state["target"] is None else self._known(ShardingPlan.from_json(state["target"]))
        self.left = [self._known(ShardingPlan.from_json(plan)) for plan in state.get("left", [])]

    def _known(self, plan: ShardingPlan) -> ShardingPlan:
        """FormatError where it is of other tables."""
        tables, known = ({Shard.parse(name).table for name in names} for names in (plan.rank_of, self.bytes_of))
        if tables != known:
            raise FormatError(f"a plan is of other tables: {some_of(tables ^ known)}.")
        return plan


def _moved(base: Decision, proposal: Proposal, plan: ShardingPlan) -> Decision:
    return replace(
        base,
        action="moved",
        predicted_gain=proposal.gain,
        uncertainty=proposal.uncertainty,
        new_plan=proposal.plan,
        old_plan=plan,
    )
