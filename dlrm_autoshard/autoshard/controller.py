"""What resharding does after an interval, on rank 0: learn from it, judge the last move, decide on the next.

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

import numpy as np
from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.decide import History, Horizon, MoveCost, Option, decide, percent
from dlrm_autoshard.autoshard.decision import Decision, Interval, moving
from dlrm_autoshard.autoshard.partial_move import first_part, movable, moving_bytes
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import balance_gain, prediction_error
from dlrm_autoshard.formats.json_file import FormatError, checked, made
from dlrm_autoshard.formats.numbers import Count
from dlrm_autoshard.formats.words import gib, some_of
from dlrm_autoshard.plan import MoveRecord, PlanError, ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.records.move_worth import TimedSteps, worth_of
from dlrm_autoshard.tables import Shard


class ControllerRecord(TypedDict):
    """What `Controller.state_dict` gives."""

    last_step: Annotated[int, Field(ge=-1, lt=2**63)]
    unproven: dict[str, Any] | None
    ranks_changed: NotRequired[bool]
    change_began: NotRequired[Count | None]
    moved_early: NotRequired[bool]
    steps: NotRequired[dict[str, Any] | None]
    before: NotRequired[dict[str, Any] | None]
    after: NotRequired[dict[str, Any] | None]
    history: NotRequired[dict[str, Any]]
    move_cost: NotRequired[dict[str, Any]]
    left: NotRequired[list[dict[str, Any]]]


class Controller:
    def __init__(
        self,
        config: AutoshardConfig,
        planner: Planner,
        task: PlacementTask,
        bytes_of: Mapping[str, int],
        log: DecisionLog,
    ) -> None:
        """task: the tables on these ranks, with what is asked of plans. bytes_of: of each table, which a move carries.
        log: takes each decision's record when it is made, and a move's again when its gain has been measured."""
        self.config, self.planner, self.task, self.bytes_of, self.log = config, planner, task, bytes_of, log
        most_gib = config.reshard.max_move_gib_per_step
        self._most_bytes = None if most_gib is None else int(most_gib * 2**30)  # that may move at a time
        self.history, self.move_cost = History(), MoveCost()
        self.left: list[ShardingPlan] = []  # live ones of before, the newest last: what they cost is known best
        self._pending: Decision | None = None  # not yet carried out
        self._unproven: Decision | None = None  # carried out, gain not yet measured
        self._ranks_changed = False  # since it was
        self._steps: TimedSteps | None = None  # of the live plan, since something else changed last
        self._change_began: int | None = None  # the step after which that was seen, where it was in mid-interval
        self._before: TimedSteps | None = None  # of the plan that the unproven move left, just before it
        self._after: TimedSteps | None = None  # since that move, as far as nothing else changed
        self._last_step = -1  # after which there was a decision
        self._early = False  # whether that was in mid-interval
        self._moved_early = False  # whether the unproven move was

    # -- one interval --------------------------------------------------------------------------------------------------

    def decide(self, interval: Interval, plan: ShardingPlan) -> Decision:
        """`plan` is the live one, under which the interval ran."""
        started = time.perf_counter()
        self._last_step, self._early = interval.step, interval.early
        self.history.intervals += not interval.early
        if self._unproven is not None and self._unproven.new_plan != plan:
            self._unproven = None  # a job that was resumed may have placed its tables anew
        self._keep(interval)
        base = Decision(interval.epoch, interval.step, "kept", throughput_before=interval.throughput)
        if interval.samples < thresholds.LEAST_SAMPLES:
            few = f"too few steps were timed to judge by ({interval.samples}); lower profile.every_steps"
            return self._written(replace(base, why=few))
        horizon = Horizon(
            interval.step_ms, interval.lasting_steps, interval.remaining_steps, self.config.reshard.min_gain
        )
        balance = self._balance(interval)
        error = prediction_error(self.planner.predict(self._task_of(interval), plan), interval.profile.ranks)
        base = replace(base, balance_gain=balance, error_before=error)
        why = self._not_worth_a_look(balance, horizon, whole=not interval.early)
        if why:
            if not interval.early:
                self._judge_last_move(self._task_of(interval), interval)
            return self._written(replace(base, why=why))
        decision = self._looked(base, interval, plan, horizon)
        seconds = time.perf_counter() - started
        assert decision.balance_gain is not None
        self.history.looked(seconds, decision.balance_gain, decision.predicted_gain or 0.0, whole=not interval.early)
        decision = replace(decision, decide_seconds=interval.gather_seconds + seconds)
        if decision.new_plan is None:
            return self._written(decision)
        self._pending = decision
        return decision

    def _not_worth_a_look(self, balance: float, horizon: Horizon, *, whole: bool) -> str:
        """Why nothing is searched for; "" where something may be found, or the last move is to be judged."""
        if horizon.remaining <= 0:
            return "no steps are left"
        if balance < horizon.min_gain:
            return f"even perfect balance would save {percent(balance)}, below min_gain {percent(horizon.min_gain)}"
        seconds = balance * horizon.step_ms / 1000 * horizon.remaining
        if seconds <= thresholds.MOVE_SECONDS:
            return f"at most {seconds:.2g} s to gain in the {horizon.remaining} steps left"
        if (self.history.unjudged and whole) or self.history.worth_looking(balance, horizon):
            return ""
        if balance - self.history.out_of_reach < horizon.min_gain:
            return f"perfect balance would save {percent(balance)}, about what the last search found no plan for"
        took, seconds = self.history.look_seconds, balance * horizon.step_ms / 1000 * horizon.steps
        return f"perfect balance would save {seconds:.2g} s at most, and a search takes {took:.2g} s"

    def _task_of(self, interval: Interval) -> PlacementTask:
        return replace(self.task, stats=interval.profile.stats, batch_size=interval.profile.batch_size)

    def _balance(self, interval: Interval) -> float:
        """Part of the step that perfect balance would save, given what is known of the ranks' speeds."""
        topology = self.task.topology
        slow_W = self.planner.rank_slowness(topology.world_size, topology.speed)
        slowness = [math.inf if w in topology.excluded else float(slow) for w, slow in enumerate(slow_W)]
        one_host = len(topology.ranks_by_host) == 1
        return balance_gain(interval.profile.ranks, interval.step_ms, slowness, exchange=one_host)

    def _looked(self, base: Decision, interval: Interval, plan: ShardingPlan, horizon: Horizon) -> Decision:
        """Learns from the interval, judges the last move, and decides on the next."""
        profile, planner, task = interval.profile, self.planner, self._task_of(interval)
        planner.costs.observe(profile, task.topology)
        error_after = prediction_error(planner.predict(task, plan), profile.ranks)
        balance = self._balance(interval)
        base = replace(base, balance_gain=balance, error_after=error_after)
        self._ranks_changed |= planner.costs.ranks_changed and (self._after is None or self._change_began is None)
        if self._after is None and not self._ranks_changed:  # what came with a move is its own doing
            self._after = interval.timed
        if not interval.early:  # few steps tell little of a move
            self._judge_last_move(task, interval)
        if balance < horizon.min_gain:
            most = f"even perfect balance would save {percent(balance)}"
            return replace(base, why=f"{most}, below min_gain {percent(horizon.min_gain)}")
        seconds = balance * interval.step_ms / 1000 * interval.remaining_steps
        try:
            plans = self._candidates(task, plan, horizon, thresholds.SEARCH_SHARE * seconds)
            options = self.options(task, interval, plan, plans, balance)
        except PlanError as error:  # no reason to stop training under a plan that works
            return replace(base, why=str(error))
        choice = decide(self.history, options, self.move_cost, horizon, interval.moves_since)
        base = replace(base, predicted_gain=choice.best.gain, uncertainty=choice.best.uncertainty, why=choice.why)
        if choice.option is None:
            return base
        decision = self._move(choice.option, base, task, interval, plan, balance)
        if decision.new_plan is not None:
            self._judge_last_move(task, interval)  # its last chance
        return decision

    def _candidates(
        self, task: PlacementTask, plan: ShardingPlan, horizon: Horizon, seconds: float
    ) -> list[ShardingPlan]:
        """Legal plans other than the live one that were not refused lately: where searches end, and those that were
        left."""
        # Of each step that a plan will serve for, what moving a byte takes.
        ms_per_byte = 1000 / self.move_cost.bytes_per_second / max(1, horizon.steps)
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
        self,
        task: PlacementTask,
        interval: Interval,
        plan: ShardingPlan,
        plans: Sequence[ShardingPlan],
        most: float = math.inf,
    ) -> list[Option]:
        """What plans may save of the whole step. most: what perfect balance would: the best of many predictions is one
        that errs to the good."""
        saved_DP = interval.planned_part * self.planner.saved(task, plan, plans)
        saved_DP = saved_DP - np.maximum(0.0, saved_DP.mean(axis=0) - most)
        found = []
        for other, saved_D in zip(plans, saved_DP.T, strict=True):
            bytes_of = moving_bytes(plan, other, self.bytes_of, task.wholes)
            num_bytes = sum(bytes_of.values())
            parts = 1 if self._most_bytes is None else max(1, math.ceil(num_bytes / self._most_bytes))
            found.append(Option(other, saved_D, len(bytes_of), num_bytes, parts))
        return found

    def _move(
        self, whole: Option, base: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan, most: float
    ) -> Decision:
        """To the option, or as much of it as may move at a time: the rest may follow after the next intervals."""
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
            [option] = self.options(task, interval, plan, [part], most)
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

    def moved(self, moves: Sequence[MoveRecord], seconds: float) -> Decision:
        """The last decision has been carried out on all ranks, by these moves."""
        decision, self._pending = self._pending, None
        assert decision is not None and decision.old_plan is not None, "there is no decision to carry out"
        old_plan, decision = decision.old_plan, replace(decision, moves=tuple(moves), move_seconds=seconds)
        self.move_cost = self.move_cost.learned(decision.bytes_moved, seconds)
        self.history.unjudged = True
        if decision.part_of is None:  # a part asks nothing more of the next ones
            self.history.moved(old_plan)
        self.left = [*(plan for plan in self.left if plan != old_plan), old_plan][-thresholds.MEMORY :]
        self._unproven, self._ranks_changed = decision, False
        self._before, self._moved_early = self._steps, self._early
        self._steps = self._after = None
        return self._written(decision)

    def refused(self, why: str) -> Decision:
        """The ranks could not carry the last decision out; the old plan is still the live one."""
        decision, self._pending = self._pending, None
        assert decision is not None and decision.new_plan is not None, "there is no decision to carry out"
        self.history.refused_at[decision.new_plan.fingerprint] = self.history.intervals
        return self._written(replace(decision, action="refused", why=why, new_plan=None, old_plan=None))

    # -- the last move -------------------------------------------------------------------------------------------------

    def _keep(self, interval: Interval) -> None:
        """Adds an interval's timed steps to those of the live plan since something else changed last."""
        steps, began = interval.timed, None
        if interval.changed_steps is not None and not interval.moves_since:
            began = interval.step - interval.changed_steps
        new_change = began is not None and began != self._change_began
        if new_change:
            self.history.out_of_reach = 0.0
        self._change_began = began
        if self._unproven is not None and began is None:
            self._after = steps.after(self._after)
        elif self._after is None:
            self._after = interval.before_change
        alike = self._steps is not None and not new_change and self._steps.alike(steps)
        self._steps = steps.after(self._steps) if alike else steps

    def _judge_last_move(self, task: PlacementTask, interval: Interval) -> None:
        """Completes its record: what the old plan's steps cost before, or would cost now by what was measured (where
        something else has changed since, or only a change's first steps were seen), beside what the new one's cost."""
        move, before, after = self._unproven, self._before, self._after
        if move is None or before is None or after is None:
            return
        self._unproven = None
        assert move.new_plan is not None and move.old_plan is not None and move.predicted_gain is not None
        # A change's first steps are slower than later ones: neither they nor what they foresaw tell of settled steps.
        unsettled = self._moved_early and not interval.early
        predicted, instead = (move.predicted_gain, move.uncertainty or 0.0), None
        if unsettled or self._ranks_changed or not before.alike(after):
            [gain] = self.planner.gains(task, move.new_plan, [move.old_plan])
            instead = 1 - gain.mean, gain.std
        else:
            # Predicted was a part of the step of then, of which what no plan decides may take longer or shorter now.
            then = before.step_ms / max(after.step_ms + predicted[0] * before.step_ms, 1e-9)
            predicted = predicted[0] * then, predicted[1] * then
        if unsettled:
            before, predicted = after, (predicted[0], math.inf)
        worth = worth_of(before, after, predicted=predicted, scatter=thresholds.USUAL_SCATTER, instead=instead)
        saved_ms = worth.saved_ms(interval.step_ms)
        pays_back = not worth.doubt and saved_ms > 0
        self._written(
            replace(
                move,
                measured_gain=worth.gain,
                measured_low=worth.low,
                measured_high=worth.high,
                doubt=worth.doubt or None,
                paid_back_after_steps=round(1000 * move.move_seconds / saved_ms) if pays_back else None,
            )
        )

    def _written(self, decision: Decision) -> Decision:
        self.log.write(decision.to_json())
        return decision

    # -- state ---------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self._last_step,
            "unproven": None if self._unproven is None else self._unproven.state_dict(),
            "ranks_changed": self._ranks_changed,
            "change_began": self._change_began,
            "moved_early": self._moved_early,
            **{key: steps and steps.to_json() for key, steps in self._timed_steps.items()},
            "history": asdict(self.history),
            "move_cost": asdict(self.move_cost),
            "left": [plan.to_json() for plan in self.left],
        }

    @property
    def _timed_steps(self) -> dict[str, TimedSteps | None]:
        return {"steps": self._steps, "before": self._before, "after": self._after}

    def load_state_dict(self, state: Mapping[str, Any], *, same_ranks: bool = True) -> None:
        """Brings the log to what it was then, too: later decisions will be made again. same_ranks: False where the
        state is of another number of ranks, and says nothing about these."""
        record = checked(ControllerRecord, state, extra="ignore")
        unproven = None if record["unproven"] is None else Decision.from_state_dict(record["unproven"])
        if same_ranks:
            self._unproven, self._ranks_changed = unproven, record.get("ranks_changed", False)
            self._change_began, self._moved_early = record.get("change_began"), record.get("moved_early", False)
            self._steps, self._before, self._after = (TimedSteps.from_json(state.get(key)) for key in self._timed_steps)
            self.history = made(History, record.get("history", {}))
            self.move_cost = made(MoveCost, record.get("move_cost", {}))
            self.left = [self._known(ShardingPlan.from_json(plan)) for plan in record.get("left", [])]
        self._last_step = record["last_step"]
        self.log.forget_after(self._last_step)
        if unproven is not None:
            self._written(unproven)

    def _known(self, plan: ShardingPlan) -> ShardingPlan:
        """FormatError where it is of other tables."""
        tables, known = ({Shard.parse(name).table for name in names} for names in (plan.rank_of, self.bytes_of))
        if tables != known:
            raise FormatError(f"a plan is of other tables: {some_of(tables ^ known)}.")
        return plan
