"""This process's place among the ranks: device, process groups, cores. The only module that starts and stops them.

with Runtime.start(config.run) as runtime:
    runtime.rank, runtime.world_size, runtime.group
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from dlrm_autoshard.config import RunConfig
from dlrm_autoshard.distributed.lookup.shared_memory import host_id
from dlrm_autoshard.distributed.ranks.cores import own_cores
from dlrm_autoshard.distributed.ranks.groups import by_nccl, device_for, group_beside, new_group
from dlrm_autoshard.distributed.ranks.heartbeats import Heartbeats
from dlrm_autoshard.distributed.ranks.rendezvous import fresh_store
from dlrm_autoshard.errors import UserError, in_words
from dlrm_autoshard.formats.launcher_numbers import launcher_number

T = TypeVar("T")
Outcome = tuple[Any, UserError | None]


class RuntimeFailure(UserError):
    """The ranks cannot start as asked; the message says why and what to try."""


@dataclass(frozen=True)
class Runtime:
    """A rank's environment. rank, world_size: torchrun's. group carries the step's tensors; id_group the next batch's
    ids (and host tensors of a GPU job), so that neither queues behind the other; control is gloo on every device, for
    small objects. heartbeats: between ranks; told the step. loader_cores: for threads that read data; None: any.
    local_ranks: each rank's number on its host; None: unknown."""

    rank: int
    world_size: int
    local_world_size: int
    device: torch.device
    group: dist.ProcessGroup
    id_group: dist.ProcessGroup
    control: dist.ProcessGroup
    heartbeats: Heartbeats | None = None
    loader_cores: frozenset[int] | None = None
    local_ranks: tuple[int, ...] | None = None

    @staticmethod
    @contextlib.contextmanager
    def start(config: RunConfig) -> Iterator[Runtime]:
        """Joins the process group (from torchrun's environment; alone without it), leaves it at the end, and restores
        the process's cores, threads and environment.

        RankFailure names the rank that made an exchange fail.
        """
        if dist.is_initialized():
            raise RuntimeFailure(
                "this process already has a process group, but the trainer starts its own: train in a separate "
                "process, or use ShardedEmbeddingBags and Autoshard in your own loop."
            )
        rank, world_size = launcher_number("RANK", 0), launcher_number("WORLD_SIZE", 1)
        local_rank, local_world_size = launcher_number("LOCAL_RANK", 0), launcher_number("LOCAL_WORLD_SIZE", 1)
        if rank >= world_size or ("RANK" not in os.environ and world_size > 1):
            raise RuntimeFailure(
                f"RANK is {os.environ.get('RANK', 'not set')} and WORLD_SIZE {os.environ.get('WORLD_SIZE', 'not set')} "
                "in this process's environment; ranks count from 0, below WORLD_SIZE. Unset both, and start ranks with "
                "`dlrm-autoshard train` or torchrun."
            )
        with _process_kept(), contextlib.ExitStack() as held:
            timeout = timedelta(seconds=config.collective_timeout_seconds)
            store = fresh_store(rank, world_size, timeout) if "RANK" in os.environ else dist.HashStore()
            if "LOCAL_RANK" not in os.environ and world_size > 1:
                local_rank, local_world_size = place_on_host(store, rank, world_size)
            if local_world_size == world_size and Path("/sys/class/net/lo").exists():
                os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a single host's name need not resolve
            device = choose_device(config.device, local_rank)
            check_threads(config)
            torch.set_num_threads(config.threads_per_rank)
            loader_cores: frozenset[int] | None = None
            if device.type == "cpu":
                keep_freed_memory()
                if config.pin_cores:
                    cores = held.enter_context(own_cores(local_rank, local_world_size, config.threads_per_rank))
                    loader_cores = cores.loader
            else:
                torch.cuda.set_device(device)
            os.environ.setdefault(
                "TORCH_FR_BUFFER_SIZE", "2000"
            )  # NCCL's flight recorder tells what hung on which rank
            os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
            try:
                with Heartbeats(store, rank, world_size, timeout.total_seconds()) as heartbeats:
                    backend = choose_backend(name_of(device), rank, world_size, store)
                    own = device if backend == "nccl" else None
                    dist.init_process_group(
                        backend, rank=rank, world_size=world_size, store=store, timeout=timeout, device_id=own
                    )
                    control = new_group(backend="gloo", timeout=timeout)
                    id_group = new_group(backend="cpu:gloo,cuda:nccl" if own else None, timeout=timeout)
                    world = dist.group.WORLD
                    assert world is not None
                    places = (rank, world_size, local_world_size, device)
                    yield Runtime(*places, world, id_group, control, heartbeats, loader_cores)
                    dist.barrier(group=control)
            finally:
                # Free objects that hold process groups before the groups; otherwise gloo's threads abort the exit.
                gc.collect()
                if dist.is_initialized():
                    dist.destroy_process_group()

    def broadcast(self, value: T | None) -> T:
        """Returns rank 0's value on every rank."""
        box = [value]
        dist.broadcast_object_list(box, group_src=0, group=self.control)
        return box[0]  # type: ignore[return-value]

    def gather(self, value: T) -> list[T] | None:
        """Returns all ranks' values in order on rank 0; None elsewhere."""
        gathered: list[T | None] | None = [None] * self.world_size if self.rank == 0 else None
        dist.gather_object(value, gathered, group_dst=0, group=self.control)
        return gathered  # type: ignore[return-value]

    def all_gather(self, value: T) -> list[T]:
        gathered: list[T | None] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered  # type: ignore[return-value]

    def all_gather_numbers(self, values: Sequence[float]) -> np.ndarray:
        """Returns [W, len(values)]; equally many on every rank. Ten times as fast as objects."""
        own = torch.tensor(values, dtype=torch.float64)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(gathered, own, group=self.control)
        return torch.stack(gathered).numpy()

    def all_finite(self, value: torch.Tensor) -> bool:
        """Returns whether the value is finite on every rank."""
        bad = (~torch.isfinite(value.detach())).float().view(1)
        dist.all_reduce(bad, group=self.group)
        return float(bad) == 0.0

    def from_rank_0(self, decide: Callable[[], T], attempt: Callable[[Callable[[], Outcome]], Any] | None = None) -> T:
        """Returns on every rank what `decide` returns on rank 0; a UserError raised there is raised everywhere.

        attempt: calls its argument on rank 0 while other ranks serve it (a probe's `on_rank_zero`).
        """

        def tried() -> Outcome:
            try:
                return decide(), None
            except UserError as error:
                return None, error

        outcome: Outcome | None = None
        if attempt is not None:
            outcome = attempt(tried)
        elif self.rank == 0:
            outcome = tried()
        value, failure = self.broadcast(outcome)
        if failure is not None:
            raise failure
        return value

    def on_all_ranks(self, action: Callable[[], T]) -> T:
        """Returns the action's result; if it fails on any rank, raises the first such error on every rank."""
        result, failure = None, None
        try:
            result = action()
        except UserError as error:
            failure = error
        failures = [error for error in self.all_gather(failure) if error is not None]
        if failures:
            raise failures[0]
        return result  # type: ignore[return-value]

    @property
    def clock_group(self) -> dist.ProcessGroup:
        """The group for `StageClock`'s barriers: it carries tensors of the device, and on CPU none of the step's."""
        return self.control if self.device.type == "cpu" else self.group

    def barrier(self) -> None:
        dist.barrier(group=self.control)

    def on_all(self, attempt: Callable[[], T]) -> T:
        """Returns what `attempt` returns here. Collective: if it raises on any rank, every rank raises and names that
        rank, so that none waits in vain."""
        return on_all(self.control, attempt)


def on_all(group: dist.ProcessGroup, attempt: Callable[[], T]) -> T:
    """Does the same as `Runtime.on_all`, for the ranks of a gloo group."""
    value: T | None = None
    failure: Exception | None = None
    try:
        value = attempt()
    except Exception as error:
        failure = error
    said: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(said, None if failure is None else in_words(failure), group=group)
    if failure is not None:
        raise failure
    for rank, text in enumerate(said):
        if text is not None:
            raise UserError(f"rank {rank} cannot go on: {text}")
    return value  # type: ignore[return-value]


def runtime_of(group: dist.ProcessGroup, wanted: torch.device | str | None) -> Runtime:
    """Returns this rank's place in a group made by others, with our own groups beside it. Collective over these ranks
    only: others may make theirs. wanted: as in `device_for`."""
    control = group_beside(group, "gloo")
    device = on_all(control, lambda: device_for(group, wanted))
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    hosts: list[str] = [""] * world_size
    dist.all_gather_object(hosts, platform.node(), group=control)
    return Runtime(
        rank=rank,
        world_size=world_size,
        local_world_size=hosts.count(hosts[rank]),
        device=device,
        group=group,
        # Separate from vectors; with nccl, gloo carries what the host needs to know about ids.
        id_group=group_beside(group, "cpu:gloo,cuda:nccl" if by_nccl(group) else "gloo", carries="ids"),
        control=control,
        local_ranks=tuple(hosts[:number].count(host) for number, host in enumerate(hosts)),
    )


def place_on_host(store: dist.Store, rank: int, world_size: int) -> tuple[int, int]:
    """Returns this rank's number on its host and the number of ranks there, for launchers that set neither (srun,
    mpirun). Without it all ranks of a host would use its first GPU."""
    store.set(f"host/{rank}", host_id())
    hosts = [store.get(f"host/{other}").decode() for other in range(world_size)]
    return hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])


def choose_device(wanted: str, local_rank: int) -> torch.device:
    """Returns a rank's device. RuntimeFailure if there is none of the wanted kind."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise RuntimeFailure(
            "run.device is 'cuda', but torch sees no GPU. Run `dlrm-autoshard doctor`, or use cpu (`evaluate` and "
            "`predict` take --device cpu)."
        )
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def check_threads(config: RunConfig) -> None:
    """Raises RuntimeFailure if a rank would have more threads than the host has cores."""
    if config.threads_per_rank > (os.cpu_count() or 1):
        raise RuntimeFailure(
            f"run.threads_per_rank is {config.threads_per_rank}, but this host has {os.cpu_count()} cores."
        )


def name_of(device: torch.device) -> str:
    """Returns a name that differs between all devices of a job, except CPUs."""
    return "cpu" if device.type == "cpu" else f"GPU {torch.cuda.get_device_properties(device).uuid}"


def choose_backend(device: str, rank: int, world_size: int, store: dist.Store) -> str:
    """Returns nccl if every rank has its own GPU, whatever GPUs each can see; else gloo, which allows two ranks on one
    GPU. Equal on all ranks, which wait for each other here. device: this rank's `name_of`."""
    store.set(f"device/{rank}", device)
    devices = [store.get(f"device/{other}").decode() for other in range(world_size)]
    if "cpu" in devices and len(set(devices)) > 1:
        other = next(rank for rank, one in enumerate(devices) if one != "cpu")
        raise RuntimeFailure(
            f"rank {devices.index('cpu')} sees no GPU, but rank {other} has one: all must compute on GPUs, or none. "
            "Run `dlrm-autoshard doctor` on that rank's host, or set run.device: cpu."
        )
    return "nccl" if len(set(devices)) == world_size and "cpu" not in devices else "gloo"


@contextlib.contextmanager
def _process_kept() -> Iterator[None]:
    """Restores torch's threads and the environment at the end, because the process may be a notebook."""
    threads, environment = torch.get_num_threads(), dict(os.environ)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        for name in ("GLOO_SOCKET_IFNAME", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT"):
            if name not in environment:
                os.environ.pop(name, None)


def keep_freed_memory() -> None:
    """Tells glibc to keep freed buffers: a step's tensors have the last one's sizes, and returning pages only to fault
    them in again costs several percent of a step."""
    trim_threshold, mmap_threshold = -1, -3
    with contextlib.suppress(OSError, AttributeError):  # not glibc: nothing to tune
        libc = ctypes.CDLL("libc.so.6")
        # glibc before 2.35 allows at most 32 MiB; and setting one threshold stops the other from growing by itself.
        if libc.mallopt(mmap_threshold, 1 << 30) or libc.mallopt(mmap_threshold, 1 << 25):
            libc.mallopt(trim_threshold, 1 << 30)
