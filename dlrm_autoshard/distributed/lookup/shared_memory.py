"""Collectives between ranks of one host through mapped memory, in a tenth of the time of TCP over loopback.

link = connect(group)                        # None if the ranks are not all on one host: use the group itself
link.all_to_all("vectors", received, sent, receive_splits, send_splits)()     # calling the result waits
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import socket
import struct
import sys
from collections import defaultdict, deque
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, pairwise
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from dlrm_autoshard.errors import UserError

CHANNELS = ("lengths", "values", "weights", "vectors", "sequences", "reduce", "reduced")
_REGION_BYTES = 1 << 34  # of address space; memory is used only where something was written
_READY, _DONE, _OUT_OF_STEP = 0, 1, 2
_MESSAGE = struct.Struct("<BBqqq")  # channel, event, number of the exchange, first byte, number of bytes
_DOES = {
    **dict.fromkeys(("lengths", "values", "weights"), "looks a batch up"),
    **dict.fromkeys(("vectors", "sequences"), "is in a lookup or a backward pass that rank {} is not in"),
    **dict.fromkeys(("reduce", "reduced"), "adds up dense gradients"),
}
Put = Callable[[int, Tensor], object]
"""Type of a function that writes a rank's part into a one-dimensional tensor."""


class OutOfStep(UserError):
    """Ranks do not look up and go backward in the same order."""


class RankGone(RuntimeError):
    """A rank of this host ended, or did not answer in time."""


class SharedMemory:
    """The mapped memory of all ranks, including this one, and a socket to each other rank.

    Each rank owns a sparse memory file with a region per channel and passes its descriptor over Unix sockets. A rank
    writes to its own region and sends READY to each reader; a reader copies and answers DONE; a region is written again
    only after all DONEs. A channel carries one message at a time: an unread message is read before the next is sent.
    Messages for other channels are kept, so channels can be waited for in any order. Nothing has a name in the file
    system, so a crash leaves nothing behind, and a dead rank's sockets close, which ends all waits.
    """

    def __init__(self, rank: int, memories: list[Tensor], sockets: dict[int, socket.socket]) -> None:
        self.rank, self.world_size = rank, len(memories)
        self._memories, self._sockets = memories, sockets
        self._inbox: dict[tuple[int, int, int], deque[tuple[int, int]]] = defaultdict(deque)
        self._readers: dict[int, list[int]] = {}  # channel -> ranks that owe a DONE
        self._begun = [0] * len(CHANNELS)  # exchanges that this rank has written for
        self._unread: dict[str, Callable[[], object]] = {}  # channel -> reads its last message

    def all_to_all(
        self, channel: str, received: Tensor, sent: Tensor | Put, receive_splits: list[int], send_splits: list[int]
    ) -> Callable[[], Tensor]:
        """Exchanges one-dimensional tensors; splits in elements, by rank. sent: by rank, or a function that writes a
        rank's part; may be reused at once."""
        self._read_last(channel)
        put = sent if not isinstance(sent, Tensor) else _copies(sent, send_splits)
        starts, arrivals = [0, *accumulate(send_splits)], [0, *accumulate(receive_splits)]
        region = self.write(channel, starts[-1], received.dtype)
        for rank in self._others:
            if send_splits[rank]:
                part = region[starts[rank] : starts[rank + 1]]
                put(rank, part)
                self.tell(channel, rank, part)
        if send_splits[self.rank]:
            put(self.rank, received[arrivals[self.rank] : arrivals[self.rank + 1]])

        def read() -> None:
            for rank in self._others:
                if receive_splits[rank]:
                    arrived = self.read(channel, rank, received.dtype)
                    if len(arrived) != receive_splits[rank]:
                        raise UserError(
                            f"rank {rank} sent {len(arrived):,} {channel} where rank {self.rank} expected "
                            f"{receive_splits[rank]:,}: all ranks must look up equally many samples in a step."
                        )
                    received[arrivals[rank] : arrivals[rank + 1]].copy_(arrived)
                    self.done(channel, rank)

        return self._once(channel, read, received)

    def all_reduce(
        self, values: Tensor, over_hosts: Callable[[Tensor], object] = lambda own: None
    ) -> Callable[[], Tensor]:
        """Sums in place in rank order: each rank sums its own slice, then takes the others' sums. over_hosts: adds the
        other hosts' values of that slice, in place."""
        self._read_last("reduce")
        region = self.write("reduce", values.numel(), values.dtype)
        region.copy_(values)
        bounds = [values.numel() * rank // self.world_size for rank in range(self.world_size + 1)]
        slices = [slice(a, b) for a, b in pairwise(bounds)]
        own = slices[self.rank]
        for rank in self._others:
            self.tell("reduce", rank, region[slices[rank]])

        def read() -> None:
            total = self.write("reduced", own.stop - own.start, values.dtype)
            for rank in range(self.world_size):
                term = region[own] if rank == self.rank else self.read("reduce", rank, values.dtype)
                if rank == 0:
                    total.copy_(term)
                else:
                    total += term
            over_hosts(total)
            values[own].copy_(total)
            for rank in self._others:
                self.done("reduce", rank)
                self.tell("reduced", rank, total)
            for rank in self._others:
                values[slices[rank]].copy_(self.read("reduced", rank, values.dtype))
                self.done("reduced", rank)

        return self._once("reduce", read, values)

    def _once(self, channel: str, read: Callable[[], object], result: Tensor) -> Callable[[], Tensor]:
        """Returns a function that reads at its first call, unless the channel's next message forced it earlier."""

        def finish() -> Tensor:
            if self._unread.get(channel) is read:
                self._read_last(channel)
            return result

        self._unread[channel] = read
        return finish

    def _read_last(self, channel: str) -> None:
        """Reads the channel's last message if unread, because the next one replaces it."""
        read = self._unread.pop(channel, None)
        if read is not None:
            read()

    # -- one message -------------------------------------------------------------------------------------------------

    def write(self, channel: str, numel: int, dtype: torch.dtype) -> Tensor:
        """Returns this rank's region to write to, once all have read the last message."""
        number = CHANNELS.index(channel)
        for rank in self._readers.pop(number, ()):
            self._await(rank, number, _DONE)
        self._begun[number] += 1
        start, size = number * _REGION_BYTES, numel * dtype.itemsize
        if size > _REGION_BYTES:
            raise UserError(f"{size / 2**30:.1f} GiB is more than one exchange can hold; lower train.batch_size.")
        return self._memories[self.rank][start : start + size].view(dtype)

    def tell(self, channel: str, rank: int, part: Tensor) -> None:
        """Announces `part` of the written region to `rank`."""
        number = CHANNELS.index(channel)
        first = part.data_ptr() - self._memories[self.rank].data_ptr()
        self._readers.setdefault(number, []).append(rank)
        self._send(rank, _MESSAGE.pack(number, _READY, self._begun[number], first, part.nbytes))

    def read(self, channel: str, rank: int, dtype: torch.dtype) -> Tensor:
        """Returns the message of `rank` as a view of its memory, valid until `done`."""
        first, size = self._await(rank, CHANNELS.index(channel), _READY)
        return self._memories[rank][first : first + size].view(dtype)

    def done(self, channel: str, rank: int) -> None:
        self._send(rank, _MESSAGE.pack(CHANNELS.index(channel), _DONE, 0, 0, 0))

    @property
    def _others(self) -> list[int]:
        """Other ranks, starting with the next one, so that not all read from the same."""
        return [(self.rank + step) % self.world_size for step in range(1, self.world_size)]

    def _await(self, rank: int, channel: int, event: int) -> tuple[int, int]:
        waiting = self._inbox[rank, channel, event]
        while not waiting:
            try:
                message = self._sockets[rank].recv(_MESSAGE.size, socket.MSG_WAITALL)
            except BlockingIOError as error:
                raise RankGone(
                    f"rank {rank} did not answer in time: it hangs, or is far slower than this one."
                ) from error
            except ConnectionError:
                message = b""
            if len(message) < _MESSAGE.size:
                raise RankGone(f"rank {rank} has ended: its connection closed. Its own output says why.")
            number, kind, exchange, first, size = _MESSAGE.unpack(message)
            if kind == _OUT_OF_STEP:
                raise OutOfStep(_out_of_step(size, number, rank, first))
            if exchange > self._begun[number]:
                self._say_out_of_step(rank, number, channel)
            self._inbox[rank, number, kind].append((first, size))
        return waiting.popleft()

    def _say_out_of_step(self, rank: int, does: int, awaited: int) -> NoReturn:
        """Reports the mismatch to all ranks. All ranks send in one order, so a message for an exchange that this rank
        has not begun means that the awaited one comes later or never."""
        for other in self._others:
            self._send(other, _MESSAGE.pack(does, _OUT_OF_STEP, 0, awaited, rank))
        raise OutOfStep(_out_of_step(rank, does, self.rank, awaited))

    def _send(self, rank: int, message: bytes) -> None:
        # Ignores ranks that have left: they may have finished. If one owes a message, waiting for it reports that.
        with contextlib.suppress(ConnectionError):
            self._sockets[rank].sendall(message)


def _out_of_step(rank: int, does: int, waiting: int, awaited: int) -> str:
    return (
        f"rank {rank} {_DOES[CHANNELS[does]].format(waiting)}, but rank {waiting} waits for its {CHANNELS[awaited]}: "
        "they are out of step. All ranks must look up equally many batches, and all or none of them call backward() "
        "after each: if one rank skips a loss, all must."
    )


def _copies(sent: Tensor, splits: list[int]) -> Put:
    parts = sent.split(splits)
    return lambda rank, into: into.copy_(parts[rank])


def connect(group: dist.ProcessGroup) -> SharedMemory | None:
    """Connects the ranks of a gloo group, with its timeout. Collective; None on every rank if any cannot share
    memory."""
    rank, world_size = dist.get_rank(group), dist.get_world_size(group)
    if world_size == 1:
        return None
    timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    name = f"\0dlrm-autoshard-{secrets.token_hex(8)}"  # abstract socket, without a file
    listener = None
    with contextlib.suppress(OSError, AttributeError):
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(name)
        listener.listen(world_size)
    known: list[tuple[str, str] | None] = [None] * world_size
    dist.all_gather_object(known, (host_id() if listener else f"none {rank}", name), group=group)
    if listener is None or len({host for host, _ in filter(None, known)}) > 1:
        return None
    link = None
    with (
        listener,
        contextlib.suppress(Exception),
    ):  # whatever fails here (memory, descriptors), the others are told below
        _limit_waits(listener, timeout)
        link = _join(rank, [name for _, name in filter(None, known)], listener, timeout)
    made: list[bool] = [False] * world_size
    dist.all_gather_object(made, link is not None, group=group)
    return link if all(made) else None


def _join(rank: int, names: list[str], listener: socket.socket, timeout: timedelta) -> SharedMemory:
    """Connects to all ranks: higher ranks connect to lower ones, and both send their memory's descriptor."""
    memory = os.memfd_create("dlrm-autoshard")
    os.ftruncate(memory, len(CHANNELS) * _REGION_BYTES)
    hello = struct.Struct("<q")
    sockets: dict[int, socket.socket] = {}
    descriptors = {rank: memory}
    for other in range(rank):
        sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        _limit_waits(sockets[other], timeout)
        sockets[other].connect(names[other])
        socket.send_fds(sockets[other], [hello.pack(rank)], [memory])
    for _ in range(rank + 1, len(names)):
        caller, _ = listener.accept()
        _limit_waits(caller, timeout)
        message, received, *_ = socket.recv_fds(caller, hello.size, 1)
        (other,) = hello.unpack(message)
        sockets[other], descriptors[other] = caller, received[0]
        socket.send_fds(caller, [hello.pack(rank)], [memory])
    for other in range(rank):
        _, received, *_ = socket.recv_fds(sockets[other], hello.size, 1)
        descriptors[other] = received[0]
    memories = [_mapped(descriptors[other]) for other in range(len(names))]
    return SharedMemory(rank, memories, sockets)


def _limit_waits(connection: socket.socket, timeout: timedelta) -> None:
    """Sets the kernel's timeout; Python's own would poll before each receive, which is another system call."""
    whole = int(timeout.total_seconds())
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", whole, timeout.microseconds))


def _mapped(descriptor: int) -> Tensor:
    mapped = mmap.mmap(descriptor, len(CHANNELS) * _REGION_BYTES)
    os.close(descriptor)
    return torch.frombuffer(mapped, dtype=torch.uint8)


def host_id() -> str:
    """Returns an id that is equal for processes that can share memory: same kernel, same network namespace."""
    if sys.platform != "linux":
        return f"{sys.platform} {os.getpid()}"
    return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/net")
