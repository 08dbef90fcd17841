"""How fast tables move between two ranks of a 1 GiB model, beside gloo's own point-to-point bandwidth."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.harness import Findings, on_pinned_ranks
from dlrm_autoshard.benchmarks.paired import median_with_interval, paired_ratio
from dlrm_autoshard.benchmarks.peer_torchrec import embedding_bags, find_torchrec, sharded
from dlrm_autoshard.config import TableOptimizerConfig, TablesConfig
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.groups import new_group
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.tables import TableConfig

TITLE = "0.25, 256 and 1,024 MiB of tables between 2 ranks of a 1 GiB model, beside gloo's raw bandwidth"
ROUGH_TIME = "30 s"

MIB = 1 << 20
SMALL = TableConfig("small", 1024, 64)  # 0.25 MiB
LARGE = [TableConfig(f"t{i}", 65_536, 64) for i in range(64)]  # 16 MiB each
MOVES = {"0.25": ["small"], "256": [t.name for t in LARGE[:16]], "1024": [t.name for t in LARGE]}


def run(quick: bool) -> dict[str, Any]:
    rounds = 2 if quick else 6
    moved, raw = on_pinned_ranks(measure, 2, rounds, timeout=300)[0]
    missing = find_torchrec()
    found = Findings(targets={"of_torchrec": "<= 0.05"})
    if missing is None:
        theirs = on_pinned_ranks(measure_torchrec, 2, rounds, timeout=300)[0]
        found.put("torchrec_seconds_0.25_mib", statistics.median(theirs))
        found.put("of_torchrec", paired_ratio(moved["0.25"], theirs))
    for size, seconds in moved.items():
        found.put(f"seconds_{size}_mib", median_with_interval(seconds))
    for size, seconds in raw.items():
        found.put(f"raw_gib_per_s_{size}_mib", float(size) / 1024 / statistics.median(seconds))
        found.put(f"share_of_raw_{size}_mib", paired_ratio(seconds, moved[size]), ">= 0.5")
    found.notes = [
        "Raw: one isend and irecv of as many bytes between buffers that both ranks have already touched; our moves "
        "fault fresh pages in, vote before and a barrier after.",
        missing
        or "of_torchrec: of the small table, in processes of its own afterwards. It rebuilds every local table, "
        "and its tags come from hash(): it only works where all ranks hash alike, as they do here.",
    ]
    return vars(found)


def measure(rank: int, world_size: int, rounds: int) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Seconds of each move (there and back are one round each) and of the raw transfers, interleaved."""
    world = dist.group.WORLD
    assert world is not None
    tables = [SMALL, *LARGE]
    home = ShardingPlan({table.name: 0 for table in tables}, world_size)
    config = TablesConfig(optimizer=TableOptimizerConfig(name="sgd", lr=0.1))
    ids = new_group()
    embeddings = ShardedEmbeddings(
        tables, home, config, rank=rank, group=world, id_group=ids, device=torch.device("cpu")
    )
    buffers = {size: torch.ones(int(float(size)) * MIB, dtype=torch.uint8) for size in MOVES if size != "0.25"}
    moved: dict[str, list[float]] = {size: [] for size in MOVES}
    raw: dict[str, list[float]] = {size: [] for size in buffers}
    for number in range(rounds + 1):
        for size, names in MOVES.items():
            away = ShardingPlan({**home.rank_of, **dict.fromkeys(names, 1)}, world_size)
            times = [reshard(embeddings, plan, group=world).seconds for plan in (away, home)]
            if size in buffers:
                times_raw = [transfer(buffers[size], source, rank, world) for source in (0, 1)]
            if number > 0:  # the first round warms up
                moved[size] += times
                raw.get(size, []).extend(times_raw if size in buffers else [])
    return moved, raw


def transfer(buffer: torch.Tensor, source: int, rank: int, group: dist.ProcessGroup) -> float:
    """Returns the seconds in which one of two ranks sends the buffer to the other."""
    dist.barrier(group=group)
    started = time.perf_counter()
    peer = 1 - rank
    work = dist.isend(buffer, peer, group) if rank == source else dist.irecv(buffer, peer, group)
    assert work is not None
    work.wait()
    dist.barrier(group=group)
    return time.perf_counter() - started


def measure_torchrec(rank: int, world_size: int, rounds: int) -> list[float]:
    """Seconds in which torchrec moves the small table of the same model to the other rank and back."""
    find_torchrec()  # puts it on the path
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
    from torchrec.distributed.types import ShardingPlan as TheirPlan

    tables = embedding_bags([SMALL, *LARGE])
    model = torch.nn.ModuleDict({"tables": tables, "dense": torch.nn.Linear(4, 4)})

    def placed(small_on: int) -> Any:
        owner = {table.name: 0 for table in LARGE} | {SMALL.name: small_on}
        if small_on == 0:
            owner[LARGE[-1].name] = 1  # torchrec can't fill a rank that has nothing
        return construct_module_sharding_plan(
            tables,
            {name: table_wise(rank=rank, compute_kernel="fused") for name, rank in owner.items()},
            sharder=EmbeddingBagCollectionSharder(),
            local_size=world_size,
            world_size=world_size,
            device_type="cpu",
        )

    plan = TheirPlan(plan={"tables": placed(0)})
    trained, _ = sharded(model, [], [], 1, module="tables", plan=plan, check_ids=True, optimizer="EXACT_SGD")
    seconds = []
    for number in range(2 * rounds):
        target = placed(1 - number % 2)
        dist.barrier()
        started = time.perf_counter()
        trained.reshard({"tables": (0.25, type(target)({SMALL.name: target[SMALL.name]}))}, "tables")
        dist.barrier()
        seconds.append(time.perf_counter() - started)
    return seconds
