"""Trains the cost model's two networks in numpy, gradients written out by hand.

    training = CostTraining(model, shards)
    for chosen in batches:                      # indices of shards
        training.gradients(chosen)              # into training.adam
        training.adam.step(learning_rate)
    training.adam.finish()                      # weights back into the model

The networks are so small that automatic differentiation is nearly all overhead (1 ms an update, against 0.2): written
out, a job's start and every refinement between epochs are done in a fraction of a second. A test holds the gradients
to torch's.

Axes: R different tables, N shards of a batch, S = 2 stages.
"""

from __future__ import annotations

import numpy as np
import torch

from dlrm_autoshard.planner.by_hand import FlatAdam, Mlp
from dlrm_autoshard.planner.cost_model import (
    FUSION_BOUND,
    LOAD_COLUMNS,
    NUM_LOGS,
    TABLE_BOUND,
    CostModel,
)
from dlrm_autoshard.planner.shard_set import ShardSet

HUBER = 0.02
"""Relative errors below this count squared, above it absolutely: outliers of a noisy machine do not pull."""
LOG2_SCALE = 1 / (6 * np.log(2))


class CostTraining:
    def __init__(self, model: CostModel, shards: ShardSet) -> None:
        self.adam = FlatAdam([*model.table_net.parameters(), *model.device_net.parameters()])
        arrays, gradients = self.adam.arrays, self.adam.gradients
        split = len(list(model.table_net.parameters()))
        self.table_net = Mlp(arrays[:split], gradients[:split])
        self.device_net = Mlp(arrays[split:], gradients[split:])

        self.features_RF = shards.features_RF.numpy()
        self.base_RS = (shards.work_RP @ model.prices_PS).numpy()
        self.launch_S = model.launch_S.numpy().copy()
        self.members_NM = shards.members_NM.numpy()
        self.log_target_NS = shards.target_NS.log().numpy()
        loads_RL = torch.cat([torch.ones(len(self.base_RS), 1), shards.work_RP[:, LOAD_COLUMNS]], dim=1)
        loads_NL = shards.sum_over_tables(loads_RL).numpy()
        self.count_N1 = loads_NL[:, :1]
        self.log_count_N1 = np.log2(self.count_N1) / 6
        self.log_loads_NL = np.log2(np.maximum(loads_NL[:, 1:], 1e-3)) / 6

    def gradients(self, chosen: np.ndarray) -> np.ndarray:
        """[N, S] errors of the chosen shards, in logs; the gradient of their mean loss goes to `adam`."""
        inside_NR = np.zeros((len(chosen), len(self.base_RS) + 1), dtype=np.float32)
        inside_NR[np.arange(len(chosen))[:, None], self.members_NM[chosen]] = 1.0
        inside_NR = inside_NR[:, :-1]  # the last column is padding

        out_RO = self.table_net.forward(self.features_RF)
        bent_RS = np.tanh(out_RO[:, :2] / TABLE_BOUND)
        cost_RS = self.base_RS * np.exp(TABLE_BOUND * bent_RS)
        count_N1 = self.count_N1[chosen]
        sums_NO = inside_NR @ np.concatenate([cost_RS, out_RO[:, 2:]], axis=1)
        cost_NS = sums_NO[:, :2]
        clamped_NS = np.maximum(cost_NS, 1e-3)
        inputs = np.concatenate(
            [
                self.log_count_N1[chosen],
                np.log2(clamped_NS) / 6,
                self.log_loads_NL[chosen],
                sums_NO[:, 2:] / count_N1,
            ],
            axis=1,
        )
        bent_NS = np.tanh(self.device_net.forward(inputs))
        raw_NS = cost_NS + self.launch_S
        error_NS = np.log(raw_NS) + FUSION_BOUND * bent_NS - self.log_target_NS[chosen]

        grad_NS = np.minimum(np.maximum(error_NS / HUBER, -1), 1) / error_NS.size
        grad_inputs = self.device_net.backward(grad_NS * FUSION_BOUND * (1 - bent_NS**2))
        grad_cost_NS = grad_NS / raw_NS + grad_inputs[:, 1:3] * (LOG2_SCALE / clamped_NS) * (cost_NS > 1e-3)
        grad_embed = grad_inputs[:, NUM_LOGS:] / count_N1
        grad_RO = inside_NR.T @ np.concatenate([grad_cost_NS, grad_embed], axis=1)
        grad_RO[:, :2] *= cost_RS * (1 - bent_RS**2)
        self.table_net.backward(grad_RO, to_inputs=False)
        return error_NS
