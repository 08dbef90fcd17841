"""The README's three figures, and names of benchmarks' figures in FIGURES.md.

A figure that has a target and is missing here appears under its own name.
"""

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
"""Figures that begin so are shown with four digits; others with three."""
ROWS: Mapping[str, Mapping[str, str]] = {
    "race-simulated": {
        "real noise, abrupt: above the oracle, %": "simulated, pooling permuted once",
        "real noise, hot-ids: above the oracle, %": "the same, other rows become hot",
        "real noise, straggler: above the oracle, %": "the same, a rank half as fast for a while",
        "real noise, calm: overhead, %": "deciding and timing steps where nothing changes",
    },
    "loop-drift": {
        "recovered": "pooling permuted in mid-run: recovered of the gap between static and oracle",
    },
    "loop-straggler": {
        "recovered": "half of a core taken: recovered of what the best plan known recovers",
        "after_it_ended": "after it ends, of the healthy plan's speed",
    },
    "loop-steady": {
        "moves": "moves in 10 epochs where nothing changes",
        "overhead": "part of the job's time, start-up planning and profiling included",
        "next_epoch_error": "cost model's error on the next epoch, median over epochs 3 to 9",
    },
    "train-wemb": {
        "1 rank: over torchrec": "lookup-heavy training over torchrec, 1 rank",
        "2 ranks: over torchrec": "2 ranks, torchrec with its own planner, ours through shared memory",
        "2 ranks: tcp, over torchrec": "the same, ours through TCP as torchrec",
        "2 ranks: share of limit": "share of the kernels' limit on 2 ranks",
    },
    "train-wsmall": {
        "1 rank: over torchrec": "MLP-heavy training over torchrec, 1 rank",
        "2 ranks: over torchrec": "the same on 2 ranks",
    },
    "gpu-all": {
        "peer.w_emb: over the fastest of them": "lookup-heavy training on an H200, over TorchRec's fastest",
        "peer.w_small: over the fastest of them": "MLP-heavy training there",
    },
    "planner-quality": {
        "all cells: auto / best heuristic": "plans' cost over the best heuristic's, unseen tables",
        "all cells: auto: excess removed": "of the best heuristic's excess over perfect balance",
        "20x8 auto: excess removed": "20 tables x 8 devices (exchange modelled): of that excess",
        "20x8 auto, tables split: excess removed": "the same where tables may be split by columns",
        "50x8 auto, tables split: excess removed": "the same, 50 tables x 8 devices",
        "100x8 auto, tables split: excess removed": "the same, 100 tables x 8",
        "20x8 tasks": "on how many tasks so far, 20 x 8",
        "50x8 tasks": "the same, 50 x 8",
        "100x8 tasks": "the same, 100 x 8",
    },
    "planner-oracle": {
        "over_near_optimum_20x4": "plans' cost over the near-optimum, by an oracle, 20 x 4",
        "over_near_optimum_50x4": "the same, 50 tables x 4 devices",
        "over_near_optimum_100x8": "the same, 100 tables x 8",
        "over_best_heuristic_20x4": "plans' cost over the best heuristic's, by an oracle, 20 x 4",
        "over_best_heuristic_50x4": "the same, 50 tables x 4 devices",
        "over_best_heuristic_100x8": "the same, 100 tables x 8",
        "split_over_whole_20x8": "where tables may be split by columns, over whole ones, 20 x 8",
        "split_over_whole_50x8": "the same, 50 tables x 8 devices",
    },
    "own-loop": {
        "W-emb, 2 ranks: step time over the trainer's": "a step in a loop of one's own over our trainer's",
        "W-small, 2 ranks: step time over the trainer's": "the same, MLP-heavy",
    },
    "torchrec-loop": {
        "of best known": "TorchRec from its worst plan, moved by Autoshard: of the best plan known",
    },
    "splits": {
        "one dominant table of 26, 2 ranks: speed over the best table-wise plan": (
            "a table with half of all lookups, split by columns: over the best table-wise plan"
        ),
        "planning 50 tables x 8 devices, with splits over without": "what splits take to plan, 50 x 8",
    },
}
