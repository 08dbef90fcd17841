"""What resharding decides, on rank 0: after each interval learn from it, judge the last move, decide on the next.

    decision = controller.decide(interval, plan)
    controller.moved(stats.moves, stats.seconds)      # of `reshard` to decision.new_plan; or controller.refused(why)

Knows nothing of ranks that run, so a simulated cluster can stand in for them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import NotRequired, TypedDict

from dlrm_autoshard.autoshard import thresholds
from dlrm_autoshard.autoshard.choose_move import MoveChooser
from dlrm_autoshard.autoshard.decision import Decision, Interval, Shift, seen_of
from dlrm_autoshard.autoshard.search_trigger import SearchTrigger
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import prediction_error, stages_W4, step_cost_ms
from dlrm_autoshard.formats.json_file import checked
from dlrm_autoshard.formats.numbers import Amount, Count
from dlrm_autoshard.plan import MoveRecord, ShardingPlan
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import ShardTimer
from dlrm_autoshard.records.decisions import DecisionLog
from dlrm_autoshard.records.move_worth import TimedSteps, worth_of


class _Trigger(TypedDict):
    gain_differences: list[Amount]


class _Chooser(TypedDict):
    history: dict[str, Any]
    move_cost: dict[str, Any]
    target: dict[str, Any] | None
    left: NotRequired[list[dict[str, Any]]]


class ControllerRecord(TypedDict):
    """What `Controller.state_dict` gives."""

    last_step: Annotated[int, Field(ge=-1, lt=2**63)]
    unproven: dict[str, Any] | None
    ranks_changed: NotRequired[bool]
    change_began: NotRequired[Count | None]
    steps: NotRequired[dict[str, Any] | None]
    before: NotRequired[dict[str, Any] | None]
    after: NotRequired[dict[str, Any] | None]
    trigger: _Trigger
    chooser: _Chooser


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
        self.config, self.planner, self.task, self.log = config, planner, task, log
        self.trigger = SearchTrigger(config.reshard.min_gain, config.budget_seconds)
        self.chooser = MoveChooser(config.reshard, planner, bytes_of, self.trigger)
        self._pending: Decision | None = None  # not yet carried out
        self._unproven: Decision | None = None  # carried out, gain not yet measured
        self._ranks_changed = False  # since it was
        self._steps: TimedSteps | None = None  # of the live plan, since something else changed last
        self._change_began: int | None = None  # the step after which that was seen, where it was in mid-interval
        self._before: TimedSteps | None = None  # of the plan that the unproven move left, just before it
        self._after: TimedSteps | None = None  # since that move, as far as nothing else changed
        self._last_step = -1  # after which there was a decision

    # -- one interval ------------------------------------------------------------------------------------------------

    def decide(self, interval: Interval, plan: ShardingPlan, measure_shards: ShardTimer | None = None) -> Decision:
        """`plan` is the live one, under which the interval ran. measure_shards: these ranks' micro-benchmark, where it
        may be asked."""
        started = time.perf_counter()
        self._last_step = interval.step
        if self._unproven is not None and self._unproven.new_plan != plan:
            self._unproven = None  # a job that was resumed may have placed its tables anew
        self._keep(interval)
        base = Decision(interval.epoch, interval.step, "kept", throughput_before=interval.throughput)
        if interval.samples < thresholds.LEAST_SAMPLES:
            few = f"too few steps were timed to judge by ({interval.samples}); lower profile.every_steps"
            return self._written(replace(base, why=few))
        in_question = self._unproven is not None or self.chooser.target is not None
        unchanged = None if in_question else self.trigger.reason_not_to_look(interval)
        if unchanged is not None:
            self.chooser.history.intervals += 1
            seconds = interval.gather_seconds + time.perf_counter() - started
            return self._written(replace(base, why=unchanged, decide_seconds=seconds))
        profile = interval.profile
        task = replace(self.task, stats=profile.stats, batch_size=profile.batch_size)
        error_before = prediction_error(self.planner.predict(task, plan), profile.ranks)
        self.planner.costs.observe(profile, task.topology)
        learned = self.planner.predict(task, plan)
        error_after = prediction_error(learned, profile.ranks)
        slow_W = self.planner.rank_slowness(task.world_size, task.topology.speed)
        slowness = [math.inf if w in task.topology.excluded else float(slow) for w, slow in enumerate(slow_W)]
        self.trigger.see(interval, slowness, learned, one_host=len(task.topology.ranks_by_host) == 1)
        if not self.trigger.is_as_before:
            self._steps = interval.timed
        base = replace(base, balance_gain=self.trigger.balance_gain, error_before=error_before, error_after=error_after)
        if measure_shards is not None:  # also where a search has settled: it is worth more the longer a change lasts
            self.chooser.learn_halves(task, interval, plan, measure_shards)
        no_search = self.trigger.reason_not_to_search()
        if self._after is None or self._change_began is None:  # else the move is judged by the steps up to the change
            self._ranks_changed |= self.planner.costs.ranks_changed
        if self._after is None and not self._ranks_changed:  # what came with a move is its own doing
            self._after = interval.timed
        mistake = None if interval.early else self._judge_last_move(task, interval)  # few steps tell little of it
        if mistake is not None:
            self.chooser.give_up()
            decision = _taken_back(base, mistake)
        elif no_search is not None:
            decision = replace(base, why=no_search)
        else:
            decision = self.chooser.choose(base, task, interval, plan)
        if decision.new_plan is not None:
            self._judge_last_move(task, interval)  # its last chance
            decision = replace(decision, shift=self._shift(decision, task, interval, plan))
        self.trigger.looked(time.perf_counter() - started)
        decision = replace(decision, decide_seconds=interval.gather_seconds + time.perf_counter() - started)
        self.chooser.history.intervals += 1
        if decision.new_plan is None:
            return self._written(decision)
        self._pending = decision
        return decision

    def _shift(self, move: Decision, task: PlacementTask, interval: Interval, plan: ShardingPlan) -> Shift:
        """What the move from `plan` is expected to change of what is seen of a step."""
        assert move.new_plan is not None
        now, then = (self.planner.predict(task, one) for one in (plan, move.new_plan))
        then_ms = interval.step_ms + step_cost_ms(then) - step_cost_ms(now)
        by_K = seen_of(stages_W4(then), then_ms) - seen_of(stages_W4(now), interval.step_ms)
        return Shift(tuple(by_K.tolist()), self.trigger.gain_scatter if move.uncertainty is None else move.uncertainty)

    def moved(self, moves: Sequence[MoveRecord], seconds: float) -> Decision:
        """The last decision has been carried out on all ranks, by these moves."""
        decision, self._pending = self._pending, None
        assert decision is not None and decision.old_plan is not None, "there is no decision to carry out"
        old_plan, decision = decision.old_plan, replace(decision, moves=tuple(moves), move_seconds=seconds)
        self.chooser.moved(old_plan, decision.bytes_moved, seconds, in_parts=decision.part_of is not None)
        if decision.action == "moved":
            self._unproven, self._ranks_changed, self._before = decision, False, self._steps
        self._steps = self._after = None
        return self._written(decision)

    def refused(self, why: str) -> Decision:
        """The ranks could not carry the last decision out; the old plan is still the live one."""
        decision, self._pending = self._pending, None
        assert decision is not None and decision.new_plan is not None, "there is no decision to carry out"
        self.chooser.refused(decision.new_plan)
        return self._written(replace(decision, action="refused", why=why, new_plan=None, old_plan=None))

    # -- the last move -----------------------------------------------------------------------------------------------

    def _keep(self, interval: Interval) -> None:
        """Adds an interval's timed steps to those of the live plan since something else changed last."""
        steps, began = interval.timed, None
        if interval.changed_steps is not None and not interval.moves_since:
            began = interval.step - interval.changed_steps
        new_change = began is not None and began != self._change_began
        self._change_began = began
        if self._unproven is not None and began is None:
            self._after = steps.after(self._after)
        elif self._after is None:
            self._after = interval.before_change
        self._steps = steps if new_change else steps.after(self._steps)

    def _judge_last_move(self, task: PlacementTask, interval: Interval) -> Decision | None:
        """Completes its record. Returns it where it was a mistake that it pays to take back: where something else has
        changed since, that is no question of the move, and the old plan is a candidate like others."""
        move, before, after = self._unproven, self._before, self._after
        if move is None or before is None or after is None:
            return None
        self._unproven = None
        new_plan, old_plan = move.new_plan, move.old_plan
        assert new_plan is not None and old_plan is not None and move.predicted_gain is not None
        [back] = self.chooser.proposals(task, interval, new_plan, [old_plan])
        instead = None
        if self._ranks_changed or not before.alike(after):
            [gain] = self.planner.gains(task, new_plan, [old_plan])
            instead = 1 - gain.mean, gain.std
        worth = worth_of(
            before,
            after,
            predicted=(move.predicted_gain, move.uncertainty or 0.0),
            scatter=self.trigger.gain_scatter,
            instead=instead,
        )
        saved_ms = worth.saved_ms(interval.step_ms)
        pays_back = not worth.doubt and saved_ms > 0
        move = replace(
            move,
            measured_gain=worth.gain,
            measured_low=worth.low,
            measured_high=worth.high,
            doubt=worth.doubt or None,
            paid_back_after_steps=round(1000 * move.move_seconds / saved_ms) if pays_back else None,
        )
        self._written(move)
        back = replace(back, gain=-saved_ms / interval.step_ms, uncertainty=worth.uncertainty)
        mistake = instead is None and not worth.incomparable and self.chooser.pays(back, interval)
        may_be = task.splits_enough(old_plan) and task.allows(old_plan)
        if not (mistake and self.config.reshard.rollback and may_be):
            return None
        self.chooser.history.rolled_back.append(new_plan.fingerprint)
        return move

    def _written(self, decision: Decision) -> Decision:
        self.log.write(decision.to_json())
        return decision

    # -- state -------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "last_step": self._last_step,
            "unproven": None if self._unproven is None else self._unproven.state_dict(),
            "ranks_changed": self._ranks_changed,
            "change_began": self._change_began,
            **{key: steps and steps.to_json() for key, steps in self._timed_steps.items()},
            "trigger": self.trigger.state_dict(),
            "chooser": self.chooser.state_dict(),
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
            self._change_began = record.get("change_began")
            self._steps, self._before, self._after = (TimedSteps.from_json(state.get(key)) for key in self._timed_steps)
            self.trigger.load_state_dict(record["trigger"])
            self.chooser.load_state_dict(record["chooser"])
        self._last_step = record["last_step"]
        self.log.forget_after(self._last_step)
        if unproven is not None:
            self._written(unproven)


def _taken_back(base: Decision, move: Decision) -> Decision:
    assert move.new_plan is not None and move.old_plan is not None
    return replace(
        base,
        action="rolled_back",
        why=f"it was {move.gains}",
        new_plan=move.old_plan,
        old_plan=move.new_plan,
    )
