"""Which CPU cores a rank computes on: its own, near its memory, and no other job's.

with own_cores(local_rank=1, local_world_size=4, threads=1) as cores:     # binds this thread and all that it starts
    cores.loader                                                          # for the threads that read data
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
    """compute: where the step runs. loader: where data is read ahead: other cores, where this rank has any."""

    compute: frozenset[int]
    loader: frozenset[int]


@contextmanager
def own_cores(local_rank: int, local_world_size: int, threads: int) -> Iterator[Cores]:
    """Binds this process to cores of its share that no other job has, until the context ends. Where there are too few
    it stays free to run on all that the system allows it, as its loader does."""
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
    """A rank's part of the allowed cores, by node: all of one NUMA node where each node has a core for each of its
    ranks. Parts are disjoint and of equal size but for what is left over; [] where there are more ranks than cores."""
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
    """The allowed cores, by NUMA node."""
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
    """Held while the core is to be this process's alone, among jobs of this package on this host. None: it is not."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0dlrm-autoshard-core-{core}")  # a leading zero byte: no file, gone with the process
    except OSError:
        claim.close()
        return None
    return claim
