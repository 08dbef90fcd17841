"""Inspects process groups made by others, and makes more groups of their ranks.

device = device_for(group, None)             # device of the tables: a GPU if NCCL carries its tensors, else the CPU
control = group_beside(group, "gloo")        # with the group's timeout
"""

# torch names a group made by only its own ranks after a counter that each rank keeps, and releases count differently.
# Ranks whose counters differ (one is in another group, too) wait for each other in vain. Our names consist of the
# group's store prefix and the number of calls for that group, which are equal on all of its ranks.

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from dlrm_autoshard.errors import BagsError, UserError
from dlrm_autoshard.formats.launcher_numbers import launcher_number

# Our backends: gloo and NCCL on the store given as `pg_options`.
_GLOO, _NCCL = "dlrm_autoshard_gloo", "dlrm_autoshard_nccl"


def new_group(**how: Any) -> dist.ProcessGroup:
    """Makes a group that this rank is in; arguments as in torch's `new_group`, which returns a number to other
    ranks."""
    group = dist.new_group(**how)
    if not isinstance(group, dist.ProcessGroup):
        raise ValueError(f"this rank is not in the group of {how.get('ranks')}")
    return group


_BESIDE: WeakKeyDictionary[dist.ProcessGroup, dict[object, dist.ProcessGroup]] = WeakKeyDictionary()
"""Groups made beside a group. torch keeps a group with its threads and connections until the end, so they are shared by
everything that is made of one group."""


def group_beside(
    group: dist.ProcessGroup, backend: str, ranks: Sequence[int] | None = None, *, carries: str = ""
) -> dist.ProcessGroup:
    """Returns another group of the same ranks with the same timeout; made at the first call for what it carries.
    Collective over these ranks only: others may make theirs meanwhile.

    backend: "gloo", or "cpu:gloo,cuda:nccl". ranks: a subset, by numbers in `group`; the other ranks make groups of
    their own.
    """
    key, made = (backend, None if ranks is None else tuple(ranks), carries), _BESIDE.setdefault(group, {})
    if key not in made:
        made[key] = _made_beside(group, backend, ranks)
    return made[key]


def _made_beside(group: dist.ProcessGroup, backend: str, ranks: Sequence[int] | None) -> dist.ProcessGroup:
    _register()
    store = group.get_group_store()
    made = store.add(f"dlrm_autoshard/groups/{dist.get_rank(group)}", 1)  # a key per rank, as all make equal calls
    everybody = dist.get_process_group_ranks(group)
    parts = "" if ranks is None else f"/{min(ranks)}"
    return new_group(
        ranks=everybody if ranks is None else [everybody[rank] for rank in ranks],
        backend=backend.replace("gloo", _GLOO).replace("nccl", _NCCL),
        timeout=timeout_of(group),
        pg_options=dist.PrefixStore(f"dlrm_autoshard/group/{made}{parts}", store),
        use_local_synchronization=True,
    )


def group_or_alone(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    """Returns the group, or torch.distributed's default group, which is made for this process alone if there is none.
    BagsError if this process is one of several ranks, each of which would train alone."""
    if not isinstance(group, dist.ProcessGroup | None):  # torch gives a number to ranks outside a new group
        raise BagsError(f"group is {group!r}: this rank is not in it. Only the ranks of a group make its tables.")
    if not dist.is_initialized():
        ranks = launcher_number("WORLD_SIZE", 1)
        if ranks > 1:
            raise BagsError(
                f"{ranks} ranks were started, but this one has no process group and would train alone: call "
                "torch.distributed.init_process_group() first."
            )
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    group = group or dist.group.WORLD
    assert group is not None
    return group


def _register() -> None:
    backends = dist.Backend
    if _GLOO in backends.backend_list:
        return
    backends.register_backend(_GLOO, _gloo, extended_api=True, devices=["cpu"])
    backends.register_backend(_NCCL, _nccl, extended_api=True, devices=["cuda"])
    # Registered backends all have one type, but a group holds one backend per type.
    backends.backend_type_map[_GLOO] = dist.ProcessGroup.BackendType.GLOO
    backends.backend_type_map[_NCCL] = dist.ProcessGroup.BackendType.NCCL


@atexit.register
def wait_for_gloo(seconds: float = 10.0) -> None:
    """Waits until gloo's threads rest, at most `seconds`. A thread that still holds its last collective when the
    interpreter exits aborts the process after a successful training (pytorch issue 190489)."""
    deadline, before, now = time.monotonic() + seconds, [""], _gloo_threads()
    # A thread waiting for Python's lock sleeps, too; but one at rest would not have woken for the lock.
    while (now != before or any("State:\tS" not in thread for thread in now)) and time.monotonic() < deadline:
        time.sleep(0.001)
        before, now = now, _gloo_threads()


def _gloo_threads() -> list[str]:
    """Returns Linux's status of each gloo thread: its state, and how often it has slept."""
    threads = []
    for status in sorted(Path("/proc/self/task").glob("*/status")):
        with contextlib.suppress(OSError):  # the thread has ended meanwhile
            if (text := status.read_text()).startswith("Name:\tpt_gloo"):
                threads.append(text)
    return threads


def _gloo(made: Any, store: dist.Store) -> Any:
    place = dist.PrefixStore("cpu", store)
    return dist.ProcessGroupGloo(place, made.group_rank, made.group_size, made.timeout)


def _nccl(made: Any, store: dist.Store) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = made.timeout
    options.global_ranks_in_group = made.global_ranks_in_group
    options.group_name = made.group_id
    return dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), made.group_rank, made.group_size, options)


def by_nccl(group: dist.ProcessGroup) -> bool:
    """Returns whether NCCL carries the group's GPU tensors, whatever its name ("cpu:gloo,cuda:nccl")."""
    return _backend(group, "cuda") == "nccl"


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """Returns the group's timeout; the shorter one if GPU and host tensors have different ones."""
    timeouts = [group._get_backend(device).options._timeout for device in group._device_types]
    return min(timeouts, default=dist.default_pg_timeout)


def device_for(group: dist.ProcessGroup, wanted: torch.device | str | None) -> torch.device:
    """Returns the wanted device, a GPU with its index; None: the current GPU if NCCL carries its tensors, else the CPU.
    UserError if the group cannot carry its tensors."""
    if wanted is None:
        wanted = "cuda" if by_nccl(group) and torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda" and device.index is None:
        if not torch.cuda.is_available():
            raise UserError("device is 'cuda', but torch sees no GPU. Run `dlrm-autoshard doctor`, or use the CPU.")
        device = torch.device("cuda", torch.cuda.current_device())
    if _backend(group, device.type) is None:
        there = " and ".join(f"'{name}'" for name in ("cpu", "cuda") if _backend(group, name) is not None)
        raise UserError(
            f"device is '{device.type}', but the process group carries only tensors of {there}: give device={there}, "
            'or call init_process_group("cpu:gloo,cuda:nccl").'
        )
    return device


def _backend(group: dist.ProcessGroup, device: str) -> str | None:
    """Returns the backend for tensors of this device type; None if there is none."""
    if torch.device(device) not in group._device_types:
        return None
    return str(group._get_backend(torch.device(device)).name())
