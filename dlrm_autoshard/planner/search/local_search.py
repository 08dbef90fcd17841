"""Local search on the predicted fused cost (NeuroShard's idea; what to split is `splits`' task).

rank_U = search(task, costs)                         # greedy_on_cost, improved
rank_U = improve(task, costs, rank_U, seed=0)        # never worse than what it was given
several = optima(task, costs, rank_U, kicks=20)      # that, and where other kicks led
"""

from __future__ import annotations

import time

import numpy as np

from dlrm_autoshard.planner.costs.cost_model import DIM
from dlrm_autoshard.planner.feasible import feasible
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.moving import Moving
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.planner.task_costs import TaskCosts
from dlrm_autoshard.planner.units import Room

# Axes: U units, W ranks, H hosts, N candidates, K summary columns, 4 stages.

MOST_RANKS = 32
"""Ranks tried as destinations: the least loaded ones. All of them where there are no more."""
MOST_SWAPS = 64
"""Swaps evaluated for one slow rank: those whose costs alone differ by about half of what separates the two ranks. With
1,024, plans end within 0.4% of the same cost (50 x 4 to 1,000 x 128) and take up to twice as long."""


def improve(
    task: PlacementTask,
    costs: TaskCosts,
    rank_U: np.ndarray,
    *,
    kicks: int = 0,
    seed: int = 0,
    deadline: float | None = None,
    most_moves: int | None = None,
) -> np.ndarray:
    """Returns the best of `optima`."""
    best_U, *_ = optima(task, costs, rank_U, kicks=kicks, seed=seed, deadline=deadline, most_moves=most_moves)
    return best_U


def optima(
    task: PlacementTask,
    costs: TaskCosts,
    rank_U: np.ndarray,
    *,
    kicks: int = 0,
    seed: int = 0,
    deadline: float | None = None,
    most_moves: int | None = None,
    moving: Moving | None = None,
) -> list[np.ndarray]:
    """Returns the distinct placements at which local search ends, best first: from a legal placement, then `kicks`
    times from a shaken copy of the best. moving: what counts besides the step, if anything.

    The step is the sum over stages of the slowest rank, and over directions of the slowest host's link, so only such
    ranks are worth relieving. A round takes each of them, evaluates every move of one of its units to another rank and
    the promising swaps, and makes the best. When none helps, units that moved in vain return, if moving counts; then
    random kicks are tried from the best placement so far.
    """
    alone_U = costs.alone_ms()
    best = _Search(task, costs, rank_U, alone_U, moving)
    best.descend(deadline, most_moves)
    found = {best.room.rank_U.tobytes(): best}
    generator = np.random.default_rng(seed)
    for _ in range(kicks):
        if late(deadline):
            break
        other = _Search(task, costs, best.room.rank_U, alone_U, moving)
        other.shake(generator)
        other.descend(deadline)
        found.setdefault(other.room.rank_U.tobytes(), other)
        if other.total_ms < best.total_ms * (1 - 1e-9):
            best = other
    return [one.room.rank_U for one in sorted(found.values(), key=lambda one: (one is not best, one.total_ms))]


def deadline_in(seconds: float | None) -> float | None:
    """Returns the time in so many seconds; None for no limit."""
    return None if seconds is None else time.perf_counter() + seconds


def late(deadline: float | None, needed_seconds: float = 0.0) -> bool:
    """Returns whether less time is left than the next step needs."""
    return deadline is not None and time.perf_counter() + needed_seconds > deadline


def search(
    task: PlacementTask, costs: TaskCosts, *, kicks: int = 20, seed: int = 0, deadline: float | None = None
) -> np.ndarray:
    """Runs the `search` algorithm: greedy on cost, then local search; starts from any feasible plan if greedy finds
    none."""
    start = greedy_on_cost(task, costs)
    return improve(task, costs, start, kicks=kicks, seed=seed, deadline=deadline)


class _Search:
    """A placement with the ms of each rank's stages, and the changes that improve it."""

    def __init__(
        self, task: PlacementTask, costs: TaskCosts, rank_U: np.ndarray, alone_U: np.ndarray, moving: Moving | None
    ) -> None:
        """Starts from a placement. alone_U: `TaskCosts.alone_ms`."""
        self.task, self.costs, self.moving = task, costs, moving
        self.alone_U = alone_U
        self.room = Room(task.units, rank_U)
        if (self.room.free_W < 0).any():
            self.room = Room(task.units, feasible(task))
        self.sums_WK = costs.sums(self.room.rank_U)
        self.ms_W4 = costs.stage_ms(self.sums_WK, np.arange(task.world_size))

    @property
    def step_ms(self) -> float:
        return float(self.costs.total_ms(self.ms_W4, self.sums_WK))

    @property
    def _dims_W(self) -> np.ndarray:
        return self.sums_WK[:, DIM.start]

    @property
    def total_ms(self) -> float:
        """Returns the step's ms including its share of the cost of moving."""
        return self.step_ms + (0.0 if self.moving is None else self.moving.total_ms(self.room.rank_U))

    def descend(self, deadline: float | None, most_moves: int | None = None) -> None:
        for _ in range(most_moves or 20 * len(self.task.units)):
            if late(deadline):
                return
            slow_ranks = dict.fromkeys(
                [*self.ms_W4.argmax(axis=0).tolist(), *self.costs.links.ranks_behind(self._dims_W)]
            )
            if not any(self._relieve(rank) for rank in slow_ranks) and not self._send_home():
                return

    def _relieve(self, source: int) -> bool:
        """Makes the best move or swap of a unit of `source`; returns False if none helps."""
        here = np.flatnonzero(self.room.rank_U == source)
        others = self._destinations(source)
        if len(here) == 0 or len(others) == 0:
            return False
        # A candidate: unit `out` leaves, unit `back` (or none: -1) comes from rank `to`.
        outs = [np.repeat(here, len(others))]
        tos = [np.tile(others, len(here))]
        backs = [np.full(len(here) * len(others), -1)]
        is_other = np.zeros(self.task.world_size, dtype=bool)
        is_other[others] = True
        there = np.flatnonzero(is_other[self.room.rank_U])
        if len(there):
            if (count := len(here) * len(there)) <= MOST_SWAPS:
                pairs = np.arange(count)
            else:
                totals = self.ms_W4.sum(axis=1)
                half_gap = (totals[source] - totals[self.room.rank_U[there]]) / 2
                off = np.abs(self.alone_U[here][:, None] - self.alone_U[there] - half_gap)
                fit = self._fits(source, here[:, None], self.room.rank_U[there], there)
                off[~fit] = np.inf  # else the most promising may all be illegal
                pairs = np.argpartition(off, MOST_SWAPS, axis=None)[:MOST_SWAPS]
            out, back = here[pairs // len(there)], there[pairs % len(there)]
            outs, tos, backs = [*outs, out], [*tos, self.room.rank_U[back]], [*backs, back]
        out, to, back = np.concatenate(outs), np.concatenate(tos), np.concatenate(backs)
        fits = self._fits(source, out, to, back)
        out, to, back = out[fits], to[fits], back[fits]
        if len(out) == 0:
            return False

        summary = self.costs.summary_UK
        change_NK = summary[out] - np.where((back >= 0)[:, None], summary[back], 0)
        source_N4, to_N4, host_NH2, step_N = self._ms_after(source, change_NK, to)
        if self.moving is not None:
            step_N += self.moving.ms(out, to) - self.moving.ms(out, source)
            step_N += np.where(back >= 0, self.moving.ms(back, source) - self.moving.ms(back, to), 0.0)
        # Where several ranks are equally slow, one relief does not show in the step yet: it shows in the squares.
        squares_N = (source_N4**2).sum(axis=1) + (to_N4**2).sum(axis=1) - (self.ms_W4[to] ** 2).sum(axis=1)
        squares_N += (host_NH2**2).sum(axis=(1, 2))
        host_H2 = self.costs.links.ms(self.costs.links.dims(self._dims_W))
        step_now, squares_now = self.step_ms, float((self.ms_W4[source] ** 2).sum() + (host_H2**2).sum())
        small = 1e-6 * step_now
        better = (step_N < step_now - small) | (
            (step_N <= step_now + 1e-3 * small) & (squares_N < squares_now * 0.9999)
        )
        candidates = np.flatnonzero(better)
        order = candidates[np.lexsort((squares_N[candidates], np.round(step_N[candidates] / small)))]
        for i in order:
            if self._apply(source, int(out[i]), int(to[i]), int(back[i])):
                self.ms_W4[source], self.ms_W4[to[i]] = source_N4[i], to_N4[i]
                return True
        return False

    def _send_home(self) -> bool:
        """Returns the unit whose return saves most of the cost of moving, beyond what it adds to steps; False if
        there is none."""
        if self.moving is None:
            return False
        rank_U, home_U = self.room.rank_U, self.moving.home_U
        returns = list[tuple[float, int, int, np.ndarray, np.ndarray]]()
        for source in np.unique(rank_U[rank_U != home_U]).tolist():
            out = np.flatnonzero((rank_U == source) & (home_U != source))
            to, summary_NK = home_U[out], self.costs.summary_UK[out]
            source_N4, to_N4, _, step_N = self._ms_after(source, summary_NK, to)
            saved_N = self.moving.ms(out, source) - self.moving.ms(out, to) - (step_N - self.step_ms)
            best = int(saved_N.argmax())
            returns.append((float(saved_N[best]), source, int(out[best]), source_N4[best], to_N4[best]))
        for ms, source, unit, source_4, to_4 in sorted(returns, key=lambda one: -one[0]):
            home = int(home_U[unit])
            if ms > 1e-6 * self.step_ms and self._apply(source, unit, home, -1):
                self.ms_W4[source], self.ms_W4[home] = source_4, to_4
                return True
        return False

    def _ms_after(
        self, source: int, change_NK: np.ndarray, to: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Returns ms ([N, 4] of `source`, [N, 4] of ranks `to`, [N, H, 2] of hosts' links, [N] of the step) after
        summaries `change_NK` have gone from `source` to `to`."""
        sums_NK = np.concatenate([self.sums_WK[source] - change_NK, self.sums_WK[to] + change_NK])
        ranks_N = np.concatenate([np.full(len(to), source), to])
        source_N4, to_N4 = np.split(self.costs.stage_ms(sums_NK, ranks_N), 2)
        rest_N4 = self._slowest_without(source)[to]
        step_N = np.maximum(np.maximum(source_N4, to_N4), rest_N4).sum(axis=1)
        host_NH2 = self.costs.links.ms_after(self._dims_W, source, to, change_NK[:, DIM.start])
        return source_N4, to_N4, host_NH2, step_N + host_NH2.max(axis=1).sum(axis=1)

    def _destinations(self, source: int) -> np.ndarray:
        others = np.flatnonzero(self.task.units.allowed_UW.any(axis=0) & (np.arange(self.task.world_size) != source))
        if len(others) > MOST_RANKS:
            total = self.ms_W4[others].sum(axis=1)
            others = others[np.argpartition(total, MOST_RANKS)[:MOST_RANKS]]
        return others

    def _fits(self, source: int, out: np.ndarray, to: np.ndarray, back: np.ndarray) -> np.ndarray:
        units, free = self.task.units, self.room.free_W
        back_bytes = np.where(back >= 0, units.bytes_U[back], 0)
        fits: np.ndarray = units.allowed_UW[out, to] & ((back < 0) | units.allowed_UW[back, source])
        fits &= free[to] + back_bytes >= units.bytes_U[out]
        fits &= free[source] + units.bytes_U[out] >= back_bytes
        return fits

    def _slowest_without(self, source: int) -> np.ndarray:
        """Returns [W, 4]: for each rank `to`, the ms of each stage's slowest rank other than `source` and `to`."""
        rest = self.ms_W4.copy()
        rest[source] = 0.0
        slowest = rest.argmax(axis=0)
        without = np.tile(rest.max(axis=0), (len(rest), 1))
        for stage, rank in enumerate(slowest):
            column = rest[:, stage].copy()
            column[rank] = 0.0
            without[rank, stage] = column.max()
        return without

    def _apply(self, source: int, out: int, to: int, back: int) -> bool:
        """Makes the change unless it would put groups together that must stay apart."""
        room = self.room
        room.remove(out)
        if back >= 0:
            room.remove(back)
        legal = bool(room.legal_W(out)[to]) and (back < 0 or bool(room.legal_W(back)[source]))
        room.place(out, to if legal else source)
        if back >= 0:
            room.place(back, source if legal else to)
        if legal:
            change = self.costs.summary_UK[out] - (self.costs.summary_UK[back] if back >= 0 else 0)
            self.sums_WK[source] -= change
            self.sums_WK[to] += change
        return legal

    def shake(self, generator: np.random.Generator) -> None:
        """Moves two or three random units to random legal ranks."""
        for unit in generator.choice(
            len(self.alone_U), size=min(int(generator.integers(2, 4)), len(self.alone_U)), replace=False
        ):
            before = self.room.remove(int(unit))
            legal = np.flatnonzero(self.room.legal_W(int(unit)))
            self.room.place(int(unit), int(generator.choice(legal)) if len(legal) else before)
        self.sums_WK = self.costs.sums(self.room.rank_U)
        self.ms_W4 = self.costs.stage_ms(self.sums_WK, np.arange(self.task.world_size))
