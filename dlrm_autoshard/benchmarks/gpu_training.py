"""Sections of `bench gpu-all` that train: the environment, losses beside the CPU's, moves, caching, and no waiting."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.records.jsonl import read_jsonl

TRAIN = Path("launch/train.py")
STEPS = 50
EXACT = ["train.tf32=false", "dense_optimizer.name=sgd", "dense_optimizer.lr=0.003", "tables.optimizer.lr=0.001"]
"""So that a rounding does not grow: one and two ranks on CPU differ by 1e-7 in fifty steps then. By the configurations'
own optimizers and rates they differ by 1e-3 (Adagrad's first update of a weight has the sign of its gradient and always
the same size), an H200 by 0.03; and with tf32 the first loss differs by 1e-5 already."""
KINDS = {
    "exact": EXACT,
    "launched": [*EXACT, "train.cuda_graphs=false"],
    "usual": [],
    "bf16": ["train.dense_dtype=bf16"],
}


def doctor(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_autoshard.commands.main", "doctor", "--json"], capture_output=True, text=True
    )
    found |= {"exit_status": done.returncode, "report": json.loads(done.stdout)}


def training(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """`debug_cpu` and a scaled `mlperf_dcnv2` on CPU and on the GPU (nccl): losses side by side, of fp32 products and
    learning rates at which a rounding does not grow; the same without CUDA graphs; with the default tf32, or bf16, and
    rates, scores; a resumed run."""
    sample = folder / "criteo_sample"
    if not sample.exists():
        command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "data", "criteo-sample", "--out", str(sample)]
        subprocess.run(command, check=True, capture_output=True)
    small = [f"data.dir={sample}", "data.row_scale=0.001", "train.batch_size=256", "model.dcn_low_rank_dim=64"]
    configs: dict[str, list[str]] = {"debug_cpu": [], "mlperf_dcnv2": small}
    with ThreadPoolExecutor(12) as at_once:  # nothing is timed, and most of each is its start
        runs = {
            (config, device, kind): at_once.submit(
                train, folder, config, device, [*extra, *settings], name=f"{config}_{device}_{kind}"
            )
            for config, extra in configs.items()
            for device in ("cpu", "cuda")
            for kind, settings in KINDS.items()
            if (device, kind) not in (("cpu", "bf16"), ("cpu", "launched"))
        }
        whole_run = at_once.submit(train, folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="whole")
        at_once.submit(train, folder, "debug_cpu", "cuda", ["train.max_steps=20"], name="halves").result()
        train(folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="halves", resume=True)
    found["resumed_loss_difference"] = abs(losses(whole_run.result())[-1] - losses(folder / "halves")[-1])
    for config in configs:
        cpu, gpu = (losses(runs[config, device, "exact"].result()) for device in ("cpu", "cuda"))
        found[f"{config}_steps"] = min(len(cpu), len(gpu))
        found[f"{config}_loss_difference"] = largest_difference(cpu, gpu)
        launched = losses(runs[config, "cuda", "launched"].result())
        found[f"{config}_graphs_loss_difference"] = largest_difference(gpu, launched)
        usual = auc(runs[config, "cpu", "usual"].result())
        found[f"{config}_tf32_auc_difference"] = abs(auc(runs[config, "cuda", "usual"].result()) - usual)
        found[f"{config}_bf16_auc_difference"] = abs(auc(runs[config, "cuda", "bf16"].result()) - usual)
    for kind in ("loss", "graphs_loss"):
        found[f"largest_{kind}_difference"] = max(found[f"{config}_{kind}_difference"] for config in configs)


def shared_gpu(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Two ranks on this one GPU over gloo: placements and moves change nothing, also with Adam on the tables."""
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.data.open import open_source
    from dlrm_autoshard.plan import ShardingPlan

    config = load_config(Path("configs/debug_cpu.yaml"))
    names = [table.name for table in open_source(config.data, config.tables).tables]
    with ThreadPoolExecutor(4) as at_once:
        runs, moves = [], [at_once.submit(spawn_moves, optimizer) for optimizer in ("adam", "rowwise_adagrad")]
        for number, ranks in enumerate(([0, 1], [1, 0, 0])):
            plan = ShardingPlan({name: ranks[i % len(ranks)] for i, name in enumerate(names)}, 2)
            plan.save(folder / f"plan_{number}.json")
            placement = [f"autoshard.placement={folder / f'plan_{number}.json'}", "autoshard.enabled=false"]
            name = f"shared_{number}"
            runs.append(at_once.submit(train, folder, "debug_cpu", "cuda", placement, name=name, ranks=2))
    found["placement_loss_difference"] = largest_difference(*(losses(run.result()) for run in runs))
    found["moved_tensors_differing"] = sum(move.result() for move in moves)


def uvm(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """Tables in host memory behind a device cache give the losses that tables on the device give."""
    with ThreadPoolExecutor(2) as at_once:
        runs = [
            at_once.submit(train, folder, "debug_cpu", "cuda", [f"tables.location={location}"], name=location)
            for location in ("device", "managed_caching")
        ]
    found["largest_loss_difference"] = largest_difference(*(losses(run.result()) for run in runs))


def synchronisation(folder: Path, seconds: float, found: dict[str, Any]) -> None:
    """A trace of plain (not sampled) steps holds no call that waits for the GPU."""
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.distributed.ranks.runtime import Runtime
    from dlrm_autoshard.training.trainer import Trainer

    overrides = ["run.device=cuda", "profile.enabled=false", "checkpoint.enabled=false", "train.log_every_steps=1000"]
    config = load_config(Path("configs/debug_cpu.yaml"), [*overrides, f"run.dir={folder}"])
    names: list[str] = []
    with Runtime.start(config.run) as runtime:
        job = Trainer(config, runtime, folder).job
        with job.data.batches("train", 0) as loader:
            job.step.begin_epoch(iter(loader))
            for _ in range(5):
                job.step.run(1.0, config.tables.optimizer.lr)
            torch.cuda.synchronize()
            with torch.profiler.profile() as profiler:
                for _ in range(5):
                    job.step.run(1.0, config.tables.optimizer.lr)
            names = [event.key for event in profiler.key_averages() if "Synchronize" in event.key]
    # The profiler's own, when it stops; and of an event two steps old, which has passed.
    waiting = [name for name in names if "Device" not in name and "Event" not in name]
    found |= {"calls_in_plain_steps": len(waiting), "which": ", ".join(waiting) or "none"}


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
    several = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    settings = [
        f"run.device={device}",
        f"run.dir={folder}",
        f"run.name={name}",
        "train.log_every_steps=1",
        f"train.max_steps={STEPS}",
        *extra,
    ]
    if not resume:  # an earlier bench's run of that name would make this one's "name-2"
        shutil.rmtree(folder / name, ignore_errors=True)
    command = [
        sys.executable,
        *several,
        str(TRAIN),
        "--config",
        f"configs/{config}.yaml",
        *(["--resume"] if resume else []),
        *settings,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise BenchError(f"'{name}' ended with status {done.returncode}: {done.stdout.strip()[-4000:]}")
    return folder / name


def losses(run_dir: Path) -> list[float]:
    lines = read_jsonl(run_dir / "metrics.jsonl")
    return [line["logloss"] for line in lines if line["split"] == "train" and "logloss" in line]


def auc(run_dir: Path) -> float:
    """AUC of the test split."""
    return float(json.loads((run_dir / "result.json").read_text())["metrics"]["auc"])


def largest_difference(one: list[float], other: list[float]) -> float:
    """Over the steps that both have."""
    return float(max(abs(a - b) for a, b in zip(one, other, strict=False)))


def spawn_moves(optimizer: str) -> int:
    """Tensors (weights and optimizer state) that differ between a run with moves and one without, over two ranks."""
    from dlrm_autoshard.distributed.ranks.spawn import run_ranks

    return sum(run_ranks(moved_and_unmoved, 2, optimizer, timeout=60))


def moved_and_unmoved(rank: int, world_size: int, optimizer: str) -> int:
    """Six updates twice, once with a move after the third, of ids with weights: how many of this rank's tensors differ
    in any bit."""
    import torch.distributed as dist

    from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
    from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
    from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
    from dlrm_autoshard.distributed.moves.reshard import reshard
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
            tables, second if not moves else first, TablesConfig(optimizer=TableOptimizerConfig(name=optimizer)),
            rank=rank, group=group, id_group=group, device=device,
        )  # fmt: skip
        for step in range(6):
            if moves and step == 3:
                reshard(embeddings, second, group=group)
            owned = embeddings.local_shards
            ids = [
                torch.randint(0, t.num_embeddings, (64,), generator=torch.Generator().manual_seed(step)) for t in owned
            ]
            offsets = torch.arange(0, 64 * len(owned) + 1, 2)
            if not owned:
                continue
            weights_N = torch.linspace(0.5, 2.0, 64, device=device).repeat(len(owned))
            bags = torch.cat(ids).to(device), offsets.to(device), 32 // world_size, weights_N
            local = embeddings.lookup(LocalIds(*bags))
            embeddings.update(local, torch.sin(local.detach()))
        results.append(
            {(t, k): v.cpu() for t in second.tables_on(rank) for k, v in embeddings.storage.tensors(t).items()}
        )
    return sum(not torch.equal(results[0][key], results[1][key]) for key in results[0])
