"""Learns from an interval, judges the last move and decides on the next, on rank 0.

    decision = controller.decide(interval, plan)
    controller.moved(stats.moves, stats.seconds)      # of `reshard` to decision.new_plan; or controller.refused(why)

Knows nothing of ranks that run, so a simulated cluster can stand in for them. `decide.py` says when a move pays.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decide import History, Horizon, MoveCost, Option, below_min_gain, decide
from dlrm_autoshard.autoshard.decision import Decision, Interval, moving
from dlrm_autoshard.autoshard.last_move import LastMove
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import balance_gain, prediction_error
from dlrm_autoshard.formats.json_file import FormatError, checked, made
from dlrm_autoshard.formats.words import gib, some_of
from dlrm_autoshard.plan import MoveRecord, PlanError, ShardingPlan
from dlrm_autoshard.planner.moves.partial_move import first_part, movable, moving_bytes
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.decisions import DecisionLog


class ControllerRecord(TypedDict):
    """JSON form of the controller's state."""

    last_step: Annotated[int, Field(ge=-1, lt=2**63)]
    last_move: dict[str, Any] | None
    history: NotRequired[dict[str, Any]]
    move_cost: NotRequired[dict[str, Any]]
    left: NotRequired[list[dict[str, Any]]]


class Controller:
    """Decides, on rank 0, whether tables move.

    left: plans that tables have left, newest last; their costs are known best, so they stay candidates.
    """

    def __init__(
        self,
        config: AutoshardConfig,
        planner: Planner,
        task: PlacementTask,
        bytes_of: Mapping[str, int],
        log: DecisionLog,
    ) -> None:
        """task: the tables on these ranks, with constraints. bytes_of: table -> bytes to move. log: gets each
        decision's record when it is made, and a move's again when its gain is measured."""
        self.config, self.planner, self.task, self.bytes_of, self.log = config, planner, task, bytes_of, log
        most_gib = config.reshard.max_move_gib_per_step
        self._most_bytes = None if most_gib is None else int(most_gib * 2**30)  # that may move at a time
        self.history, self.move_cost = History(), MoveCost()
        self.left: list[ShardingPlan] = []
        self._pending: LastMove | None = None  # not yet carried out
        self._last_move: LastMove | None = None  # not yet judged
        self._last_step = -1  # of the last decision

    # -- one interval --------------------------------------------------------------------------------------------------

    def decide(self, interval: Interval, plan: ShardingPlan) -> Decision:
        """Returns the decision on an interval that ran under the live plan `plan`."""
        started, self._last_step = time.perf_counter(), interval.step
        self.history.intervals += not interval.early
        if self._last_move is not None and self._last_move.decision.new_plan != plan:
            self._last_move = None  # a job that was resumed may have placed its tables anew
        base = Decision(interval.epoch, interval.step, "kept", throughput_before=interval.throughput)
        if interval.samples < thresholds.LEAST_SAMPLES:
            few = f"too few steps were timed to judge by ({interval.samples}); lower profile.every_steps"
            return self._written(replace(base, why=few))
        profile = interval.profile
        task = replace(self.task, stats=profile.stats, batch_size=profile.batch_size)
        least, steps = self.config.reshard.min_gain, max(0, interval.remaining_steps)
        when = Horizon(interval.step_ms, steps, least, self.history.must_surely_save(least))
        balance, error = self._balance(interval), prediction_error(self.planner.predict(task, plan), profile.ranks)
        base = replace(base, balance_gain=balance, error_before=error)
        timed = interval.timed
        self.history.changed(timed.lookups, noticed=interval.early)
        why = self.history.why_not_look(balance, when)
        if not why or when.steps == 0:  # whoever resumes the job for more epochs starts from what was measured last
            self.planner.costs.observe(profile, task.topology)
        decision = replace(base, why=why) if why else self._looked(base, task, interval, plan, when)
        if not interval.early or decision.new_plan is not None:  # few steps tell little of a move; or its last chance
            self._judge_last_move(task, interval)
        if why:
            return self._written(decision)
        seconds = time.perf_counter() - started
        balance, gain = decision.balance_gain or 0.0, decision.predicted_gain or 0.0
        self.history.looked(seconds, balance, gain, timed.lookups, early=interval.early)
        decision = replace(decision, decide_seconds=interval.gather_seconds + seconds)
        if decision.new_plan is None:
            return self._written(decision)
        self._pending = LastMove(decision, timed, interval.early)
        return decision

    def _balance(self, interval: Interval) -> float:
        """Returns the part of the step that perfect balance would save, given the known speeds of the ranks."""
        topology = self.task.topology
        slow_W = self.planner.rank_slowness(topology.world_size, topology.speed)
        slowness = [math.inf if w in topology.excluded else float(slow) for w, slow in enumerate(slow_W)]
        one_host = len(topology.ranks_by_host) == 1
        return balance_gain(interval.profile.ranks, interval.step_ms, slowness, exchange=one_host)

    def _looked(
        self, base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan, when: Horizon
    ) -> Decision:
        """Searches with what the interval taught, and decides."""
        balance = self._balance(interval)
        error = prediction_error(self.planner.predict(task, plan), interval.profile.ranks)
        base = replace(base, balance_gain=balance, error_after=error)
        if balance < when.min_gain:
            return replace(base, why=below_min_gain(balance, when))
        try:
            plans = self._candidates(task, plan, when, self.history.search_seconds(balance, when))
            choice = decide(self.options(task, interval, plan, plans), self.move_cost, when)
        except PlanError as refusal:  # no reason to stop training under a plan that works
            return replace(base, why=str(refusal))
        base = replace(base, predicted_gain=choice.best.gain, uncertainty=choice.best.uncertainty, why=choice.why)
        return base if choice.option is None else self._move(choice.option, base, task, interval, plan)

    def _candidates(self, task: PlacementTask, plan: ShardingPlan, when: Horizon, seconds: float) -> list[ShardingPlan]:
        """Returns legal plans other than the live one that were not refused lately: where searches end, and plans
        that were left."""
        # In each step that a plan will serve, the share of that step in moving a byte.
        ms_per_byte = 1000 / self.move_cost.bytes_per_second / max(1, when.steps)
        reachable = task
        if self._most_bytes is not None and task.allows(plan):
            reachable = movable(task, plan, self.bytes_of, self._most_bytes)
        seconds = min(seconds, self.config.budget_seconds)
        found = self.planner.propose(reachable, plan, ms_per_byte, budget_seconds=seconds)
        plans = [candidate.ordered(task.names) for candidate, _ in found]
        plans += [other for other in self.left if task.splits_enough(other)] if self.config.reshard.rollback else []
        different = {one.fingerprint: one for one in plans if one != plan}
        plans = [one for one in different.values() if self._may_be(task, one)]
        if not plans:
            raise PlanError("there is no other plan that is legal and was not refused lately")
        return plans

    def options(
        self, task: PlacementTask, interval: Interval, plan: ShardingPlan, plans: Sequence[ShardingPlan]
    ) -> list[Option]:
        """Returns the fractions of the step that plans may save, and what would travel."""
        saved_DP = interval.planned_part * self.planner.saved(task, plan, plans)
        found = []
        for other, saved_D in zip(plans, saved_DP.T, strict=True):
            bytes_of = moving_bytes(plan, other, self.bytes_of, task.wholes)
            num_bytes = sum(bytes_of.values())
            parts = 1 if self._most_bytes is None else max(1, math.ceil(num_bytes / self._most_bytes))
            found.append(Option(other, saved_D, len(bytes_of), num_bytes, parts))
        return found

    def _move(
        self, whole: Option, base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan
    ) -> Decision:
        """Returns the move to the option, or to its first part that is small enough; others follow after later
        intervals."""
        option, part_of = whole, None
        if whole.parts > 1:
            assert self._most_bytes is not None
            bytes_of = moving_bytes(plan, whole.plan, self.bytes_of, task.wholes)
            legal = partial(self._may_be, task)
            cost_ms = self.planner.step_costs(task)
            part = first_part(plan, whole.plan, bytes_of, self._most_bytes, cost_ms, legal, task.constraints)
            said = f"{moving(whole.tables, whole.bytes)}: predicted gain {whole.gain:.1%}"
            if isinstance(part, str):
                limit = gib(self._most_bytes)
                return replace(base, why=f"it moves {said}, at most {limit} may move at a time, and {part}")
            [option] = self.options(task, interval, plan, [part])
            part_of = f"a part of {said}; at most {gib(self._most_bytes)} may move at a time"
        back = bool(self.left) and option.plan == self.left[-1]
        return replace(
            base,
            action="rolled_back" if back else "moved",
            predicted_gain=option.gain,
            uncertainty=option.uncertainty,
            new_plan=option.plan,
            old_plan=plan,
            part_of=part_of,
        )

    def _may_be(self, task: PlacementTask, plan: ShardingPlan) -> bool:
        return not self.history.refused_lately(plan) and task.allows(plan)

    # -- moves ---------------------------------------------------------------------------------------------------------

    def moved(self, moves: Sequence[MoveRecord], seconds: float) -> Decision:
        """Records that all ranks have carried out the last decision by these moves."""
        made, self._pending = self._pending, None
        assert made is not None and made.decision.old_plan is not None, "there is no decision to carry out"
        old_plan = made.decision.old_plan
        made.decision = replace(made.decision, moves=tuple(moves), move_seconds=seconds)
        if made.decision.part_of is None:  # a part asks nothing more of the next ones
            self.history.moved_at = self.history.intervals
        self.move_cost = self.move_cost.learned(made.decision.bytes_moved, seconds)
        self.left = [*(plan for plan in self.left if plan != old_plan), old_plan][-thresholds.MEMORY :]
        self._last_move = made
        return self._written(made.decision)

    def refused(self, why: str) -> Decision:
        """Records that the ranks could not carry out the last decision; the old plan is still the live one."""
        pending, self._pending = self._pending, None
        assert pending is not None and pending.decision.new_plan is not None, "there is no decision to carry out"
        self.history.refused_at[pending.decision.new_plan.fingerprint] = self.history.intervals
        return self._written(replace(pending.decision, action="refused", why=why, new_plan=None, old_plan=None))

    def _judge_last_move(self, task: PlacementTask, interval: Interval) -> None:
        """Completes the last move's record with its measured gain."""
        last, self._last_move = self._last_move, None
        if last is not None:
            self._written(last.judged(self.planner, task, interval))

    def _written(self, decision: Decision) -> Decision:
        self.log.write(decision.to_json())
        return decision

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns everything that later decisions depend on, as JSON."""
        return {
            "last_step": self._last_step,
            "last_move": self._last_move and self._last_move.to_json(),
            "history": asdict(self.history),
            "move_cost": asdict(self.move_cost),
            "left": [plan.to_json() for plan in self.left],
        }

    def load_state_dict(self, state: Mapping[str, Any], *, same_ranks: bool = True) -> None:
        """Loads a state and drops the log's later decisions, which will be made again. same_ranks: False if the
        state is of another number of ranks, whose measurements say nothing about these."""
        record = checked(ControllerRecord, state, extra="ignore")
        last_move = None if record["last_move"] is None else LastMove.from_json(record["last_move"])
        if same_ranks:
            self._last_move = last_move
            self.history = made(History, record.get("history", {}))
            self.move_cost = made(MoveCost, record.get("move_cost", {}))
            self.left = [self._known(ShardingPlan.from_json(plan)) for plan in record.get("left", [])]
        self._last_step = record["last_step"]
        self.log.forget_after(self._last_step)
        if last_move is not None:
            self._written(last_move.decision)

    def _known(self, plan: ShardingPlan) -> ShardingPlan:
        """Returns the plan; FormatError if it places other tables."""
        tables, known = set(plan.tables), set(self.bytes_of)
        if tables != known:
            raise FormatError(f"a plan is of other tables: {some_of(tables ^ known)}.")
        return plan
