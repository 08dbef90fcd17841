"""The two sequence policies that DreamShard is compared with: AutoShard's (Zha et al., KDD 2022) and a plain RNN.

policy = SequencePolicy(seed=0, enriched=True)      # AutoShard; enriched=False: the RNN baseline
trained = SequenceTrainer(policy, settings, seed=0)
trained.train(tasks, mdp_of)
trained.place(mdp)                                  # legal placements, best predicted first
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dlrm_autoshard.costs import COMPUTE
from dlrm_autoshard.formats.arrays import array_like
from dlrm_autoshard.planner.costs.features import NUM_NETWORK
from dlrm_autoshard.planner.dreamshard.masked import gumbel_noise
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP
from dlrm_autoshard.planner.search.local_search import late
from dlrm_autoshard.planner.task import MeasureTask, PlacementTask

# Axes: U units, E episodes, D devices, H hidden.

EMBED, HIDDEN = 32, 64


@dataclass(frozen=True)
class SequenceSettings:
    """Settings of a sequence policy's training."""

    updates: int = 100
    episodes: int = 10
    learning_rate: float = 1e-3  # falls linearly to 0
    entropy_weight: float = 1e-3
    baseline_weight: float = 0.5
    gradient_clip: float = 40.0
    samples: int = 16
    cost_updates: int = 20  # of AutoShard's cost head, after each of the policy's
    cost_batch: int = 512
    cost_buffer: int = 5000  # placements of a task that it remembers


class SequencePolicy(nn.Module):
    """Reads units in the order of placing with an LSTM, and matches each step's output with a representation of each
    device.

    AutoShard represents a device by the sum of its table vectors, what the cost head makes of it (computation only, as
    AutoShard knows no communication) and how full it is, and matches by a network on [state, device, state x device].
    The RNN baseline knows only how many units a device has and how full it is.
    """

    fitted: Tensor

    def __init__(self, seed: int = 0, enriched: bool = True) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.enriched = enriched
        self.table_net = mlp([NUM_NETWORK, 128, EMBED], generator)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # nn.LSTM takes no generator
            self.lstm = nn.LSTM(EMBED + 1, HIDDEN, num_layers=2)
        self.device_net = mlp([(EMBED if enriched else 0) + 2, HIDDEN], generator)
        self.match_net = mlp([3 * HIDDEN, HIDDEN, 1], generator)
        self.baseline = mlp([HIDDEN, 1], generator)
        self.register_buffer("fitted", torch.zeros(1))  # 1 once it has learned from measured placements
        if enriched:
            self.cost_head = mlp([EMBED, 64, 1], generator)

    def embed_units(self, mdp: EstimatedMDP) -> Tensor:
        """Returns vectors [U, EMBED] in the order of placing."""
        embedded: Tensor = self.table_net(torch.from_numpy(mdp.features_TF)) * 0.1
        return embedded.new_zeros(len(mdp.order), EMBED).index_add(0, torch.from_numpy(mdp.step_of_T), embedded)

    def states(self, unit_UE: Tensor) -> Tensor:
        """Returns states [U, H]: what the LSTM knows at each step of the units so far."""
        progress = torch.arange(len(unit_UE)).unsqueeze(1) / len(unit_UE)
        states, _ = self.lstm(torch.cat([unit_UE, progress], dim=1))
        return states

    def compute(self, held: Tensor) -> Tensor:
        """Returns predicted computation [...] of devices with these sums of table vectors [..., EMBED], in even
        shares."""
        predicted: Tensor = self.cost_head(held)
        return predicted.squeeze(-1)

    def logits(self, state: Tensor, held: Tensor, known: Tensor) -> Tensor:
        """Returns logits [..., D] from the state [..., H], device sums [..., D, EMBED] and two known numbers a
        device [..., D, 2]."""
        device = self.device_net(torch.cat([held, known], dim=-1) if self.enriched else known)
        state = state.unsqueeze(-2).expand_as(device)
        logits: Tensor = self.match_net(torch.cat([state, device, state * device], dim=-1)).squeeze(-1)
        return logits

    def to_json(self) -> dict[str, Any]:
        return {name: tensor.tolist() for name, tensor in self.state_dict().items()}

    def load_json(self, record: Mapping[str, Any]) -> None:
        wanted, record = self.state_dict(), {"fitted": [0.0], **record}  # states of before it was kept have none
        self.load_state_dict({n: torch.from_numpy(array_like(record, n, wanted[n].numpy())) for n in wanted})


class SequenceTrainer:
    """Trains a sequence policy. AutoShard's reward is balance, the least device's computation over the largest's,
    measured or, at plan time, as the cost model predicts it; its cost head learns the same figures. The RNN baseline's
    reward is minus the predicted cost.

    AutoShard's networks and sizes, actor with a baseline, entropy weight and gradient clip are kept. Its IMPALA
    machinery and 100,000 steps are not: episodes are simulated in a batch, so on-policy updates do. Memory is held by
    the mask of all our algorithms, not by a penalty.
    """

    def __init__(self, policy: SequencePolicy, settings: SequenceSettings = SequenceSettings(), seed: int = 0) -> None:
        self.policy = policy
        self.settings = settings
        self.generator = np.random.default_rng(seed)
        self.optimizer = torch.optim.Adam(policy.parameters(), lr=settings.learning_rate, fused=True)

    def train(
        self,
        tasks: Sequence[PlacementTask],
        mdp_of: Callable[[PlacementTask], EstimatedMDP],
        deadline: float | None = None,
        measure: MeasureTask | None = None,
    ) -> None:
        """Trains on tasks. With `measure`, AutoShard's reward is the measured balance, as in the paper; without (at
        plan time), the cost model's."""
        mdps: dict[int, EstimatedMDP] = {}
        seen: dict[int, list[tuple[np.ndarray, Tensor]]] = {}
        for update in range(self.settings.updates):
            if late(deadline):
                return
            number = int(self.generator.integers(len(tasks)))
            if number not in mdps:
                mdps[number] = mdp_of(tasks[number])
            self.optimizer.param_groups[0]["lr"] = self.settings.learning_rate * (1 - update / self.settings.updates)
            played = self.episodes(mdps[number], self.settings.episodes)
            if measure is not None and self.policy.enriched:
                measured_ED = measured_compute(tasks[number], played, measure) / mdps[number].share
                played = replace(played, compute_ED=torch.from_numpy(measured_ED))
                played = replace(played, reward_E=balance(played))
            self._update(played)
            if self.policy.enriched:
                of_task = seen.setdefault(number, [])
                of_task += zip(played.rank_EU, played.compute_ED, strict=True)
                del of_task[: -self.settings.cost_buffer]
                self._learn_costs(mdps[number], of_task)

    def place(self, mdp: EstimatedMDP) -> list[np.ndarray]:
        found: list[tuple[float, np.ndarray]] = []
        with torch.no_grad():
            for played in (self.episodes(mdp, 0), self.episodes(mdp, self.settings.samples)):
                for rank_U, overflow in zip(played.rank_EU, played.overflow_E, strict=True):
                    if not overflow:
                        found.append((mdp.costs.step_ms(rank_U), rank_U))
        return [rank_U for _, rank_U in sorted(found, key=lambda pair: pair[0])]

    def episodes(self, mdp: EstimatedMDP, count: int) -> Played:
        """Returns `count` sampled episodes with gradients, played at once; 0: the likeliest one."""
        policy, units, devices = self.policy, mdp.task.units, mdp.task.world_size
        rows, width = np.arange(max(count, 1)), max(count, 1)
        noise = gumbel_noise((len(mdp.order), width, devices), self.generator) if count else None
        unit_UE = policy.embed_units(mdp)
        states_UH = policy.states(unit_UE)
        held = torch.zeros(width, devices, EMBED)
        sums = np.zeros((width, devices, mdp.summary.shape[1]), dtype=np.float32)
        counts = np.zeros((width, devices), dtype=np.float32)
        free = np.tile(units.capacity_W, (width, 1))
        unlimited = mdp.task.topology.memory_bytes is None  # then a device is full that has all tables
        size_W = np.full(devices, units.bytes_U.sum()) if unlimited else units.capacity_W
        beyond_W = units.capacity_W - size_W
        overflow = np.zeros(width, dtype=bool)
        ranks = np.empty((width, len(mdp.order)), dtype=np.int64)
        log_probs, entropies = [], []
        for step, unit in enumerate(mdp.order):
            seen = policy.compute(held).detach() if policy.enriched else torch.from_numpy(counts / len(mdp.order))
            full = 1 - (free - beyond_W) / np.maximum(size_W, 1)
            known = torch.stack([seen, torch.from_numpy(full.astype(np.float32))], dim=-1)
            legal, stuck = mdp.legal(step, free, ranks)
            overflow |= stuck
            state = states_UH[step].expand(width, -1)
            logits = policy.logits(state, held, known)
            log_prob_ED = logits.masked_fill(torch.from_numpy(~legal), -torch.inf).log_softmax(dim=-1)
            action = (log_prob_ED if noise is None else log_prob_ED + torch.from_numpy(noise[step])).argmax(dim=-1)
            log_probs.append(log_prob_ED.gather(-1, action.unsqueeze(-1)).squeeze(-1))
            # 0 x -inf is no number; an illegal device adds nothing.
            entropies.append(-(log_prob_ED.exp() * log_prob_ED.clamp(min=-1e9)).sum(dim=-1))
            taken = action.numpy()
            held = held + nn.functional.one_hot(action, devices).unsqueeze(-1) * unit_UE[step]
            sums[rows, taken] += mdp.summary[step]
            counts[rows, taken] += 1
            free[rows, taken] -= mdp.bytes[step]
            ranks[:, unit] = taken
        stages = mdp.costs.stages(sums)
        compute_ED = stages[..., COMPUTE].sum(axis=-1) / mdp.share
        cost_E = mdp.costs.total_ms(stages, sums) / mdp.share
        played = Played(
            ranks,
            overflow,
            torch.from_numpy(np.where(overflow, -1.0, 0.0) - cost_E).float(),
            torch.stack(log_probs),
            torch.stack(entropies),
            states_UH,
            held,
            torch.from_numpy(np.where(overflow[:, None], np.nan, compute_ED)).float(),
        )
        return replace(played, reward_E=balance(played)) if policy.enriched else played

    def _update(self, played: Played) -> None:
        """Updates by policy gradient with a learned baseline for each step (the reward comes at the end, gamma is
        1)."""
        error_UE = played.reward_E - self.policy.baseline(played.states_UH)
        advantage_UE = error_UE.detach() / (played.reward_E.std() + 1e-2)
        loss = -(advantage_UE * played.log_prob_UE).sum(dim=0).mean()
        loss = loss - self.settings.entropy_weight * played.entropy_UE.mean()
        loss = loss + self.settings.baseline_weight * error_UE.square().mean()
        self._descend(loss)

    def _learn_costs(self, mdp: EstimatedMDP, placements: Sequence[tuple[np.ndarray, Tensor]]) -> None:
        """Trains the cost head on placements drawn from those of this task that were played."""
        for _ in range(self.settings.cost_updates):
            batch = max(1, self.settings.cost_batch // mdp.task.world_size)
            drawn = [placements[i] for i in self.generator.integers(len(placements), size=batch)]
            rank_BU = torch.from_numpy(np.stack([rank_U for rank_U, _ in drawn]))[:, mdp.order]
            owned_BDU = nn.functional.one_hot(rank_BU, mdp.task.world_size).transpose(1, 2).float()
            compute_BD = torch.stack([compute_D for _, compute_D in drawn])
            known_BD = ~compute_BD.isnan()
            if known_BD.any():
                error_BD = self.policy.compute(owned_BDU @ self.policy.embed_units(mdp)) - compute_BD
                self._descend(error_BD[known_BD].square().mean())

    def _descend(self, loss: Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), self.settings.gradient_clip)
        self.optimizer.step()


@dataclass(frozen=True)
class Played:
    """Episodes that were played. compute_ED: each device's final computation, in even shares; NaN in an episode that
    overflowed."""

    rank_EU: np.ndarray
    overflow_E: np.ndarray
    reward_E: Tensor
    log_prob_UE: Tensor
    entropy_UE: Tensor
    states_UH: Tensor
    held_EDH: Tensor  # sums of table vectors, in the end
    compute_ED: Tensor


def balance(played: Played) -> Tensor:
    """Returns the least over the largest computation of the devices [E]; -1 for an episode that overflowed."""
    least_E, largest_E = played.compute_ED.amin(dim=1), played.compute_ED.amax(dim=1)
    return (least_E / largest_E.clamp(min=1e-9)).nan_to_num(nan=-1.0)


def measured_compute(task: PlacementTask, played: Played, measure: MeasureTask) -> np.ndarray:
    """Returns ms of computation [E, D]; NaN for an episode that overflowed, which cannot be measured."""
    legal = [task.plan_from(rank_U) for rank_U in played.rank_EU[~played.overflow_E]]
    compute_ED = np.full((len(played.overflow_E), task.world_size), np.nan, dtype=np.float32)
    if legal:
        profiles = measure(task, legal)
        compute_ED[~played.overflow_E] = [[r.fwd_compute_ms + r.bwd_compute_ms for r in p.ranks] for p in profiles]
    return compute_ED


def mlp(sizes: Sequence[int], generator: torch.Generator) -> nn.Sequential:
    """Returns linear layers with ReLU between them, initialised from `generator` (He for the hidden ones)."""
    layers: list[nn.Module] = []
    for i, (fan_in, fan_out) in enumerate(itertools.pairwise(sizes)):
        linear = nn.utils.skip_init(nn.Linear, fan_in, fan_out)  # which would draw from torch's own generator
        nn.init.normal_(linear.weight, std=(2.0 / fan_in) ** 0.5, generator=generator)
        nn.init.zeros_(linear.bias)
        layers += [linear] if i == len(sizes) - 2 else [linear, nn.ReLU()]
    return nn.Sequential(*layers)
