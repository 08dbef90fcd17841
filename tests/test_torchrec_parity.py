"""From the same weights on the same batches, our losses are TorchRec's. Where to get it: peer_torchrec.py."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dlrm_autoshard.benchmarks.peer_torchrec import TorchrecJob, find_torchrec
from dlrm_autoshard.benchmarks.workloads import W_EMB, OurJob
from dlrm_autoshard.distributed.tables.init import initialise
from dlrm_autoshard.plan import Topology, round_robin
from tests.ranks import run_ranks

STEPS = 20
SMALL = replace(
    W_EMB,
    rows=(50, 300, 7, 1000, 20),
    pooling=(2.0, 4.0, 3.0, 1.0, 9.0),
    bottom=(32, 16),
    top=(24, 8, 1),
    batch_size=64,
    num_batches=5,
    dim=16,
)


def losses(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """Ours, which is the global mean, and theirs, which is the local one."""
    batches = SMALL.batches(rank, world_size)
    plan = round_robin([table.name for table in SMALL.tables], Topology(world_size))
    ours, theirs = OurJob(SMALL, plan, rank, batches), TorchrecJob(SMALL, batches)
    tables = {t.name: torch.empty(t.num_embeddings, t.embedding_dim) for t in SMALL.tables}
    for name, weight in tables.items():
        initialise(weight, name, 0)
    load(theirs.model, {name: p.detach().clone() for name, p in ours.model.named_parameters()}, tables)
    our_losses, their_losses = [], []
    for _ in range(STEPS):
        ours.run(1)
        our_losses.append(float(ours.dense.global_loss))
        their_losses.append(float(theirs.step()))
    return our_losses, their_losses


def load(model: torch.nn.Module, dense: dict[str, torch.Tensor], tables: dict[str, torch.Tensor]) -> None:
    """Our initial weights into their model. dense: by our names, in our order; tables: by name."""
    ours = {
        kind: [value for name, value in dense.items() if name.startswith(kind)] for kind in ("bottom_mlp", "over_mlp")
    }
    # Our pairs lie row by row below the diagonal, theirs row by row above it.
    count = len(SMALL.tables) + 1
    pair = torch.zeros(count, count, dtype=torch.int64)
    row, column = torch.tril_indices(count, count, offset=-1)
    pair[row, column] = torch.arange(len(row))
    above, right = torch.triu_indices(count, count, offset=1)
    columns = torch.cat([torch.arange(SMALL.dim), SMALL.dim + pair[right, above]])
    ours["over_mlp"][0] = ours["over_mlp"][0][:, columns]
    remaining = {kind: iter(values) for kind, values in ours.items()}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embedding_bags." not in name:
                parameter.copy_(next(remaining["bottom_mlp" if "dense_arch" in name else "over_mlp"]))
            elif parameter.numel():  # empty where another rank owns the table
                parameter.copy_(tables[name.split("embedding_bags.")[1].split(".")[0]])


@pytest.mark.skipif(find_torchrec() is not None, reason=find_torchrec() or "")
@pytest.mark.parametrize("world_size", [1, 2])
def test_losses_over_20_steps(world_size: int) -> None:
    results = run_ranks(losses, world_size, timeout=120)
    ours = torch.tensor(results[0][0])
    theirs = torch.tensor([theirs for _, theirs in results]).mean(0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours[-5:].mean() < ours[:5].mean()  # they learn something, so that equal losses say something
