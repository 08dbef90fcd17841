"""The next move, if there is one: candidates from the planner, weighed by the rule, cut to what may move at a time.

    next_move = NextMove(config.reshard, planner, problem, attention)
    choice = next_move.choose(interval, plan, move_cost, past)
    choice.plan, choice.text                # None, "best candidate 1.2% faster, below min_gain 2%"

A gain is a ratio of two predictions, taken of the step that was measured. How sure it is depends on how noisy intervals
are (attention.py) and on how much of the work would change its rank: the model is anchored at the plan that runs, and
what it says of plans that have little in common with that one is worth less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from dlrm_autoshard.autoshard.decision import Interval, Problem
from dlrm_autoshard.autoshard.partial_move import first_part
from dlrm_autoshard.autoshard.payoff import MoveCost, Offer, Terms, Verdict, caution_after, saving, should_reshard
from dlrm_autoshard.autoshard.search_trigger import Attention
from dlrm_autoshard.config import ReshardConfig
from dlrm_autoshard.costs import StepProfile, step_cost_ms
from dlrm_autoshard.plan import PlanError, ShardingPlan, gib, is_legal
from dlrm_autoshard.planner.planner import Planner

UNSURE = 0.07
"""Relative error of a gain's prediction where all work changes its rank; where a part does, that part of it."""


@dataclass
class Past:
    """What the loop remembers of its own deeds; saved in checkpoints. Times are counted in intervals."""

    intervals: int = 0
    moves_at: list[int] = field(default_factory=list)
    left_at: dict[str, int] = field(default_factory=dict)  # plan fingerprint -> when it stopped being the live one
    rolled_back: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Choice:
    """plan: to adopt; None to stay. part_of: the larger move that this is a part of, in words."""

    text: str
    predicted_gain: float | None = None
    plan: ShardingPlan | None = None
    part_of: str | None = None


class NextMove:
    def __init__(self, config: ReshardConfig, planner: Planner, problem: Problem, attention: Attention) -> None:
        self.config, self.planner, self.problem, self.attention = config, planner, problem, attention
        self.target: ShardingPlan | None = None  # of a move that is made in parts, and not yet at its end

    def choose(self, interval: Interval, plan: ShardingPlan, move_cost: MoveCost, past: Past) -> Choice:
        """`plan` is the live one."""
        try:
            candidates = self._candidates(interval.profile, plan)
        except PlanError as error:  # no reason to stop training under a plan that works
            return Choice(str(error))
        best: tuple[Verdict, Offer, ShardingPlan] | None = None
        gain = self.gains(interval, plan)
        for candidate in candidates:
            offer = self._offer(interval, plan, candidate, gain(candidate))
            verdict = should_reshard(offer, self._terms(interval.profile, plan, candidate, past), move_cost)
            if best is None or (verdict.go, verdict.saved_seconds) > (best[0].go, best[0].saved_seconds):
                best = (verdict, offer, candidate)
        if best is None:
            return Choice("no other plan is legal")
        verdict, offer, candidate = best
        if not verdict.go:
            self.target = None
            if not verdict.wait:
                self.attention.found_nothing(verdict.text)
            return Choice(verdict.text, offer.predicted_gain)
        self.attention.found()
        if offer.parts > 1:
            return self._part_of(candidate, offer, interval, plan, gain)
        self.target = None
        return Choice(f"move {verdict.text}", offer.predicted_gain, candidate)

    def gains(self, interval: Interval, plan: ShardingPlan) -> Callable[[ShardingPlan], float]:
        """What each plan is predicted to gain over `plan`, the live one: a ratio of two predictions, anchored at what
        was measured, so that the model's common errors cancel."""
        profile = interval.profile
        cost_ms = self.planner.step_costs(self.problem.task(profile))
        current = cost_ms(plan)

        def gain(candidate: ShardingPlan) -> float:
            if current <= 0:
                return 0.0
            saved = (1 - cost_ms(candidate) / current) * step_cost_ms(profile.ranks)
            # The best of many predictions is one that errs to the good: none is believed beyond perfect balance.
            return min(saved / interval.step_ms, self.attention.room)

        return gain

    def _candidates(self, profile: StepProfile, plan: ShardingPlan) -> list[ShardingPlan]:
        proposals = self.planner.propose(
            self.problem.task(profile), plan, budget_seconds=self.attention.look_seconds / 2
        )
        candidates = [candidate.ordered(list(plan.rank_of)) for candidate, _ in proposals]
        return candidates if self.target in (None, plan) else [*candidates, self.target]

    def _offer(self, interval: Interval, plan: ShardingPlan, candidate: ShardingPlan, gain: float) -> Offer:
        num_bytes, limit = self.problem.bytes_to_move(plan, candidate), self._most_bytes
        return Offer(
            predicted_gain=gain,
            step_ms=interval.step_ms,
            remaining_steps=interval.remaining_steps,
            tables=len(plan.moves_to(candidate)),
            bytes_to_move=num_bytes,
            parts=1 if limit is None else max(1, math.ceil(num_bytes / limit)),
        )

    def _terms(self, profile: StepProfile, plan: ShardingPlan, candidate: ShardingPlan, past: Past) -> Terms:
        name, min_gain = candidate.fingerprint, self.config.min_gain
        left = past.left_at.get(name)
        caution = caution_after(
            min_gain,
            [past.intervals - at for at in past.moves_at],
            None if left is None else past.intervals - left,
            name in past.rolled_back,
        )
        if candidate == self.target:  # decided on before its first part was made
            caution = 0.0
        unsure = UNSURE * share_of_work(profile, [move.table for move in plan.moves_to(candidate)])
        return Terms(min_gain, max(self.attention.gain_noise, unsure), caution)

    def _part_of(
        self,
        target: ShardingPlan,
        offer: Offer,
        interval: Interval,
        plan: ShardingPlan,
        gain: Callable[[ShardingPlan], float],
    ) -> Choice:
        """As much of a larger move as may be made at a time; the rest follows after the next intervals."""
        limit, problem, profile = self._most_bytes, self.problem, interval.profile
        assert limit is not None
        legal = partial(
            is_legal, table_bytes=problem.table_bytes, topology=problem.topology, constraints=problem.constraints
        )
        cost_ms = self.planner.step_costs(problem.task(profile))
        part = first_part(plan, target, problem.bytes_of, limit, cost_ms, legal, problem.constraints)
        whole = f"{offer.tables} tables, {gib(offer.bytes_to_move)}: {saving(offer.predicted_gain)}"
        self.target = target if part.plan is not None else None
        if part.plan is None:
            text = f"it moves {whole}, at most {gib(limit)} may move at a time, and {part.why_not}"
            self.attention.found_nothing(text)
            return Choice(text, offer.predicted_gain)
        return Choice("move", gain(part.plan), part.plan, f"a part of {whole}; at most {gib(limit)} may move at a time")

    @property
    def _most_bytes(self) -> int | None:
        """That may move at a time."""
        limit = self.config.max_move_gib_per_step
        return None if limit is None else int(limit * 2**30)


def share_of_work(profile: StepProfile, tables: Sequence[str]) -> float:
    """Part of all floats looked up that these tables make."""
    work = {t.name: t.embedding_dim * s.mean_pooling for t, s in zip(profile.tables, profile.stats, strict=True)}
    total = sum(work.values())
    return sum(work[table] for table in tables) / total if total > 0 else 0.0
