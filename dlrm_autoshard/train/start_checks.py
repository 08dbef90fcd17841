"""What a job's settings ask of its data and its machine: refused before anything is planned, measured or allocated."""

from __future__ import annotations

import itertools

import torch
from torch import nn

from dlrm_autoshard.config import Config
from dlrm_autoshard.config_data import SyntheticData
from dlrm_autoshard.data.batch import DataSource
from dlrm_autoshard.distributed.ranks.free_memory import free_memory
from dlrm_autoshard.distributed.tables.storage import check_optimizer
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.words import gib
from dlrm_autoshard.train.selection import Selection

_COPIES = 4
"""Of the dense weights: themselves, gradients and at most two of optimizer state."""
_MEASURED = 64  # samples


def check_settings(config: Config, source: DataSource, device: torch.device) -> None:
    """UserError where something is chosen by data, or computed on a device, that has no such thing."""
    selection = Selection(config.checkpoint.keep_best, config.train.early_stopping)
    if selection.wanted and source.num_samples("val") == 0:
        raise UserError(
            "checkpoint.keep_best and train.early_stopping choose by evaluations on the val split, and this data "
            "has no val samples (choosing by the test split would make its metrics too good)."
        )
    check_optimizer(config.tables.optimizer.name, device)


def check_batch_norm(model: nn.Module, samples: int, first: int, global_batch: int, world_size: int) -> None:
    """UserError where an epoch's last batch gives a rank one sample, of which BatchNorm can make no statistics. first:
    the sample from which the epoch at hand goes on."""
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules()):
        return
    for start in (0, first):
        last = (samples - start) % global_batch or global_batch
        share = -(-last // world_size)
        rank = next((r for r in range(world_size) if min(last, (r + 1) * share) - r * share == 1), None)
        if rank is not None:
            raise UserError(
                f"the model has BatchNorm, and the last of {samples:,} training samples come to 1 on rank {rank} (a "
                f"batch of {last} on {world_size} rank(s)), of which it can make no statistics. Change "
                "train.batch_size, or leave a sample out."
            )


def free_and_sharers(device: torch.device, host_ranks: int) -> tuple[int, int]:
    """Bytes free where batches and dense weights will be, and how many ranks take from them."""
    if device.type != "cuda":
        return free_memory(), host_ranks
    return free_memory(device), -(-host_ranks // torch.cuda.device_count())


def check_sizes(config: Config, source: DataSource, world_size: int, free_bytes: int, host_ranks: int = 1) -> None:
    """UserError where the batches or dense layers of a host's ranks need more than is free on it. Estimates from below:
    what passes may still be too much, what is refused surely is."""
    samples = source.num_samples("train")
    batch_size = min(config.train.batch_size, -(-samples // world_size))
    pooling = _ids_per_sample(config, source)
    each = f"on each of the {host_ranks} ranks that share its memory" if host_ranks > 1 else "on each rank"
    vectors = sum(table.embedding_dim for table in source.tables)
    widest = max(config.model.dense_arch_layer_sizes + config.model.over_arch_layer_sizes)
    per_sample = 4 * (source.num_dense + len(source.tables) + 2 * vectors + 2 * widest) + 8 * pooling
    bottom = [source.num_dense, *config.model.dense_arch_layer_sizes]
    weights = sum(a * b for sizes in (bottom, config.model.over_arch_layer_sizes) for a, b in itertools.pairwise(sizes))
    if config.model.factory is None and host_ranks * 4 * _COPIES * weights > free_bytes:
        raise UserError(
            f"the dense layers have {weights:,} weights and need at least {gib(4 * _COPIES * weights)} {each}, "
            f"but {gib(free_bytes)} are free. Make model.dense_arch_layer_sizes or over_arch_layer_sizes smaller."
        )
    if host_ranks * batch_size * per_sample > free_bytes:
        raise UserError(
            f"a batch of {batch_size:,} samples needs at least {gib(batch_size * per_sample)} {each}, but "
            f"{gib(free_bytes)} are free. Lower train.batch_size ({config.train.batch_size:,})."
        )


def _ids_per_sample(config: Config, source: DataSource) -> float:
    """As configured, or as in the first samples."""
    if isinstance(config.data, SyntheticData):
        return sum(table.mean_pooling for table in config.data.tables)
    count = min(_MEASURED, source.num_samples("train"))
    return int(source.read("train", 0, 0, count).lengths_TB.sum()) / max(1, count)
