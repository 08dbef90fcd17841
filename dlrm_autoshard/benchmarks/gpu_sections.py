"""The sections of `bench gpu-all`: each takes a folder to work in and its seconds, and returns what it found.

    python -m dlrm_autoshard.benchmarks.gpu_sections roofline result.json 45

Figures are numbers, explanations strings; anything else (curves, tables) stays in the section's file.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dlrm_autoshard.report.jsonl import read_jsonl

TRAIN = Path("launch/train.py")
STEPS = 50
POOL = {"rows": (1e3, 1e7), "dims": (4, 256), "pooling": (0.5, 200.0)}
BATCH_SIZES = (65536, 16384)


def doctor(folder: Path, seconds: float) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_autoshard.cli", "doctor", "--json"], capture_output=True, text=True
    )
    return {"exit_status": done.returncode, "report": json.loads(done.stdout)}


def training(folder: Path, seconds: float) -> dict[str, Any]:
    """`debug_cpu` and a scaled `mlperf_dcnv2` on CPU and on the GPU (nccl): losses side by side; then a resumed run."""
    sample = folder / "criteo_sample"
    if not sample.exists():
        command = [sys.executable, "-m", "dlrm_autoshard.cli", "data", "criteo-sample", "--out", str(sample)]
        subprocess.run(command, check=True, capture_output=True)
    found: dict[str, Any] = {}
    worst = 0.0
    small = [f"data.dir={sample}", "data.row_scale=0.001", "train.batch_size=256", "model.dcn_low_rank_dim=64"]
    for config, extra in (("debug_cpu", []), ("mlperf_dcnv2", small)):
        cpu = losses(train(folder, config, "cpu", extra))
        gpu = losses(train(folder, config, "cuda", extra))
        steps = min(len(cpu), len(gpu))
        found[f"{config}_steps"] = steps
        found[f"{config}_loss_difference"] = float(np.abs(np.array(cpu[:steps]) - gpu[:steps]).max())
        worst = max(worst, found[f"{config}_loss_difference"])
    found["largest_loss_difference"] = worst
    whole = losses(train(folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="whole"))
    train(folder, "debug_cpu", "cuda", ["train.max_steps=20"], name="halves")
    second = losses(train(folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="halves", resume=True))
    found["resumed_loss_difference"] = abs(whole[-1] - second[-1])
    return found


def shared_gpu(folder: Path, seconds: float) -> dict[str, Any]:
    """Two ranks on this one GPU over gloo: placements and moves change nothing, also with Adam on the tables."""
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.data.open import open_source
    from dlrm_autoshard.plan import ShardingPlan

    config = load_config(Path("configs/debug_cpu.yaml"))
    names = [table.name for table in open_source(config.data, config.tables).tables]
    seen = []
    for number, ranks in enumerate(([0, 1], [1, 0, 0])):
        plan = ShardingPlan({name: ranks[i % len(ranks)] for i, name in enumerate(names)}, 2)
        plan.save(folder / f"plan_{number}.json")
        placement = [f"autoshard.placement={folder / f'plan_{number}.json'}", "autoshard.enabled=false"]
        seen.append(losses(train(folder, "debug_cpu", "cuda", placement, name=f"shared_{number}", ranks=2)))
    steps = min(len(losses_) for losses_ in seen)
    differing = spawn_moves("adam") + spawn_moves("rowwise_adagrad")
    return {
        "placement_loss_difference": float(np.abs(np.array(seen[0][:steps]) - seen[1][:steps]).max()),
        "moved_tensors_differing": differing,
    }


def uvm(folder: Path, seconds: float) -> dict[str, Any]:
    """Tables in host memory behind a device cache give the losses that tables on the device give."""
    device = losses(train(folder, "debug_cpu", "cuda", [], name="device"))
    cached = losses(train(folder, "debug_cpu", "cuda", ["tables.location=managed_caching"], name="cached"))
    steps = min(len(device), len(cached))
    return {"largest_loss_difference": float(np.abs(np.array(device[:steps]) - cached[:steps]).max())}


def shards(folder: Path, seconds: float) -> dict[str, Any]:
    """Fused shards of 1 to 50 tables, forward and backward, until 2,400 are measured or time is up; a model on them."""
    from dlrm_autoshard.distributed.fingerprint import hardware_fingerprint
    from dlrm_autoshard.distributed.shard_probe import ShardProbe
    from dlrm_autoshard.planner.cost_model import CostModel
    from dlrm_autoshard.planner.replay import ShardSample
    from dlrm_autoshard.planning.pool import synthetic_pool

    device = torch.device("cuda")
    deadline = time.monotonic() + 0.8 * seconds
    pools = {size: synthetic_pool(400, seed=21, batch_size=size, **POOL) for size in BATCH_SIZES}  # type: ignore[arg-type]
    free, _ = torch.cuda.mem_get_info(device)
    probe = ShardProbe(device=device, buffer_gib=0.4 * free / 2**30, repeats=5, seconds_per_shard=0.02)
    generator = np.random.default_rng(22)
    samples: list[ShardSample] = []
    while len(samples) < 2400 and time.monotonic() < deadline:
        size = int(generator.choice(BATCH_SIZES))
        count = int(np.exp(generator.uniform(0, np.log(51))))
        pool = pools[size].chosen(generator.choice(400, count, replace=False).tolist())
        time_ = probe.measure(pool.tables, pool.stats, size)
        samples.append(
            ShardSample(pool.tables, pool.stats, size, time_.fwd_compute_ms, time_.bwd_compute_ms, time_.noise)
        )
    with (folder / "shards.jsonl").open("w") as file:
        file.write(json.dumps({"fingerprint": hardware_fingerprint(device), "pool_seed": 21, "draw_seed": 22}) + "\n")
        for sample in samples:
            names = [int(table.name.removeprefix("t_")) for table in sample.tables]
            row = [sample.batch_size, names, round(sample.fwd_compute_ms, 4), round(sample.bwd_compute_ms, 4)]
            file.write(json.dumps(row) + "\n")
    held_out = samples[::5]
    model = CostModel(0)
    model.fit([sample for i, sample in enumerate(samples) if i % 5], updates=1500, budget_seconds=0.2 * seconds)
    predicted = model.shard_ms(held_out)
    measured = np.array([[sample.fwd_compute_ms, sample.bwd_compute_ms] for sample in held_out])
    error = np.abs(np.array(predicted).sum(1) / measured.sum(1) - 1)
    (folder / "cost_model.json").write_text(json.dumps(model.to_json()))
    return {"measured": len(samples), "held_out": len(held_out), "held_out_error": float(error.mean())}


def planning(folder: Path, seconds: float) -> dict[str, Any]:
    """The paper's setting on measured computation: tasks of 20 to 100 tables on 4 devices, every algorithm."""
    from dlrm_autoshard.benchmarks.planner_quality import BATCH_SIZE as QUALITY_BATCH
    from dlrm_autoshard.costs import step_cost_ms
    from dlrm_autoshard.distributed.probe import IsolatedProbe
    from dlrm_autoshard.distributed.shard_probe import ShardProbe
    from dlrm_autoshard.plan import Topology
    from dlrm_autoshard.planner.cost_model import CostModel
    from dlrm_autoshard.planner.greedy import HEURISTICS
    from dlrm_autoshard.planner.planner import ALGORITHMS, Planner
    from dlrm_autoshard.planning.pool import synthetic_pool

    batch_size = max(QUALITY_BATCH, BATCH_SIZES[0])
    pool = synthetic_pool(400, seed=31, batch_size=batch_size, rows=(1e3, 1e6), dims=(16, 16), pooling=(1.0, 60.0))
    saved = folder / "cost_model.json"
    deadline = time.monotonic() + seconds
    probe = ShardProbe(device=torch.device("cuda"), buffer_gib=8.0, seconds_per_shard=0.02)
    learned = [name for name in ("dreamshard", "search", "auto") if name in ALGORITHMS]
    costs: dict[str, dict[str, list[float]]] = {}
    generator = np.random.default_rng(32)
    for repeat in range(20):
        for count in (20, 40, 60, 80, 100):
            if time.monotonic() > deadline:
                break
            task = pool.chosen(sorted(generator.choice(400, count, replace=False).tolist()))
            for name in (*HEURISTICS, *learned):
                model = CostModel(0)
                if saved.exists():
                    model.load_json(json.loads(saved.read_text()))
                planner = Planner(name, seed=repeat, cost_model=model)
                isolated = IsolatedProbe(task.tables, task.stats, batch_size, probe, planner.law)
                measure = isolated.measure if name == "auto" else None
                plan = planner.plan(task.tables, task.stats, Topology(4), batch_size=batch_size, measure=measure).plan
                judge = IsolatedProbe(task.tables, task.stats, batch_size, probe, planner.law)
                [profile] = judge.measure([plan])
                costs.setdefault(str(count), {}).setdefault(name, []).append(step_cost_ms(profile.ranks))
    found: dict[str, Any] = {"costs_ms": costs}
    for size, by_name in costs.items():
        best = min(
            (name for name in by_name if name in HEURISTICS and name != "random"), key=lambda n: mean(by_name[n])
        )
        found[f"{size}_tables_tasks"] = len(by_name[best])
        for name, values in by_name.items():
            found[f"{size}_tables_{name}_speedup_over_random"] = mean(by_name["random"]) / mean(values)
        for name in learned:
            found[f"{size}_tables_{name}_v_best_heuristic"] = mean(by_name[best]) / mean(by_name[name])
    return found


def roofline(folder: Path, seconds: float) -> dict[str, Any]:
    """Bytes that a fused lookup must move, over the time they take at the measured copy bandwidth."""
    from dlrm_autoshard.distributed.shard_probe import ShardProbe
    from dlrm_autoshard.planning.pool import synthetic_pool

    device = torch.device("cuda")
    block = torch.empty(1 << 28, device=device)  # 1 GiB
    other = torch.empty_like(block)
    copies = []
    for _ in range(10):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        other.copy_(block)
        end.record()
        end.synchronize()
        copies.append(start.elapsed_time(end))
    bandwidth = 2 * block.nbytes / (1e-3 * float(np.median(copies)))
    del block, other
    batch_size = BATCH_SIZES[0]
    pool = synthetic_pool(26, seed=41, batch_size=batch_size, rows=(1e5, 1e6), dims=(128, 128), pooling=(5.0, 40.0))
    measured = ShardProbe(device=device, buffer_gib=30.0, repeats=10).measure(pool.tables, pool.stats, batch_size)
    ids = sum(stat.mean_pooling * batch_size for stat in pool.stats)
    unique = sum(stat.mean_pooling * batch_size / stat.mean_reuse for stat in pool.stats)
    row, output = 4 * 128, 4 * 128 * batch_size * len(pool.tables)
    forward = {"every use": ids * row + 4 * ids + output, "once per row": unique * row + 4 * ids + output}
    found: dict[str, Any] = {"copy_bandwidth_gb_s": bandwidth / 1e9, "forward_ms": measured.fwd_compute_ms}
    for name, size in forward.items():
        share = size / bandwidth / (1e-3 * measured.fwd_compute_ms)
        found[f"forward_share_reading_{name.replace(' ', '_')}"] = share
    found["backward_ms"] = measured.bwd_compute_ms
    return found


def synchronisation(folder: Path, seconds: float) -> dict[str, Any]:
    """A trace of plain (not sampled) steps holds no call that waits for the GPU."""
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.distributed.runtime import Runtime
    from dlrm_autoshard.trainer import Trainer

    overrides = ["run.device=cuda", "profile.enabled=false", "checkpoint.enabled=false", "train.log_every_steps=1000"]
    config = load_config(Path("configs/debug_cpu.yaml"), [*overrides, f"run.dir={folder}"])
    names: list[str] = []
    with Runtime.start(config.run) as runtime:
        trainer = Trainer(config, runtime, folder)
        with trainer._loader("train", 0, 0) as loader:
            trainer.step.begin_epoch(iter(loader))
            for _ in range(5):
                trainer.step.run(1.0, config.tables.optimizer.lr)
            torch.cuda.synchronize()
            with torch.profiler.profile() as profiler:
                for _ in range(5):
                    trainer.step.run(1.0, config.tables.optimizer.lr)
            names = [event.key for event in profiler.key_averages() if "Synchronize" in event.key]
    waiting = [name for name in names if "Device" not in name]  # the profiler's own, when it stops
    return {"calls_in_plain_steps": len(waiting), "which": ", ".join(waiting) or "none"}


# ---------------------------------------------------------------------------------------------------------------------


def train(
    folder: Path,
    config: str,
    device: str,
    extra: list[str],
    *,
    name: str = "",
    ranks: int = 1,
    resume: bool = False,
) -> Path:
    """Runs launch/train.py for up to STEPS steps, every loss logged; returns the run directory."""
    name = name or f"{config}_{device}"
    start = (
        [sys.executable] if ranks == 1 else [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}"]
    )
    settings = [
        f"run.device={device}",
        f"run.dir={folder}",
        f"run.name={name}",
        "train.log_every_steps=1",
        f"train.max_steps={STEPS}",
        *extra,
    ]
    command = [*start, str(TRAIN), "--config", f"configs/{config}.yaml", *(["--resume"] if resume else []), *settings]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return folder / name


def losses(run_dir: Path) -> list[float]:
    lines = read_jsonl(run_dir / "metrics.jsonl")
    return [line["logloss"] for line in lines if line["split"] == "train" and "logloss" in line]


def spawn_moves(optimizer: str) -> int:
    """Tensors (weights and optimizer state) that differ between a run with moves and one without, over two ranks."""
    from dlrm_autoshard.distributed.spawn import run_ranks

    return sum(run_ranks(moved_and_unmoved, 2, optimizer, timeout=60))


def moved_and_unmoved(rank: int, world_size: int, optimizer: str) -> int:
    """Six updates twice, once with a move after the third: how many of this rank's tensors differ in any bit."""
    import torch.distributed as dist

    from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
    from dlrm_autoshard.distributed.embeddings import ShardedEmbeddings
    from dlrm_autoshard.distributed.id_distribution import LocalIds
    from dlrm_autoshard.distributed.reshard import reshard
    from dlrm_autoshard.plan import ShardingPlan
    from dlrm_autoshard.tables import TableConfig

    device = torch.device("cuda")
    tables = [TableConfig("a", 1000, 16), TableConfig("b", 500, 16), TableConfig("c", 70, 16)]
    first = ShardingPlan({"a": 0, "b": 1, "c": 0}, world_size)
    second = ShardingPlan({"a": 1, "b": 0, "c": 0}, world_size)
    group = dist.group.WORLD
    assert group is not None
    results = []
    for moves in (False, True):
        embeddings = ShardedEmbeddings(
            tables, second if not moves else first, TablesConfig(optimizer=TableOptimizerConfig(name=optimizer)),  # type: ignore[arg-type]
            rank=rank, group=group, id_group=group, device=device,
        )  # fmt: skip
        for step in range(6):
            if moves and step == 3:
                reshard(embeddings, second, group=group)
            owned = [t for t in embeddings.output_tables if embeddings.plan.rank_of[t.name] == rank]
            ids = [
                torch.randint(0, t.num_embeddings, (64,), generator=torch.Generator().manual_seed(step)) for t in owned
            ]
            offsets = torch.arange(0, 64 * len(owned) + 1, 2)
            if not owned:
                continue
            local = embeddings.lookup(LocalIds(torch.cat(ids).to(device), offsets.to(device), 32 // world_size))
            embeddings.update(local, torch.sin(local.detach()))
        results.append(
            {(t, k): v.cpu() for t in second.tables_on(rank) for k, v in embeddings.storage.tensors(t).items()}
        )
    return sum(not torch.equal(results[0][key], results[1][key]) for key in results[0])


def mean(values: list[float]) -> float:
    return float(np.mean(values))


SECTIONS: dict[str, Callable[[Path, float], dict[str, Any]]] = {
    function.__name__: function
    for function in (doctor, training, shared_gpu, uvm, shards, planning, roofline, synchronisation)
}


def main() -> None:
    name, target, seconds = sys.argv[1:4]
    folder = Path(target).parent.resolve()
    Path(target).write_text(json.dumps(SECTIONS[name](folder, float(seconds))))


if __name__ == "__main__":
    main()
