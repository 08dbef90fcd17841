"""Sums over ranks that start early and are waited for late: through shared memory, and once over each network link.

start = sums_over(group, device, shared_memory=True)       # collective
start(gradient).wait()                       # in place
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.lookup.shared_memory import SharedMemory, connect, host_id
from dlrm_autoshard.distributed.ranks.groups import group_beside

Sum = Callable[[Tensor], Pending]


def sums_over(group: dist.ProcessGroup, device: torch.device, *, shared_memory: bool) -> Sum:
    """Returns a function that sums over the group's ranks, with bit-equal results on all."""
    if dist.get_world_size(group) == 1 or not shared_memory or device.type != "cpu":
        return sums_by(group, None)
    link = connect(group)
    return sums_by(group, link) if link is not None else SumsByHost.where_possible(group) or in_one_ring(group)


def sums_by(group: dist.ProcessGroup, link: SharedMemory | None) -> Sum:
    """Sums through shared memory if there is a link (used for nothing else), else by the group."""
    if link is not None:
        return lambda values: Pending(link.all_reduce(values), values)
    return in_one_ring(group) if dist.get_world_size(group) > 1 else lambda values: Pending(None, values)


def in_one_ring(group: dist.ProcessGroup) -> Sum:
    """Sums by the group's own all-reduce."""
    return lambda values: Pending(dist.all_reduce(values, group=group, async_op=True).wait, values)


class SumsByHost:
    """Sums within each host by slices, then each slice over hosts.

    With H hosts 2 (H - 1) / H of the values travel over a host's link, instead of 2 (W - 1) / W in one ring of W ranks,
    and in fewer rounds."""

    def __init__(self, link: SharedMemory, across: dist.ProcessGroup) -> None:
        self._link, self._over_hosts = link, in_one_ring(across)
        self._thread = ThreadPoolExecutor(1, "sums")  # runs beside the step, like gloo's threads

    @staticmethod
    def where_possible(group: dist.ProcessGroup) -> SumsByHost | None:
        """Returns None if hosts have a single rank each or different numbers. Collective."""
        hosts: list[str] = [""] * dist.get_world_size(group)
        dist.all_gather_object(hosts, host_id(), group=group)
        by_host = [[rank for rank, other in enumerate(hosts) if other == host] for host in dict.fromkeys(hosts)]
        if len({*map(len, by_host)}) > 1 or len(by_host[0]) == 1:
            return None
        rank = dist.get_rank(group)
        own = next(ranks for ranks in by_host if rank in ranks)
        link = connect(group_beside(group, "gloo", own, carries="sums"))
        across = group_beside(group, "gloo", [ranks[own.index(rank)] for ranks in by_host], carries="sums")
        connected: list[bool] = [False] * len(hosts)
        dist.all_gather_object(connected, link is not None, group=group)
        return SumsByHost(link, across) if link is not None and all(connected) else None

    def __call__(self, values: Tensor) -> Pending:
        return Pending(self._thread.submit(self._sum, values).result, values)

    def _sum(self, values: Tensor) -> None:
        self._link.all_reduce(values, lambda own: self._over_hosts(own).wait())()
