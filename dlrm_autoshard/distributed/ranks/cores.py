"""Chooses a rank's CPU cores: its own, near its memory, and not used by another job.

with own_cores(local_rank=1, local_world_size=4, threads=1) as cores:     # binds this thread and all that it starts
    cores.loader                                                          # for threads that read data
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

_NODES = Path("/sys/devices/system/node")


@dataclass(frozen=True)
class Cores:
    """compute: where the step runs. loader: where data is read ahead, on other cores if the rank has any."""

    compute: frozenset[int]
    loader: frozenset[int]


@contextmanager
def own_cores(local_rank: int, local_world_size: int, threads: int) -> Iterator[Cores]:
    """Binds this process to cores of its share that no other job has claimed, until the block ends. If there are too
    few, it may run on all allowed cores, and its loader, too."""
    allowed = os.sched_getaffinity(0)
    share = share_of(local_rank, local_world_size, _numa_nodes(allowed))
    claimed: dict[int, socket.socket] = {}
    for core in (*share, *sorted(allowed - set(share))) if len(share) >= threads else ():
        claim = _claim(core) if len(claimed) < threads else None
        if claim is not None:
            claimed[core] = claim
    if not claimed or len(claimed) < threads:
        yield Cores(frozenset(allowed), frozenset(allowed))
        return
    compute = frozenset(claimed)
    os.sched_setaffinity(0, compute)
    try:
        yield Cores(compute, frozenset(share) - compute or compute)
    finally:
        os.sched_setaffinity(0, allowed)
        for claim in claimed.values():
            claim.close()


def share_of(local_rank: int, local_world_size: int, nodes: Sequence[Sequence[int]]) -> list[int]:
    """Returns a rank's share of the allowed cores, within one NUMA node if each node has a core for each of its ranks.
    Shares are disjoint and equal, without the remainder; [] if there are more ranks than cores."""
    node = local_rank * len(nodes) // local_world_size
    by_node: list[list[int]] = [[] for _ in nodes]
    for rank in range(local_world_size):
        by_node[rank * len(nodes) // local_world_size].append(rank)
    cores, ranks = list(nodes[node]), by_node[node]
    if any(len(own) < len(here) for own, here in zip(nodes, by_node, strict=True)):
        cores, ranks = [core for own in nodes for core in own], list(range(local_world_size))
    size, position = len(cores) // len(ranks), ranks.index(local_rank)
    return cores[position * size : (position + 1) * size]


def _numa_nodes(allowed: Set[int]) -> list[list[int]]:
    """Returns the allowed cores by NUMA node."""
    nodes = []
    for path in sorted(_NODES.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            text = (path / "cpulist").read_text()
        except OSError:
            continue
        cores = {
            core
            for first, last in re.findall(r"(\d+)(?:-(\d+))?", text)
            for core in range(int(first), int(last or first) + 1)
        }
        if cores & allowed:
            nodes.append(sorted(cores & allowed))
    return nodes if sum(map(len, nodes)) == len(allowed) else [sorted(allowed)]


def _claim(core: int) -> socket.socket | None:
    """Claims a core among jobs of this package on this host, as long as the socket is open; None if it is taken."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dlrm-autoshard-core-{core}")  # abstract socket: no file, released with the process
    except OSError:
        claim.close()
        return None
    return claim
