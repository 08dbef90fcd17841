"""The README's three figures, and names of benchmarks' figures in FIGURES.md."""

from __future__ import annotations

from collections.abc import Mapping

REASONS: Mapping[str, tuple[str, str]] = {
    "train-wemb": (
        "2 ranks: over torchrec",
        "- **Faster steps.** Where lookups dominate, models train {:.1f} times as fast as with TorchRec and its own "
        "planner, on two ranks of one host",
    ),
    "loop-drift": (
        "recovered",
        "- **Tables that move.** Once the data have drifted, moving tables wins back {:.0%} of what a plan made for "
        "the new data would win",
    ),
    "planner-quality": (
        "20x8 auto, tables split: excess removed",
        "- **Tables split by columns.** With 20 tables on 8 devices (exchanges modelled) that removes {:.0%} of what "
        "the best heuristic leaves above perfect balance",
    ),
}
"""The README's bullets: a benchmark, its figure, and the sentence around it."""
FOUR_DIGITS = "over_near_optimum"
"""Prefix of figures that are shown with four digits; others have three."""
ROWS: Mapping[str, Mapping[str, str]] = {
    "planner-quality": {
        "all cells: auto / best heuristic": "all tasks: a plan's cost over the best heuristic's",
        "all cells: auto: excess removed": "all tasks: share of the best heuristic's excess over balance removed",
        "20x8 auto: excess removed": "the same, 20 tables on 8 devices (exchange modelled)",
        "20x8 auto, tables split: excess removed": "the same, tables may be split by columns",
        "50x8 auto, tables split: excess removed": "the same, 50 tables, split by columns",
        "100x8 auto, tables split: excess removed": "the same, 100 tables, split by columns",
        "all cells: auto: tasks behind by > 1%": "share of tasks in which a simpler plan costs over 1% less",
    },
    "planner-oracle": {
        "over_near_optimum_20x4": "a plan's cost over the near-optimum, 20 tables on 4 devices",
        "over_near_optimum_50x4": "the same, 50 tables on 4",
        "over_near_optimum_100x8": "the same, 100 tables on 8",
        "over_best_heuristic_20x4": "a plan's cost over the best heuristic's, 20 tables on 4",
        "over_best_heuristic_50x4": "the same, 50 tables on 4",
        "over_best_heuristic_100x8": "the same, 100 tables on 8",
        "split_over_whole_20x8": "plans with tables split by columns over whole tables, 20 tables on 8",
        "split_over_whole_50x8": "the same, 50 tables on 8",
    },
    "loop-drift": {"recovered": "share of the gap between the static and the oracle's plan that is recovered"},
    "loop-straggler": {
        "recovered": "share recovered of what the best plan known recovers",
        "after_it_ended": "speed after the return, over the healthy plan's before",
    },
    "loop-steady": {
        "moves": "moves",
        "overhead": "share of the job's time: planning at the start, profiling, deciding",
        "next_epoch_error": "cost model's error on the next epoch",
    },
    "torchrec-loop": {"of best known": "speed after the moves over that of the best plan known"},
    "train-wemb": {
        "1 rank: over torchrec": "speed over TorchRec's fastest setting, 1 rank",
        "2 ranks: over torchrec": "the same, 2 ranks, TorchRec with its own planner, ours through shared memory",
        "2 ranks: tcp, over torchrec": "the same, ours over TCP as TorchRec",
    },
    "train-wsmall": {
        "1 rank: over torchrec": "speed over TorchRec's fastest setting, 1 rank",
        "2 ranks: over torchrec": "the same, 2 ranks, TorchRec with its own planner, ours through shared memory",
    },
    "own-loop": {
        "W-emb, 2 ranks: step time over the trainer's": "a step over our trainer's, lookups dominate (W-emb)",
        "W-small, 2 ranks: step time over the trainer's": "the same, MLPs dominate (W-small)",
    },
    "splits": {
        "one dominant table of 26, 2 ranks: speed over the best table-wise plan": (
            "one table with half of all lookups, split by columns on 2 ranks: speed over the best table-wise plan"
        ),
        "planning 50 tables x 8 devices, with splits over without": "time to plan with splits over without, 50 x 8",
    },
    "race-simulated": {
        "real noise, abrupt: above the oracle, %": "pooling permuted once: % above the oracle",
        "real noise, hot-ids: above the oracle, %": "other rows become hot: % above the oracle",
        "real noise, straggler: above the oracle, %": "a rank half as fast for a while: % above the oracle",
        "real noise, calm: overhead, %": "nothing changes: % of the time for deciding and timing steps",
    },
    "forecast": {
        "gains off by, %": "gains of random plans over the one before, forecast: off by how many points of the step",
        "z": "the same over what the forecasts' own uncertainty and the intervals' noise allow",
    },
    "gpu-all": {
        "peer.w_emb: over the fastest of them": "speed over TorchRec's fastest setting, lookups dominate (W-emb)",
        "peer.w_small: over the fastest of them": "the same, MLPs dominate (W-small)",
    },
}
