"""Names of benchmarks' figures in FIGURES.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """A figure of a benchmark. what: it in words."""

    benchmark: str
    figure: str
    what: str
    digits: str = ".3g"


ROWS = (
    Row("race-simulated", "real noise, abrupt: above the oracle, %", "simulated, pooling permuted once"),
    Row("race-simulated", "real noise, hot-ids: above the oracle, %", "the same, other rows become hot"),
    Row("race-simulated", "real noise, straggler: above the oracle, %", "the same, a rank half as fast for a while"),
    Row("race-simulated", "real noise, calm: overhead, %", "deciding and timing steps where nothing changes"),
    Row("loop-bad-start", "of_best_known", "from the worst heuristic's plan: of the best plan known, held-out rounds"),
    Row(
        "loop-drift",
        "recovered",
        "pooling permuted in mid-run: recovered of the gap between static and clairvoyant",
    ),
    Row(
        "loop-straggler",
        "recovered",
        "half of a core taken: recovered of what the best plan known recovers",
    ),
    Row("loop-straggler", "after_it_ended", "after it ends, of the healthy plan's speed"),
    Row("loop-steady", "moves", "moves in 10 epochs where nothing changes"),
    Row(
        "loop-steady",
        "overhead",
        "part of the job's time, start-up planning and profiling included",
    ),
    Row("loop-steady", "next_epoch_error", "cost model's error on the next epoch, median over epochs 3 to 9"),
    Row(
        "loop-split",
        "of_clairvoyant",
        "a table that becomes dominant is split live: of a clairvoyant plan's speed",
    ),
    Row(
        "reshard-speed",
        "share_of_raw_1024_mib",
        "moving 1 GiB between 2 ranks, of gloo's raw bandwidth",
    ),
    Row(
        "checkpoint-speed",
        "write: dcp / ours",
        "writing a checkpoint of 2 GiB on 2 ranks: torch.distributed.checkpoint's seconds over ours",
    ),
    Row("checkpoint-speed", "write: through_page_cache / ours", "the same, ours through the page cache, over ours"),
    Row(
        "checkpoint-speed",
        "read: dcp / ours",
        "reading it again at once, from the page cache, over ours, from the disk",
    ),
    Row("profiler-overhead", "overhead at 2 ranks, percent", "profiling at its defaults on 2 ranks, % of throughput"),
    Row("train-wemb", "1 rank: over torchrec", "lookup-heavy training over torchrec, 1 rank"),
    Row(
        "train-wemb",
        "2 ranks: over torchrec",
        "2 ranks, torchrec with its own planner, ours through shared memory",
    ),
    Row("train-wemb", "2 ranks: tcp, over torchrec", "the same, ours through TCP as torchrec"),
    Row("train-wemb", "2 ranks: share of limit", "share of the kernels' limit on 2 ranks"),
    Row("train-wsmall", "1 rank: over torchrec", "MLP-heavy training over torchrec, 1 rank"),
    Row(
        "train-wsmall",
        "2 ranks: over torchrec",
        "the same on 2 ranks",
    ),
    Row(
        "gpu-all",
        "peer.w_emb: over the fastest of them",
        "lookup-heavy training on one H200, 16,384 samples a step, over the fastest of TorchRec's arms",
    ),
    Row("gpu-all", "peer.w_small: over the fastest of them", "MLP-heavy training there"),
    Row(
        "gpu-all",
        "training.largest_loss_difference",
        "losses of 50 steps on an H200 beside the CPU's, the largest difference",
    ),
    Row(
        "planner-time",
        "dreamshard_times_quicker_50_tables",
        "`fit`, 50 x 4: times quicker than the published code",
    ),
    Row("planner-time", "dreamshard_times_quicker_100_tables", "the same, 100 tables x 4 devices"),
    Row("planner-time", "reference_times_quicker_50_tables", "50 x 4, with as many cost updates as the published code"),
    Row("planner-time", "reference_times_quicker_100_tables", "the same, 100 tables x 4 devices"),
    Row(
        "start-plan",
        "resharding off: cold, s",
        "seconds to plan a job's start on 2 ranks, 50 tables, each measured alone",
    ),
    Row(
        "start-plan",
        "resharding off: warm, s",
        "the same from an earlier job's costs (2.2 while finalists were measured that did not pay)",
    ),
    Row("start-plan", "resharding on: cold, s", "where a first decision comes after 400 steps: nothing measured"),
    Row("planner-quality", "all cells: auto / best heuristic", "plans' cost over the best heuristic's, unseen tables"),
    Row("planner-quality", "all cells: auto: excess removed", "of the best heuristic's excess over perfect balance"),
    Row(
        "planner-quality",
        "20x8 auto: excess removed",
        "20 tables x 8 devices (exchange modelled): of that excess",
    ),
    Row(
        "planner-quality",
        "20x8 auto, tables split: excess removed",
        "the same where tables may be split by columns",
    ),
    Row("planner-quality", "50x8 auto, tables split: excess removed", "the same, 50 tables x 8 devices"),
    Row("planner-quality", "100x8 auto, tables split: excess removed", "the same, 100 tables x 8"),
    Row("planner-quality", "20x8 tasks", "on how many tasks so far, 20 x 8"),
    Row("planner-quality", "50x8 tasks", "the same, 50 x 8"),
    Row("planner-quality", "100x8 tasks", "the same, 100 x 8"),
    Row("planner-oracle", "over_near_optimum_20x4", "plans' cost over the near-optimum, by an oracle, 20 x 4", "#.4g"),
    Row(
        "planner-oracle",
        "over_near_optimum_50x4",
        "the same, 50 tables x 4 devices", "#.4g",
    ),
    Row(
        "planner-oracle",
        "over_near_optimum_100x8",
        "the same, 100 tables x 8", "#.4g",
    ),
    Row("planner-oracle", "over_best_heuristic_20x4", "plans' cost over the best heuristic's, by an oracle, 20 x 4"),
    Row("planner-oracle", "over_best_heuristic_50x4", "the same, 50 tables x 4 devices"),
    Row("planner-oracle", "over_best_heuristic_100x8", "the same, 100 tables x 8"),
    Row("planner-oracle", "split_over_whole_20x8", "where tables may be split by columns, over whole ones, 20 x 8"),
    Row("planner-oracle", "split_over_whole_50x8", "the same, 50 tables x 8 devices"),
    Row("planner-generalization", "fitted on 20x4 / fitted on 100x8, dreamshard", "planning 100 x 8, fitted on 20 x 4"),
    Row(
        "own-loop",
        "W-emb, 2 ranks: step time over the trainer's",
        "a step in a loop of one's own over our trainer's",
    ),
    Row("own-loop", "W-small, 2 ranks: step time over the trainer's", "the same, MLP-heavy"),
    Row("torchrec-loop", "of best known", "TorchRec from its worst plan, moved by Autoshard: of the best plan known"),
    Row(
        "splits",
        "one dominant table of 26, 2 ranks: speed over the best table-wise plan",
        "a table with half of all lookups, split by columns: over the best table-wise plan",
    ),
    Row(
        "splits",
        "DCNv2 on 8 simulated devices: max over mean of lookups",
        "MLPerf's DCNv2, split, on 8 simulated devices: ranks' lookups, max over mean (whole tables: 3.9)",
    ),
    Row("splits", "DCNv2 on 8 simulated devices: step with splits over without", "its step with splits over without"),
    Row("splits", "DCNv2 on 16 simulated devices: max over mean of lookups", "lookups on 16 (whole tables: 7.7)"),
    Row("splits", "DCNv2 on 16 simulated devices: step with splits over without", "its step with splits over without"),
    Row("splits", "planning 50 tables x 8 devices, with splits over without", "what splits take to plan, 50 x 8"),
    Row(
        "kills",
        "survived_bit_equal",
        "kill -9 at random moments: so many ended bit-equal",
    ),
    Row("criteo-preprocessing", "speedup_contiguous", "Criteo text to npy over a pandas script"),
)  # fmt: skip
