"""Measures the network between a job's ranks: which link is slow, and prices for plans.

found = measure(runtime, quick=False)        # on every rank, the same everywhere
print(in_words(found)); keep(found, runtime, Path("runs/.costs"))      # rank 0
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import get_args

import torch
import torch.distributed as dist

from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.distributed.lookup.shared_memory import host_id
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.planner.costs.replay import CommsSample
from dlrm_autoshard.probe.cost_log import CostLog
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.probe.rank_probe import RankProbe
from dlrm_autoshard.probe.shard_probe import ShardProbe
from dlrm_autoshard.tables import TableConfig, TableOptimizer, TableStats

MB_A_LINK = 4.0
DIM, BATCH, MOST_EXCHANGES = 64, 128, 8  # of the exchanges: tables' dim, samples a rank, how many placements at most
NOTABLY_SLOWER = 0.4
"""Share of the median bandwidth of its kind below which a link is named."""


@dataclass(frozen=True)
class Link:
    """Bandwidth from all of a host's ranks at once to another host's, or among one host's own. mb_per_s: MB/s of 4 MB,
    latency included."""

    sender: int
    receiver: int
    mb_per_s: float
    latency_ms: float


@dataclass(frozen=True)
class Network:
    """Links and exchanges of a job's ranks. hosts: the host of each rank; names: of each host."""

    hosts: tuple[int, ...]
    names: tuple[str, ...]
    links: tuple[Link, ...]
    exchanges: tuple[CommsSample, ...]


def measure(runtime: Runtime, quick: bool) -> Network:
    """Measures all links, then exchanges of a training step. Collective."""
    if runtime.world_size == 1:
        raise UserError("one rank has no network. bench network --ranks 2, or torchrun on all machines of a job.")
    places = runtime.all_gather((host_id(), platform.node()))
    ids = list(dict.fromkeys(host for host, _ in places))
    hosts = tuple(ids.index(host) for host, _ in places)
    names = tuple(f"host {number} ({dict(places)[host]})" for number, host in enumerate(ids))
    repeats = 3 if quick else 7
    links = []
    for sender, receiver in itertools.product(range(len(ids)), repeat=2):
        pairs = [(a, b) for a, b in itertools.permutations(range(runtime.world_size), 2)
                 if (hosts[a], hosts[b]) == (sender, receiver)]  # fmt: skip
        if pairs:
            values = int(MB_A_LINK * 1e6 / 4 / len(pairs))
            latency, all_of_it = (_milliseconds(runtime, pairs, size, repeats) for size in (1, values))
            links.append(Link(sender, receiver, MB_A_LINK / all_of_it * 1e3, latency))
    return Network(hosts, names, tuple(links), tuple(_exchanges(runtime, hosts, repeats)))


def _milliseconds(runtime: Runtime, pairs: list[tuple[int, int]], values: int, repeats: int) -> float:
    """Returns the milliseconds until the first of each pair has sent so many values to the second."""
    sends = [values * ((runtime.rank, other) in pairs) for other in range(runtime.world_size)]
    receives = [values * ((other, runtime.rank) in pairs) for other in range(runtime.world_size)]
    sent, received = (torch.zeros(sum(each), device=runtime.device) for each in (sends, receives))

    def once() -> None:
        dist.all_to_all_single(received, sent, receives, sends, group=runtime.group)
        if runtime.device.type == "cuda":
            torch.cuda.synchronize(runtime.device)

    return max(runtime.all_gather(_median_ms(runtime, once, repeats)))


def _median_ms(runtime: Runtime, function: Callable[[], object], repeats: int) -> float:
    """Returns the median of some calls, after one that warms up."""
    times = []
    for _ in range(1 + repeats):
        runtime.barrier()
        began = time.perf_counter()
        function()
        times.append(1e3 * (time.perf_counter() - began))
    return median(times[1:])


def _exchanges(runtime: Runtime, hosts: tuple[int, ...], repeats: int) -> list[CommsSample]:
    """Measures a step's exchanges of vectors and gradients under an even placement and under uneven ones."""
    ranks = range(runtime.world_size)
    tables = [TableConfig(f"t{number}", 100, DIM) for number in range(4 * runtime.world_size)]
    batch = BATCH * runtime.world_size
    probe = RankProbe(runtime, tables, [TableStats(1.0)] * len(tables), batch, ShardProbe(), exchange_repeats=repeats)
    crowded = [[rank] for rank in ranks] + [[r for r in ranks if hosts[r] == host] for host in sorted(set(hosts))]
    samples = []
    for most in [list(ranks), *crowded[::-1]][:MOST_EXCHANGES]:  # the owners of half of the tables; the rest are even
        owners = [most[i // 2 % len(most)] if i % 2 else i // 2 % len(ranks) for i in range(len(tables))]
        plan = ShardingPlan({table.name: owner for table, owner in zip(tables, owners, strict=True)}, len(ranks))
        medians = runtime.all_gather(tuple(median(times) for times in probe.measure_exchange(plan)))
        forward, backward = zip(*medians, strict=True)
        dims = tuple(DIM * owners.count(rank) for rank in ranks)
        samples.append(CommsSample(dims, batch, forward, backward, hosts=hosts))
    return samples


def keep(found: Network, runtime: Runtime, costs_dir: Path) -> Path:
    """Writes exchanges to the folder, where jobs with autoshard.cache_dir there read them; returns the folder."""
    for optimizer in get_args(TableOptimizer):
        ranks = {"world_size": runtime.world_size, "optimizer": optimizer}
        exchange = {"exchange": f"{ExchangeDtypes()} by shared memory"}
        CostLog(costs_dir, {**hardware_fingerprint(runtime.device), **ranks, **exchange}).append(found.exchanges)
    return costs_dir


def in_words(found: Network) -> str:
    """Describes each link in a line, marks slow ones, and adds a line on exchanges."""
    lines = [f"{count(len(found.hosts), 'rank')} on {count(len(found.names), 'host')}"]
    for within in (True, False):
        links = [link for link in found.links if (link.sender == link.receiver) == within]
        usual = median(link.mb_per_s for link in links) if links else 0.0
        for link in links:
            way = f"within {found.names[link.sender]}"
            if not within:
                way = f"{found.names[link.sender]} to {found.names[link.receiver]}"
            slow = f"  <- slow: {usual / link.mb_per_s:.1f} times slower than most"
            note = slow if link.mb_per_s < NOTABLY_SLOWER * usual else ""
            lines.append(
                f"{way}: {link.mb_per_s:,.0f} MB/s ({link.mb_per_s * 8e-3:.2f} Gbit/s), {link.latency_ms:.2f} ms{note}"
            )
    even, worst_ms = found.exchanges[0], max(max(one.fwd_comms_ms) for one in found.exchanges)
    lines.append(
        f"an exchange of {sum(even.dims):,} dims, {even.batch_size:,} samples: {max(even.fwd_comms_ms):.1f} ms where "
        f"dims are even over ranks, {worst_ms:.1f} ms in the worst of {len(found.exchanges)} placements"
    )
    return "\n".join(lines)
