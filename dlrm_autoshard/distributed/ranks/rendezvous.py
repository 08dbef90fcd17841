"""Gives the ranks of one start of a job a store without entries of earlier starts.

When torchrun restarts ranks, its store still has the addresses of the old ones, and a new rank that reads an old
address cannot connect. So the ranks first agree on a name that only this start knows. Restart counts would not do: each
machine's torchrun counts its own.
"""

from __future__ import annotations

import os
import platform
import re
import secrets
import socket
import time
from datetime import timedelta

from torch.distributed import DistError, PrefixStore, Store
from torch.distributed.rendezvous import rendezvous

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.sentences import show


class RendezvousFailed(UserError):
    """Ranks of this job did not arrive in time."""


def fresh_store(rank: int, world_size: int, timeout: timedelta) -> Store:
    """Returns the store for `init_process_group`, under torchrun's environment. Every rank calls it once per start.

    rank 1: "rank 1 here, my number is 7f3a"         hello/1 = 7f3a
    rank 0: answers every number it sees             name/7f3a = c09e      (nobody reads answers to old numbers)
    rank 1: "got c09e"                               here/c09e/1
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    if not (host and re.fullmatch("[0-9]{1,5}", port) and 0 < int(port) < 2**16):
        raise RendezvousFailed(
            f"RANK is set in this process's environment, but MASTER_ADDR is {show(host)} and MASTER_PORT {show(port)}; "
            "launchers set them to rank 0's host and a free port there. Start ranks with `dlrm-autoshard train` or "
            "torchrun, or unset RANK to train alone."
        )
    _check_name(host, rank, world_size)
    try:
        shared, _, _ = next(rendezvous("env://", rank, world_size, timeout=timeout))
        store = PrefixStore("dlrm_autoshard", shared)
        number = secrets.token_hex(8)
        if rank == 0:
            name = number
            _gather(store, name, world_size, timeout)
        else:
            store.set(f"hello/{rank}", number)
            name = store.get(f"name/{number}").decode()  # waits for it
            store.set(f"here/{name}/{rank}", "")
    except RendezvousFailed:
        raise
    except (DistError, ValueError) as error:  # the network, or the environment
        raise RendezvousFailed(
            f"rank {rank} of {world_size} did not reach the others at {host}:{port}: {str(error).splitlines()[0]}. Is "
            "rank 0 running, and can this host reach it? See rank 0's output, or raise run.collective_timeout_seconds."
        ) from error
    return PrefixStore(name, shared)


def _check_name(host: str, rank: int, world_size: int) -> None:
    """Uses 127.0.0.1 if all ranks are on one host, whose name may not resolve in a container. With several hosts raises
    RendezvousFailed at once, as waiting would be in vain."""
    try:
        socket.getaddrinfo(host, None)
    except OSError as error:
        if os.environ.get("LOCAL_WORLD_SIZE") == str(world_size):
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            return
        raise RendezvousFailed(
            f"rank {rank} of {world_size} should meet the others at '{host}' (MASTER_ADDR), a name that resolves to no "
            f"address on '{platform.node()}'. Add it to /etc/hosts or DNS there, or use the machine's address."
        ) from error


def _gather(store: Store, name: str, world_size: int, timeout: timedelta) -> None:
    missing = list(range(1, world_size))
    deadline = time.monotonic() + timeout.total_seconds()
    while missing:
        for rank in missing:
            if store.check([f"hello/{rank}"]):
                store.set(f"name/{store.get(f'hello/{rank}').decode()}", name)
        missing = [rank for rank in missing if not store.check([f"here/{name}/{rank}"])]
        if time.monotonic() > deadline:
            raise RendezvousFailed(
                f"rank(s) {', '.join(map(str, missing))} of {world_size} did not arrive within "
                f"{timeout.total_seconds():g} s. See their output, or raise run.collective_timeout_seconds."
            )
        time.sleep(0.01)
