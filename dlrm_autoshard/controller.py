"""The loop on rank 0: after each interval of training, learn from it, judge the last move, decide on the next.

    controller = LoopController(config.autoshard, planner, Problem(topology, constraints, table_bytes), write)
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
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from dlrm_autoshard.config import AutoshardConfig
from dlrm_autoshard.costs import PLANNED_STAGES, StepProfile, balanced_cost_ms, step_cost_ms
from dlrm_autoshard.plan import Constraints, PlanError, ShardingPlan, Topology
from dlrm_autoshard.planner.planner import Planner
from dlrm_autoshard.reshard_rule import (
    MoveCost,
    Offer,
    Terms,
    Verdict,
    caution_after,
    is_worse,
    measured_gain,
    moving,
    percent,
    saving,
    should_reshard,
)

Action = Literal["kept", "moved", "rolled_back", "refused"]

NOISE_BELIEVED = 0.02
"""Relative difference between two intervals of one plan, until some have been seen."""
CHANGED = 0.04
"""Relative difference of measured costs from which something has changed, where they are not noisier than that."""
GOOD_ERROR = 0.03
"""Of the cost model: with less there is nothing to refine."""
LEAST_SAMPLES = 3
"""Timed steps from which an interval says anything."""
LOOKS = 3
"""Searches in a row that found nothing, before the loop waits for something to change."""
LOOK_SHARE, LOOK_SECONDS = 0.1, (0.1, 2.0)
"""A look (refining and searching) may take this part of what there is to gain, within these bounds; below, none is
taken."""


@dataclass(frozen=True)
class Problem:
    """What plans must respect, and what moves weigh. bytes_of: weight and optimizer state of each table."""

    topology: Topology
    constraints: Constraints
    table_bytes: Mapping[str, int]
    bytes_of: Mapping[str, int]


@dataclass(frozen=True)
class Interval:
    """What was measured over an interval that ends after `step`; throughput over all ranks, in examples/s. samples:
    steps whose stages were timed."""

    epoch: int
    step: int
    profile: StepProfile
    throughput: float
    remaining_steps: int
    samples: int = LEAST_SAMPLES

    @property
    def step_ms(self) -> float:
        return 1000 * self.profile.batch_size / self.throughput


@dataclass(frozen=True)
class Decision:
    """One line of decisions.jsonl; `new_plan` is what the ranks are to adopt, None where they keep theirs.

    decide_seconds: for which training stood still to learn and decide, the move itself apart."""

    epoch: int
    step: int
    action: Action
    text: str
    predicted_gain: float | None = None
    measured_gain: float | None = None
    bytes_moved: int = 0
    move_seconds: float = 0.0
    paid_back_after_steps: int | None = None
    error_before: float | None = None
    error_after: float | None = None
    throughput_before: float | None = None
    throughput_after: float | None = None
    decide_seconds: float = 0.0
    new_plan: ShardingPlan | None = None

    def to_json(self) -> dict[str, Any]:
        record = {name: value for name, value in vars(self).items() if name != "new_plan"}
        return {**record, "plan": None if self.new_plan is None else self.new_plan.fingerprint}


@dataclass
class _Past:
    """What the loop remembers of its own deeds; saved in checkpoints. Times are counted in intervals."""

    intervals: int = 0
    moves_at: list[int] = field(default_factory=list)
    left_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when it stopped being the live one
    rolled_back: list[str] = field(default_factory=list)
    differences: list[float] = field(default_factory=list)  # of throughput between intervals in which nothing changed
    looks: int = 0  # in a row that found nothing


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
        self._past = _Past()
        self._last: Interval | None = None
        self._deciding: tuple[Decision, ShardingPlan] | None = None  # made, and not yet carried out; with the old plan
        self._unproven: tuple[Decision, ShardingPlan] | None = None  # carried out, gain not yet measured
        self._settled: StepProfile | None = None  # what was measured when last a whole look found nothing better
        self._best_then = ""

    # -- one interval ------------------------------------------------------------------------------------------------

    def after_interval(self, interval: Interval, plan: ShardingPlan) -> Decision:
        """`plan` is the live one, under which the interval ran."""
        started = time.perf_counter()
        if interval.samples < LEAST_SAMPLES:
            few = f"kept: only {interval.samples} steps were timed, too few to judge by; lower profile.every_steps"
            decision = Decision(interval.epoch, interval.step, "kept", few, throughput_before=interval.throughput)
            self._write(decision.to_json())
            return decision
        noise = self._noise(interval)
        self.planner.observe(interval.profile)
        before = after = self.error(interval.profile)
        no_look = self._reason_not_to_look(interval)
        if before > GOOD_ERROR and (no_look is None or self._unproven is not None):
            after = self._refine(interval)
        base = Decision(
            interval.epoch, interval.step, "kept", "", error_before=before, error_after=after,
            throughput_before=interval.throughput,
        )  # fmt: skip
        mistake = self._judge_last_move(interval, noise)
        if mistake is not None:
            why, old_plan = mistake
            decision = replace(base, action="rolled_back", text=f"it was {why}", new_plan=old_plan)
        elif no_look is not None:
            decision = replace(base, text=f"kept: {no_look}")
        else:
            uncertain = max(noise, self.error(interval.profile, anchored=True) / 2)
            decision = self._decide(base, interval, plan, uncertain)
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
        text = f"{verb} {moving(moves, num_bytes, seconds)}{gain}{reason}"
        decision = replace(decision, text=text, bytes_moved=num_bytes, move_seconds=seconds)
        if decision.action == "moved":
            self._unproven = (decision, old_plan)
        else:
            self._write(decision.to_json())
        return decision

    def refused(self, why: str) -> Decision:
        """The ranks could not carry the last decision out; the old plan is still the live one."""
        decision, _ = self._taken()
        assert decision.new_plan is not None
        self._past.rolled_back.append(decision.new_plan.fingerprint)  # asked for again only if it is far better
        decision = replace(decision, action="refused", text=f"refused: {why}", new_plan=None)
        self._write(decision.to_json())
        return decision

    def finish(self) -> None:
        """No interval will follow: the last move's gain stays unmeasured."""
        if self._unproven is not None:
            self._write(self._unproven[0].to_json())
            self._unproven = None

    def error(self, profile: StepProfile, *, anchored: bool = False) -> float:
        """Of the cost model on this profile: sum of |predicted - measured| over sum of measured, all ranks' stages.
        anchored: with all predictions stretched alike to the measured sum, as gains are."""
        predicted = self.planner.predict(profile.plan, profile.tables, profile.stats, profile.batch_size)
        pairs = [
            (p.stage(s), m.stage(s)) for p, m in zip(predicted, profile.ranks, strict=True) for s in PLANNED_STAGES
        ]
        expected, measured = sum(p for p, _ in pairs), sum(m for _, m in pairs)
        if expected <= 0 or measured <= 0:
            return 0.0
        stretch = measured / expected if anchored else 1.0
        return sum(abs(stretch * p - m) for p, m in pairs) / measured

    # -- the last move -----------------------------------------------------------------------------------------------

    def _judge_last_move(self, interval: Interval, noise: float) -> tuple[str, ShardingPlan] | None:
        """Completes its record. Where the move was a mistake: its gain in words, and the plan to go back to."""
        if self._unproven is None:
            return None
        (decision, old_plan), self._unproven = self._unproven, None
        assert decision.new_plan is not None and decision.throughput_before is not None
        gain = measured_gain(decision.throughput_before, interval.throughput)
        saved_seconds = gain * interval.profile.batch_size / decision.throughput_before
        worse = is_worse(decision.throughput_before, interval.throughput, noise)
        blamed = worse and self._old_plan_would_be_faster(interval, old_plan, noise)
        foreseen = saving(decision.predicted_gain or 0.0)
        outcome = saving(decision.predicted_gain or 0.0, gain)
        excuse = "; slower than before, but so would the old plan be now" if worse and not blamed else ""
        self._write(
            replace(
                decision,
                text=decision.text.replace(foreseen, outcome) + excuse,
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
        return self._predicted_gain(interval, profile.plan, old_plan) > -noise

    # -- the next move -----------------------------------------------------------------------------------------------

    def _decide(self, base: Decision, interval: Interval, plan: ShardingPlan, noise: float) -> Decision:
        profile = interval.profile
        try:
            proposals = self.planner.propose(
                plan,
                profile.tables,
                profile.stats,
                self.problem.topology,
                batch_size=profile.batch_size,
                table_bytes=self.problem.table_bytes,
                constraints=self.problem.constraints,
                budget_seconds=self._look_seconds(interval) / 2,
            )
        except PlanError as error:  # no reason to stop training under a plan that works
            return replace(base, text=f"kept: {error}")
        best: tuple[Verdict, Offer, ShardingPlan] | None = None
        for candidate, _ in proposals:
            candidate = candidate.ordered(list(plan.rank_of))
            offer = self._offer(interval, plan, candidate)
            verdict = should_reshard(offer, self._terms(candidate, noise), self.move_cost)
            if best is None or (verdict.go, verdict.saved_seconds) > (best[0].go, best[0].saved_seconds):
                best = (verdict, offer, candidate)
        if best is None:
            return replace(base, text="kept: no other plan is legal")
        verdict, offer, candidate = best
        if verdict.go:
            self._settled, self._past.looks = None, 0
            move = f"move {verdict.text}"
            return replace(base, action="moved", text=move, predicted_gain=offer.predicted_gain, new_plan=candidate)
        self._settled, self._best_then = profile, verdict.text
        self._past.looks += 1
        return replace(base, text=f"kept: {verdict.text}", predicted_gain=offer.predicted_gain)

    def _reason_not_to_look(self, interval: Interval) -> str | None:
        """So that a loop with nothing to do costs next to nothing. None: there may be something to find."""
        if interval.remaining_steps <= 0:
            return "no steps are left"
        room, min_gain = _room(interval), self.config.reshard.min_gain
        if room < min_gain:
            return f"even perfect balance would save {percent(room)}, below min_gain {percent(min_gain)}"
        if self._settled is not None and _differ(self._settled, interval.profile):
            self._settled, self._past.looks = None, 0
        if self._past.looks >= LOOKS:
            return f"nothing has changed ({self._best_then})"
        if self._look_seconds(interval) < LOOK_SECONDS[0]:
            return f"at most {_seconds_to_gain(interval):.2g} s to gain in the {interval.remaining_steps} steps left"
        return None

    def _look_seconds(self, interval: Interval) -> float:
        return min(LOOK_SHARE * _seconds_to_gain(interval), LOOK_SECONDS[1])

    def _refine(self, interval: Interval) -> float:
        """Learns from all that was observed; returns the error that is left."""
        settings = self.config.refine
        if settings.updates > 0:
            budget = max(self._look_seconds(interval) / 2, LOOK_SECONDS[0])
            self.planner.refine(settings.updates, learning_rate=settings.learning_rate, budget_seconds=budget)
        return self.error(interval.profile)

    def _offer(self, interval: Interval, plan: ShardingPlan, candidate: ShardingPlan) -> Offer:
        moves = plan.moves_to(candidate)
        return Offer(
            predicted_gain=self._predicted_gain(interval, plan, candidate),
            step_ms=interval.step_ms,
            remaining_steps=interval.remaining_steps,
            tables=len(moves),
            bytes_to_move=sum(self.problem.bytes_of[move.table] for move in moves),
        )

    def _predicted_gain(self, interval: Interval, plan: ShardingPlan, candidate: ShardingPlan) -> float:
        """Ratio of two predictions, anchored at what was measured: the model's common errors cancel."""
        profile = interval.profile

        def cost(placed: ShardingPlan) -> float:
            return step_cost_ms(
                self.planner.predict(placed, profile.tables, profile.stats, profile.batch_size, self.problem.topology)
            )

        current = cost(plan)
        if current <= 0:
            return 0.0
        saved = (1 - cost(candidate) / current) * step_cost_ms(profile.ranks)
        # The best of many predictions is one that errs to the good: none is believed beyond perfect balance.
        return min(saved / interval.step_ms, _room(interval))

    def _terms(self, candidate: ShardingPlan, noise: float) -> Terms:
        past, name, settings = self._past, candidate.fingerprint, self.config.reshard
        left = past.left_at.get(name)
        caution = caution_after(
            settings.min_gain,
            [past.intervals - at for at in past.moves_at],
            None if left is None else past.intervals - left,
            name in past.rolled_back,
        )
        gib = settings.max_move_gib_per_step
        return Terms(settings.min_gain, noise, caution, None if gib is None else int(gib * 2**30))

    # -- state -------------------------------------------------------------------------------------------------------

    def _noise(self, interval: Interval) -> float:
        """Relative difference to be expected between intervals in which nothing changes: the median of those seen."""
        differences, last = self._past.differences, self._last
        if last is not None and not _differ(last.profile, interval.profile):
            differences.append(abs(interval.throughput / last.throughput - 1))
            del differences[:-12]
        self._last = interval
        return max(0.005, sorted(differences)[len(differences) // 2]) if len(differences) > 1 else NOISE_BELIEVED

    def _taken(self) -> tuple[Decision, ShardingPlan]:
        assert self._deciding is not None, "there is no decision to carry out"
        taken, self._deciding = self._deciding, None
        return taken

    def state_dict(self) -> dict[str, Any]:
        unproven = self._unproven
        return {
            "past": asdict(self._past),
            "move_cost": asdict(self.move_cost),
            "unproven": None
            if unproven is None
            else {**vars(unproven[0]), "new_plan": unproven[0].new_plan.to_json(), "old_plan": unproven[1].to_json()},  # type: ignore[union-attr]
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        # What was found in earlier looks is not kept, so the loop looks again.
        self._past, self.move_cost = replace(_Past(**state["past"]), looks=0), MoveCost(**state["move_cost"])
        if state["unproven"] is not None:
            record = dict(state["unproven"])
            old_plan = ShardingPlan.from_json(record.pop("old_plan"))
            record["new_plan"] = ShardingPlan.from_json(record["new_plan"])
            self._unproven = (Decision(**record), old_plan)


def _room(interval: Interval) -> float:
    """Part of the step time that perfect balance would save."""
    ranks = interval.profile.ranks
    return (step_cost_ms(ranks) - balanced_cost_ms(ranks)) / interval.step_ms


def _seconds_to_gain(interval: Interval) -> float:
    return _room(interval) * interval.step_ms / 1000 * interval.remaining_steps


def _differ(one: StepProfile, other: StepProfile) -> bool:
    """Whether the ranks' compute costs have changed: data have drifted, or a rank has become slower or faster."""
    if one.plan != other.plan:
        return True
    total = sum(rank.total_ms for rank in one.ranks)
    changes = [
        abs(a.stage(s) - b.stage(s)) for a, b in zip(one.ranks, other.ranks, strict=True) for s in PLANNED_STAGES
    ]
    return sum(changes) > max(CHANGED, one.noise, other.noise) * total
