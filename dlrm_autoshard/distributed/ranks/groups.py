"""More process groups of the same ranks, which meet by a name of ours.

    control = group_beside(group, "gloo")

torch names a group that only its own ranks make by a hash over a count that every rank keeps for itself, and each
release counts something else. Ranks whose counts differ (one is in a group more) wait for each other in vain. Our name
is the group's own prefix of the store, and how often this was called for that group, so all its ranks know it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

# Backends as torch sees them: gloo and NCCL, that meet where `pg_options`, a store, says.
_GLOO, _NCCL = "dlrm_autoshard_gloo", "dlrm_autoshard_nccl"


def group_beside(group: dist.ProcessGroup, backend: str, timeout: timedelta | None = None) -> dist.ProcessGroup:
    """Make another group of the same ranks. Collective over these ranks alone: others may be making theirs.

    backend: "gloo", or "cpu:gloo,cuda:nccl".
    """
    _register()
    store = group.get_group_store()
    made = store.add(f"dlrm_autoshard/groups/{dist.get_rank(group)}", 1)  # a key a rank: calls are alike on all
    return dist.new_group(
        dist.get_process_group_ranks(group),
        backend=backend.replace("gloo", _GLOO).replace("nccl", _NCCL),
        timeout=timeout,
        pg_options=dist.PrefixStore(f"dlrm_autoshard/group/{made}", store),
        use_local_synchronization=True,
    )


def _register() -> None:
    backends = dist.Backend
    if _GLOO in backends.backend_list:
        return
    backends.register_backend(_GLOO, _gloo, extended_api=True, devices=["cpu"])
    backends.register_backend(_NCCL, _nccl, extended_api=True, devices=["cuda"])
    # Registered backends are all of one type, and a group holds one backend of each type.
    backends.backend_type_map[_GLOO] = dist.ProcessGroup.BackendType.GLOO
    backends.backend_type_map[_NCCL] = dist.ProcessGroup.BackendType.NCCL


def _gloo(made: Any, store: dist.Store) -> Any:
    place = dist.PrefixStore("cpu", store)
    return dist.ProcessGroupGloo(place, made.group_rank, made.group_size, made.timeout)


def _nccl(made: Any, store: dist.Store) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = made.timeout
    options.global_ranks_in_group = made.global_ranks_in_group
    options.group_name = made.group_id
    return dist.ProcessGroupNCCL(dist.PrefixStore("cuda", store), made.group_rank, made.group_size, options)
