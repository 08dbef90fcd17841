"""`python -m dlrm_autoshard.distributed.ranks.smoke`: tests the kernel and an exchange of two ranks; prints JSON.

`dlrm-autoshard doctor` runs it in a subprocess, because a wrong library kills its process instead of raising.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from dlrm_autoshard.distributed.ranks.spawn import RankError, run_ranks


def train_one_row() -> str:
    """Does one SGD step on a table of ones; the looked-up row must move by exactly the learning rate."""
    from dlrm_autoshard.config import TableOptimizerConfig
    from dlrm_autoshard.distributed.tables.tbe import make_tbe

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    weights, sgd = torch.ones(4, 8, device=device), TableOptimizerConfig(name="sgd", lr=0.25)
    tables = make_tbe([(4, 8)], {"weights": (weights.view(-1), [0])}, sgd, "fp32", "sum", device)
    ids, offsets = torch.tensor([2], device=device), torch.tensor([0, 1], device=device)
    tables(ids, offsets).sum().backward()
    expected = torch.ones(4, 8)
    expected[2] = 0.75
    if not torch.equal(weights.cpu(), expected):
        raise ArithmeticError(f"one SGD step gave {weights.cpu()[:, 0].tolist()} instead of {expected[:, 0].tolist()}")
    return f"one SGD step on {device.type} is exact"


def exchange(rank: int, world_size: int) -> list[float]:
    """Exchanges one number with every rank."""
    received = torch.empty(world_size)
    dist.all_to_all_single(received, torch.full((world_size,), float(rank)))
    return received.tolist()


def main() -> None:
    gpus = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    facts: dict[str, Any] = {
        "kernel": None,
        "kernel_error": None,
        "exchange_error": None,
        "nccl": dist.is_nccl_available(),
        "torch_cuda": torch.version.cuda,
        "gpus": [f"{gpu.name} ({gpu.total_memory / 2**30:.0f} GiB)" for gpu in gpus],
    }
    try:
        facts["kernel"] = train_one_row()
    except (ImportError, AttributeError, TypeError, OSError, RuntimeError, ArithmeticError, AssertionError) as error:
        facts["kernel_error"] = f"{type(error).__name__}: {error}"
    try:
        received = run_ranks(exchange, 2, timeout=30.0)
        if received != [[0.0, 1.0], [0.0, 1.0]]:
            facts["exchange_error"] = f"two ranks exchanged tensors and received {received}"
    except RankError as error:
        facts["exchange_error"] = f"two ranks cannot exchange tensors: {str(error).strip().splitlines()[-1]}"
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
