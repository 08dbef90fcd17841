"""Makes two hosts with a slow link between them out of network namespaces: real sockets, a real queue.

why_not = cannot_make_link()                       # a reason, or None
with slow_link(mbit_per_s=50) as link:
    link.run(["python", "-m", ...], hosts=(0, 0, 0, 1), timeout=60)      # a process for each rank, on its host
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dlrm_autoshard.errors import UserError


class LinkError(UserError):
    """A link cannot be made, or a rank on it fails; the message says why."""


DEVICE, ADDRESSES = "link0", ("10.213.77.1", "10.213.77.2")


@dataclass(frozen=True)
class Link:
    """A link between two hosts. hosts: names of the two namespaces. made_by: what slows the link down, in words."""

    hosts: tuple[str, str]
    made_by: str

    def run(self, command: Sequence[str], hosts: Sequence[int], timeout: float) -> None:
        """Runs a process for each rank, with torchrun's environment variables; hosts: of each rank. LinkError quotes
        the last output of a rank that fails."""
        port = free_port()
        ranks = []
        for rank, host in enumerate(hosts):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(len(hosts)),
                "LOCAL_RANK": str(hosts[:rank].count(host)),
                "LOCAL_WORLD_SIZE": str(list(hosts).count(host)),
                "MASTER_ADDR": ADDRESSES[0],
                "MASTER_PORT": str(port),
                "GLOO_SOCKET_IFNAME": DEVICE,
                "OMP_NUM_THREADS": "1",
            }
            inside = ["ip", "netns", "exec", self.hosts[host], *command]
            ranks.append(
                subprocess.Popen(inside, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
            )
        deadline = time.monotonic() + timeout
        try:
            for rank, process in enumerate(ranks):
                _, said = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                if process.returncode != 0:
                    raise LinkError(f"rank {rank} behind the slow link failed: {said.strip()[-600:]}")
        except subprocess.TimeoutExpired as error:
            raise LinkError(f"ranks with a slow link between them were not done after {timeout:g} s.") from error
        finally:
            for process in ranks:
                process.kill()
                process.wait()


@contextlib.contextmanager
def slow_link(mbit_per_s: float, delay_ms: float = 1.0, *, both_ways: bool = False) -> Iterator[Link]:
    """Yields a link whose second host has a slow uplink. both_ways: and a slow downlink.

    netem limits the rate and adds the delay where the kernel has it; else, or with delay_ms=0, tbf limits the rate
    alone. Needs root and iproute2. Both hosts are removed at the end.
    """
    hosts = (f"autoshard-a-{os.getpid()}", f"autoshard-b-{os.getpid()}")
    try:
        for host in hosts:
            _ip("netns", "add", host)
            _ip("-n", host, "link", "set", "lo", "up")
        _ip("link", "add", DEVICE, "netns", hosts[0], "type", "veth", "peer", "name", DEVICE, "netns", hosts[1])
        for host, address in zip(hosts, ADDRESSES, strict=True):
            _ip("-n", host, "addr", "add", f"{address}/24", "dev", DEVICE)
            _ip("-n", host, "link", "set", DEVICE, "up")
        rate = f"{mbit_per_s:g}mbit"
        burst = f"{max(64, mbit_per_s / 8):.0f}kb"  # 1 ms of it
        for host in hosts if both_ways else hosts[1:]:
            uplink = ["tc", "-n", host, "qdisc", "add", "dev", DEVICE, "root"]
            made_by = f"netem, {mbit_per_s:g} Mbit/s and {delay_ms:g} ms up"
            netem = ["netem", "rate", rate, "delay", f"{delay_ms:g}ms", "limit", "10000"]
            if not delay_ms or not _works([*uplink, *netem]):
                made_by = f"tbf, {mbit_per_s:g} Mbit/s up, no delay" + " (this kernel has no netem)" * bool(delay_ms)
                if not _works([*uplink, "tbf", "rate", rate, "burst", burst, "limit", "16mb"]):
                    raise LinkError("this kernel can slow no link down: it has neither netem nor tbf.")
        yield Link(hosts, made_by.replace(" up", " each way") if both_ways else made_by)
    finally:
        for host in hosts:  # the devices go with them
            _works(["ip", "netns", "del", host])


def cannot_make_link() -> str | None:
    """Returns why this machine cannot make a slow link; None where it can."""
    if os.name != "posix" or not os.path.exists("/proc/self/ns/net"):
        return "network namespaces are Linux's."
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"`{tool}` is missing: install iproute2."
    if os.geteuid() != 0:
        return "making network namespaces needs root."
    probe = f"autoshard-probe-{os.getpid()}"
    made = _works(["ip", "netns", "add", probe])
    _works(["ip", "netns", "del", probe])
    return None if made else "this machine lets nobody make network namespaces (a container, perhaps)."


def free_port() -> int:
    """Returns a TCP port that is free here, and thus in a new namespace."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise LinkError(f"`ip {' '.join(arguments)}` failed: {done.stderr.strip()}")


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
