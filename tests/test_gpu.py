"""One GPU learns what the CPU learns: losses, moves, cached tables, resumed runs; and no plain step waits for it."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig, load_config
from dlrm_autoshard.data.open import open_source
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.id_distribution import LocalIds
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.records.jsonl import read_jsonl
from dlrm_autoshard.tables import TableConfig
from dlrm_autoshard.training.trainer import Trainer
from tests.ranks import run_ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
ROOT = Path(__file__).parents[1]

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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpu")


@pytest.fixture(scope="module")
def runs(folder: Path) -> dict[tuple[str, str, str], Path]:
    """`debug_cpu` and a scaled `mlperf_dcnv2`, by device and kind."""
    sample = folder / "criteo_sample"
    command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "data", "criteo-sample", "--out", str(sample)]
    subprocess.run(command, check=True, capture_output=True)
    small = [f"data.dir={sample}", "data.row_scale=0.001", "train.batch_size=256", "model.dcn_low_rank_dim=64"]
    with ThreadPoolExecutor(12) as at_once:  # nothing is timed, and most of each is its start
        started = {
            (config, device, kind): at_once.submit(
                train, folder, config, device, [*extra, *settings], name=f"{config}_{device}_{kind}"
            )
            for config, extra in (("debug_cpu", []), ("mlperf_dcnv2", small))
            for device in ("cpu", "cuda")
            for kind, settings in KINDS.items()
            if (device, kind) not in (("cpu", "bf16"), ("cpu", "launched"))
        }
    return {key: run.result() for key, run in started.items()}


@pytest.mark.parametrize("config", ["debug_cpu", "mlperf_dcnv2"])
def test_losses_are_the_cpus_with_graphs_and_without(config: str, runs: dict[tuple[str, str, str], Path]) -> None:
    cpu, gpu = (losses(runs[config, device, "exact"]) for device in ("cpu", "cuda"))
    assert len(gpu) == len(cpu) == STEPS and largest_difference(cpu, gpu) <= 1e-3
    assert largest_difference(gpu, losses(runs[config, "cuda", "launched"])) <= 1e-6


def test_coarser_products_leave_the_auc_what_it_is(runs: dict[tuple[str, str, str], Path]) -> None:
    usual = auc(runs["debug_cpu", "cpu", "usual"])
    for kind in ("usual", "bf16"):
        assert abs(auc(runs["debug_cpu", "cuda", kind]) - usual) <= 0.002


def test_a_resumed_run_goes_on_as_it_was(folder: Path) -> None:
    whole = train(folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="whole")
    train(folder, "debug_cpu", "cuda", ["train.max_steps=20"], name="halves")
    halves = train(folder, "debug_cpu", "cuda", ["train.max_steps=40"], name="halves", resume=True)
    assert abs(losses(whole)[-1] - losses(halves)[-1]) <= 1e-3


def test_placement_of_two_ranks_on_one_gpu_changes_nothing(folder: Path) -> None:
    config = load_config(ROOT / "configs/debug_cpu.yaml")
    names = [table.name for table in open_source(config.data, config.tables).tables]
    found = []
    for number, ranks in enumerate(([0, 1], [1, 0, 0])):
        plan = ShardingPlan({name: ranks[i % len(ranks)] for i, name in enumerate(names)}, 2)
        plan.save(folder / f"plan_{number}.json")
        placement = [f"autoshard.placement={folder / f'plan_{number}.json'}", "autoshard.enabled=false"]
        found.append(losses(train(folder, "debug_cpu", "cuda", placement, name=f"shared_{number}", ranks=2)))
    assert largest_difference(*found) <= 1e-4


@pytest.mark.parametrize("optimizer", ["adam", "rowwise_adagrad"])
def test_a_move_changes_no_bit(optimizer: str) -> None:
    assert sum(run_ranks(moved_and_unmoved, 2, optimizer, timeout=60)) == 0


def test_tables_in_host_memory_behind_a_cache_learn_the_same(folder: Path) -> None:
    found = [
        losses(train(folder, "debug_cpu", "cuda", [f"tables.location={location}"], name=location))
        for location in ("device", "managed_caching")
    ]
    assert largest_difference(*found) <= 1e-3


def test_no_plain_step_waits_for_the_gpu(folder: Path) -> None:
    overrides = ["run.device=cuda", "profile.enabled=false", "checkpoint.enabled=false", "train.log_every_steps=1000"]
    config = load_config(ROOT / "configs/debug_cpu.yaml", [*overrides, f"run.dir={folder}"])
    with Runtime.start(config.run) as runtime:
        job = Trainer(config, runtime, folder).job
        with job.data.batches("train", 0) as loader:
            batches = job.bags.ahead(loader, lambda batch: batch)
            for _, (_, ids) in zip(range(5), batches, strict=False):
                job.step.run(ids, 1.0, config.tables.optimizer.lr)
            torch.cuda.synchronize()
            with torch.profiler.profile() as profiler:
                for _, (_, ids) in zip(range(5), batches, strict=False):
                    job.step.run(ids, 1.0, config.tables.optimizer.lr)
            names = [event.key for event in profiler.key_averages() if "Synchronize" in event.key]
    # The profiler's own, when it stops; and of an event two steps old, which has passed.
    assert not [name for name in names if "Device" not in name and "Event" not in name]


def train(
    folder: Path,
    config: str,
    device: str,
    extra: list[str],
    *,
    name: str,
    ranks: int = 1,
    resume: bool = False,
) -> Path:
    """Runs launch/train.py for up to STEPS steps, every loss logged; returns the run directory."""
    several = [] if ranks == 1 else ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
    settings = [
        f"run.device={device}",
        f"run.dir={folder}",
        f"run.name={name}",
        "train.log_every_steps=1",
        f"train.max_steps={STEPS}",
        *extra,
    ]
    command = [
        sys.executable,
        *several,
        str(ROOT / "launch/train.py"),
        "--config",
        str(ROOT / f"configs/{config}.yaml"),
        *(["--resume"] if resume else []),
        *settings,
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"'{name}' ended with status {done.returncode}: {done.stdout.strip()[-4000:]}"
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


def moved_and_unmoved(rank: int, world_size: int, optimizer: str) -> int:
    """Six updates twice, once with a move after the third, of ids with weights: how many of this rank's tensors differ
    in any bit."""
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
            {(t, k): v.cpu() for t in second.shards_on(rank) for k, v in embeddings.storage.tensors(t).items()}
        )
    return sum(not torch.equal(results[0][key], results[1][key]) for key in results[0])
