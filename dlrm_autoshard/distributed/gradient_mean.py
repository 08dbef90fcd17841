"""The dense part's mean gradient through memory that ranks of one host share: a hook for DistributedDataParallel.

tower.register_comm_hook(bags, gradient_mean)        # a DistributedDataParallel, a ShardedEmbeddingBags
"""

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from dlrm_autoshard.distributed.bags import ShardedEmbeddingBags

# No `from __future__ import annotations`: DDP compares a hook's annotations with its own types.


def gradient_mean(bags: ShardedEmbeddingBags, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Of this bucket, over the ranks of `bags`, in place. Where they don't share memory (several hosts, GPUs) it is
    DDP's own, by `bags`' process group."""
    link = bags.sharded.link
    if link is None or bucket.buffer().device.type != "cpu":
        return allreduce_hook(bags.runtime.group, bucket)
    mean = link.all_reduce(bucket.buffer().div_(bags.world_size))()
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(mean)
    return done
