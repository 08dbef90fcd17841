"""The loop on rank 0: after each interval of training, learn from it, judge the last move, decide on the next.

    controller = LoopController(config.autoshard, planner, Problem(topology, constraints, ...), write)
    decision = controller.after_interval(interval, plan)
    if decision.new_plan is not None:
        controller.moved(reshard(embeddings, decision.new_plan, ...))     # or controller.refused(why)

    observe -> refine -> was the last move's gain real? -> propose -> decide

Knows nothing of ranks that run: the trainer broadcasts what is decided, and a simulated cluster can stand in for them.
`write` takes each finished decision's record (a line of decisions.jsonl). A move's record is finished one interval
later, when its gain has been measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from dlrm_autoshard.autoshard.choose_move import NextMove, Past
from dlrm_autoshard.autoshard.decision import LEAST_SAMPLES, Decision, Interval, Problem
from dlrm_autoshard.autoshard.payoff import MoveCost, is_worse, measured_gain, moving, saving
from dlrm_autoshard.autoshard.search_trigger import Attention
from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import PLANNED_STAGES, StepProfile
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.planner import Planner

GOOD_ERROR = 0.03
"""Of the cost model: with less there is nothing to refine."""
RANK_CHANGED = 1.25
"""Ratio by which one rank has become slower than another since the last interval: more than any move's fault."""


class LoopController:
    def __init__(
        self,
        config: AutoshardConfig,
        planner: Planner,
        problem: Problem,
        write: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self.config, self.planner, self.problem, self._write = config, planner, problem, write
        self.move_cost = MoveCost()
        self.attention = Attention(config.reshard.min_gain)
        self.next_move = NextMove(config.reshard, planner, problem, self.attention)
        self._past = Past()
        self._deciding: tuple[Decision, ShardingPlan] | None = None  # made, and not yet carried out; with the old plan
        self._unproven: tuple[Decision, ShardingPlan] | None = None  # carried out, gain not yet measured
        self._slowness_before: list[float] | None = None  # of each rank, after the last interval

    # -- one interval ------------------------------------------------------------------------------------------------

    def after_interval(self, interval: Interval, plan: ShardingPlan) -> Decision:
        """`plan` is the live one, under which the interval ran."""
        started = time.perf_counter()
        if interval.samples < LEAST_SAMPLES:
            few = f"kept: only {interval.samples} steps were timed, too few to judge by; lower profile.every_steps"
            decision = Decision(interval.epoch, interval.step, "kept", few, throughput_before=interval.throughput)
            self._write(decision.to_json())
            return decision
        before = self.error(interval.profile)
        self.planner.costs.observe(interval.profile, self.problem.topology)
        self.planner.costs.follow()
        one_host = len(self.problem.topology.ranks_by_host) == 1
        slowness = self._slowness()
        self.attention.see(interval, slowness, one_host=one_host)
        no_look = self.attention.reason_not_to_look()
        if before > GOOD_ERROR and (no_look is None or self._unproven is not None):
            self._refine()
        base = Decision(
            interval.epoch, interval.step, "kept", "", error_before=before, error_after=self.error(interval.profile),
            throughput_before=interval.throughput,
        )  # fmt: skip
        mistake = self._judge_last_move(interval, a_rank_changed(slowness, self._slowness_before))
        self._slowness_before = slowness
        if mistake is not None:
            why, old_plan = mistake
            decision = replace(base, action="rolled_back", text=f"it was {why}", new_plan=old_plan)
        elif no_look is not None:
            decision = replace(base, text=f"kept: {no_look}")
        else:
            decision = self._decide(base, interval, plan)
        decision = replace(decision, decide_seconds=time.perf_counter() - started)
        self._past.intervals += 1
        if decision.new_plan is None:
            self._write(decision.to_json())
        else:
            self._deciding = (decision, plan)
        return decision

    def moved(self, num_bytes: int, seconds: float) -> Decision:
        """The last decision has been carried out on all ranks."""
        decision, old_plan = self._taken()
        assert decision.new_plan is not None
        self.move_cost = self.move_cost.learned(num_bytes, seconds)
        self._past.moves_at.append(self._past.intervals)
        self._past.left_at[old_plan.fingerprint] = self._past.intervals
        moves = len(old_plan.moves_to(decision.new_plan))
        verb = "moved back" if decision.action == "rolled_back" else "moved"
        reason = f"; {decision.text}" if decision.action == "rolled_back" else ""
        gain = f": {saving(decision.predicted_gain)}" if decision.predicted_gain is not None and not reason else ""
        whole = f"; {decision.part_of}" if decision.part_of is not None else ""
        text = f"{verb} {moving(moves, num_bytes, seconds)}{gain}{reason}{whole}"
        decision = replace(decision, text=text, bytes_moved=num_bytes, move_seconds=seconds)
        if decision.action == "moved":
            self._unproven = (decision, old_plan)
        else:
            self.next_move.target = None
            self._write(decision.to_json())
        return decision

    def refused(self, why: str) -> Decision:
        """The ranks could not carry the last decision out; the old plan is still the live one."""
        decision, _ = self._taken()
        assert decision.new_plan is not None
        self._past.rolled_back.append(decision.new_plan.fingerprint)  # asked for again only if it is far better
        self.next_move.target = None
        decision = replace(decision, action="refused", text=f"refused: {why}", new_plan=None)
        self._write(decision.to_json())
        return decision

    def finish(self) -> None:
        """No interval will follow: the last move's gain stays unmeasured."""
        if self._unproven is not None:
            self._write(self._unproven[0].to_json())
            self._unproven = None

    def error(self, profile: StepProfile) -> float:
        """Of the cost model on this profile: sum of |predicted - measured| over sum of measured, all ranks' stages."""
        predicted = self.planner.predict(self.problem.task(profile), profile.plan)
        pairs = [
            (p.stage(s), m.stage(s)) for p, m in zip(predicted, profile.ranks, strict=True) for s in PLANNED_STAGES
        ]
        measured = sum(m for _, m in pairs)
        return sum(abs(p - m) for p, m in pairs) / measured if measured > 0 else 0.0

    # -- the last move -----------------------------------------------------------------------------------------------

    def _judge_last_move(self, interval: Interval, rank_changed: bool) -> tuple[str, ShardingPlan] | None:
        """Completes its record. Where the move was a mistake: its gain in words, and the plan to go back to.
        rank_changed: a rank has become slower or faster meanwhile, which is not the move's fault."""
        if self._unproven is None:
            return None
        (decision, old_plan), self._unproven = self._unproven, None
        noise = self.attention.noise
        assert decision.new_plan is not None and decision.throughput_before is not None
        gain = measured_gain(decision.throughput_before, interval.throughput)
        saved_seconds = gain * interval.profile.batch_size / decision.throughput_before
        worse = is_worse(decision.throughput_before, interval.throughput, noise)
        blamed = worse and not rank_changed and self._old_plan_would_be_faster(interval, old_plan, noise)
        foreseen = saving(decision.predicted_gain or 0.0)
        outcome = saving(decision.predicted_gain or 0.0, gain)
        excuse = "; slower than before, but so would the old plan be now" if worse and not blamed else ""
        self._write(
            replace(
                decision,
                text=decision.text.replace(foreseen, outcome, 1) + excuse,
                measured_gain=gain,
                throughput_after=interval.throughput,
                paid_back_after_steps=round(decision.move_seconds / saved_seconds) if saved_seconds > 0 else None,
            ).to_json()
        )
        lost_seconds = -saved_seconds * interval.remaining_steps
        pays = lost_seconds > self.move_cost.seconds(decision.bytes_moved)
        if not (blamed and pays and self.config.reshard.rollback):
            return None
        self._past.rolled_back.append(decision.new_plan.fingerprint)
        return outcome, old_plan

    def _old_plan_would_be_faster(self, interval: Interval, old_plan: ShardingPlan, noise: float) -> bool:
        """By the cost model, which has learned from both. If not, ranks or data have changed: not the move's fault."""
        profile = interval.profile
        return self.next_move.gains(interval, profile.plan)(old_plan) > -noise

    def _decide(self, base: Decision, interval: Interval, plan: ShardingPlan) -> Decision:
        choice = self.next_move.choose(interval, plan, self.move_cost, self._past)
        decision = replace(base, text=choice.text, predicted_gain=choice.predicted_gain)
        if choice.plan is None:
            return replace(decision, text=f"kept: {choice.text}")
        return replace(decision, action="moved", part_of=choice.part_of, new_plan=choice.plan)

    def _refine(self) -> None:
        """Learns from all that was observed."""
        settings = self.config.refine
        if settings.updates > 0:
            self.planner.costs.refine(
                settings.updates, learning_rate=settings.learning_rate, budget_seconds=self.attention.refine_seconds
            )

    def _slowness(self) -> list[float]:
        topology = self.problem.topology
        return [float(slow) for slow in self.planner.rank_slowness(topology.world_size, topology.speed)]

    # -- state -------------------------------------------------------------------------------------------------------

    def _taken(self) -> tuple[Decision, ShardingPlan]:
        assert self._deciding is not None, "there is no decision to carry out"
        taken, self._deciding = self._deciding, None
        return taken

    def state_dict(self) -> dict[str, Any]:
        unproven, target = self._unproven, self.next_move.target
        return {
            "past": asdict(self._past),
            "move_cost": asdict(self.move_cost),
            "attention": self.attention.state_dict(),
            "target": None if target is None else target.to_json(),
            "unproven": None
            if unproven is None
            else {**vars(unproven[0]), "new_plan": unproven[0].new_plan.to_json(), "old_plan": unproven[1].to_json()},  # type: ignore[union-attr]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._past, self.move_cost = Past(**state["past"]), MoveCost(**state["move_cost"])
        self.attention.load_state_dict(state["attention"])
        self.next_move.target = None if state["target"] is None else ShardingPlan.from_json(state["target"])
        if state["unproven"] is not None:
            record = dict(state["unproven"])
            old_plan = ShardingPlan.from_json(record.pop("old_plan"))
            record["new_plan"] = ShardingPlan.from_json(record["new_plan"])
            self._unproven = (Decision(**record), old_plan)


def a_rank_changed(slowness: Sequence[float], before: Sequence[float] | None) -> bool:
    """Whether one rank has become slower, against the others, than it was before."""
    ratios = [now / then for now, then in zip(slowness, before or slowness, strict=True)]
    return max(ratios) > RANK_CHANGED * min(ratios)
