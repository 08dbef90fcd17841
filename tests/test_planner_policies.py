"""The learned policies: one masked distribution, batched rollouts, and plans that beat the heuristics."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dlrm_autoshard import Constraints, PlanError, Planner, SimulatedCluster
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.planner.baselines.reference import PublishedDreamShard, scaled_by_task
from dlrm_autoshard.planner.baselines.reference_costs import CostNetTraining, Measured, PublishedCostNet, stacked
from dlrm_autoshard.planner.baselines.reference_policy import PublishedPolicyTraining
from dlrm_autoshard.planner.baselines.sequence import SequencePolicy, SequenceTrainer
from dlrm_autoshard.planner.dreamshard import DreamShard, DreamShardSettings, mdp_of
from dlrm_autoshard.planner.greedy import HEURISTICS
from dlrm_autoshard.planner.masked import MaskedCategorical, gumbel_noise
from dlrm_autoshard.planner.mdp import EstimatedMDP
from dlrm_autoshard.planner.policy import DevicePolicy
from dlrm_autoshard.planner.policy_training import PolicyTraining
from dlrm_autoshard.planner.task import PlacementTask
from tests.planning_problems import all_placements, choices, log_prob, measurer, random_samples, some_task


def mdp(task: PlacementTask) -> EstimatedMDP:
    planner = Planner("search", seed=0)
    return mdp_of(task, planner.costs.costs_of(task))


def linear(policy: DevicePolicy, index: int) -> torch.nn.Linear:
    layer = policy.device_net[index]
    assert isinstance(layer, torch.nn.Linear)
    return layer


def stirred_policy(seed: int = 0, greediness: float = 25.0) -> DevicePolicy:
    """A policy whose last layer is not zero, so that everything it sees counts."""
    policy = DevicePolicy(seed, greediness)
    with torch.no_grad():
        linear(policy, -1).weight.normal_(std=0.1, generator=torch.Generator().manual_seed(seed))
    return policy


def tight_task(seed: int = 0) -> PlacementTask:
    """Four tables on two ranks of which one holds a single table: the mask binds in most steps."""
    return some_task(4, 2, seed, memory=[10, 30], table_bytes=dict.fromkeys([f"t_{i}" for i in range(4)], 10))


def test_illegal_devices_have_no_probability_and_no_gradient() -> None:
    logits = torch.tensor([[1.0, 5.0, 2.0]], requires_grad=True)
    choice = MaskedCategorical(logits, torch.tensor([[True, False, True]]))
    probs = choice.log_probs.exp()
    assert probs[0, 1] == 0 and probs.sum().item() == pytest.approx(1.0)
    (choice.log_prob(torch.tensor([0])).sum() + choice.entropy().sum()).backward()
    assert logits.grad is not None and logits.grad[0, 1] == 0 and torch.isfinite(logits.grad).all()


def test_gumbel_samples_follow_the_masked_distribution() -> None:
    choice = MaskedCategorical(torch.tensor([0.3, 9.0, -0.7, 1.1]), torch.tensor([True, False, True, True]))
    noise = torch.from_numpy(gumbel_noise((40_000, 4), np.random.default_rng(0)))
    counts = torch.bincount(choice.sample(noise), minlength=4) / 40_000
    torch.testing.assert_close(counts, choice.log_probs.exp(), atol=0.01, rtol=0)


def test_the_loss_scores_the_distribution_that_sampled() -> None:
    """Frequencies of whole placements in 20,000 masked rollouts match exp(log_prob) of those placements."""
    problem, policy = mdp(tight_task()), stirred_policy(greediness=0.0)
    noise = gumbel_noise((20_000, 4, 2), np.random.default_rng(1))
    rollout = problem.rollout(policy, noise)
    log_probs = log_prob(rollout, policy)
    keys = rollout.rank_EU @ (2 ** np.arange(4))
    for key in np.unique(keys):
        same = keys == key
        assert same.mean() == pytest.approx(log_probs[torch.from_numpy(same)][0].exp().item(), abs=0.015)
    assert not rollout.overflow_E.any()


def test_the_policy_gradient_is_that_of_the_expected_cost_under_the_mask() -> None:
    """REINFORCE's expectation, summed over all placements, against finite differences of the expected reward."""
    problem, policy = mdp(tight_task()), stirred_policy(greediness=0.0)
    rollout = problem.rollout(policy, gumbel_noise((5000, 4, 2), np.random.default_rng(2)))
    _, first = np.unique(rollout.rank_EU @ (2 ** np.arange(4)), return_index=True)
    legal = [ranks for ranks in all_placements(4, 2) if (ranks == 0).sum() == 1]
    assert len(first) == len(legal)  # every legal placement was drawn: the expectation below is complete
    reward = torch.from_numpy(-rollout.cost_E[first])

    def probabilities() -> torch.Tensor:
        return log_prob(rollout, policy)[torch.from_numpy(first)].exp()

    assert probabilities().sum().item() == pytest.approx(1.0, abs=1e-4)
    bias = linear(policy, 0).bias
    log_probs = log_prob(rollout, policy)[torch.from_numpy(first)]
    surrogate = (log_probs.exp().detach() * reward * log_probs).sum()  # E[reward x grad log p]
    [gradient] = torch.autograd.grad(surrogate, bias)
    step = 4e-3
    for i in torch.topk(gradient.abs(), 5).indices.tolist():
        with torch.no_grad():
            bias[i] += step
            up = (probabilities() * reward).sum().item()
            bias[i] -= 2 * step
            down = (probabilities() * reward).sum().item()
            bias[i] += step
        assert (up - down) / (2 * step) == pytest.approx(float(gradient[i]), rel=0.1, abs=2e-3)


def test_the_gradient_written_by_hand_is_that_of_autograd() -> None:
    """With two tables that stay together (a unit of two), and memory that binds."""
    task = some_task(
        6, 3, 12, memory=[40, 20, 30], table_bytes=dict.fromkeys([f"t_{i}" for i in range(6)], 10),
        constraints=Constraints(together=(("t_1", "t_4"),)),
    )  # fmt: skip
    policy = stirred_policy()
    rollout = mdp(task).rollout(policy, gumbel_noise((8, 5, 3), np.random.default_rng(4)))
    assert not rollout.legal.all()
    advantage = np.random.default_rng(5).standard_normal(8)
    training = PolicyTraining(policy)
    training.gradients(rollout, advantage, entropy_weight=0.3)
    loss = -(torch.from_numpy(advantage) * log_prob(rollout, policy)).mean()
    (loss - 0.3 * choices(rollout, policy).entropy().mean()).backward()
    gradients = torch.cat([p.grad.ravel() for p in training.adam.parameters if p.grad is not None]).numpy()
    np.testing.assert_allclose(training.adam.flat_gradient, gradients, rtol=1e-3, atol=1e-4 * np.abs(gradients).max())


def test_batched_rollouts_are_the_one_by_one_rollouts() -> None:
    problem, policy = mdp(some_task(12, 3, 1)), stirred_policy()
    noise = gumbel_noise((8, 12, 3), np.random.default_rng(3))
    together = problem.rollout(policy, noise)
    for episode in range(8):
        alone = problem.rollout(policy, noise[episode : episode + 1])
        np.testing.assert_array_equal(alone.rank_EU[0], together.rank_EU[episode])
        assert alone.cost_E[0] == pytest.approx(float(together.cost_E[episode]), rel=1e-5)


def test_the_rollouts_cost_is_the_cost_of_its_placement() -> None:
    problem = mdp(some_task(10, 4, 2))
    rollout = problem.rollout(stirred_policy(), gumbel_noise((5, 10, 4), np.random.default_rng(4)))
    for rank_U, cost in zip(rollout.rank_EU, rollout.cost_E, strict=True):
        assert problem.costs.step_ms(rank_U) == pytest.approx(float(cost), rel=1e-4)


def test_the_policy_sees_the_table_that_it_places() -> None:
    policy = stirred_policy()
    inputs = torch.zeros(1, 3, linear(policy, 0).in_features)
    other = inputs.clone()
    other[..., -16:] = 1.0  # another unit to place, all else equal
    assert not torch.allclose(policy.logits(inputs), policy.logits(other))


def test_the_policy_treats_devices_alike() -> None:
    policy = stirred_policy()
    inputs = torch.randn(2, 5, linear(policy, 0).in_features, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([3, 1, 4, 0, 2])
    torch.testing.assert_close(policy.logits(inputs[:, order]), policy.logits(inputs)[:, order])
    np.testing.assert_allclose(
        policy.frozen()(inputs.numpy()), policy.logits(inputs).detach().numpy(), rtol=1e-4, atol=1e-4
    )


def test_where_no_device_has_room_the_episode_overflows_and_is_not_handed_out() -> None:
    task = some_task(3, 2, memory=[15, 15], table_bytes={"t_0": 10, "t_1": 10, "t_2": 10})
    trainer = DreamShard(DevicePolicy(0), DreamShardSettings(), seed=0)
    problem = mdp(task)
    assert problem.rollout(trainer.policy).overflow_E.all()
    assert trainer.place(problem, samples=8) == []
    trainer.reinforce(trainer.sampled(problem, 4))
    assert all(torch.isfinite(parameter).all() for parameter in trainer.policy.parameters())


def test_reinforce_makes_cheap_placements_likelier() -> None:
    problem = mdp(some_task(10, 3, 3))
    policy = stirred_policy(1)  # a bad start
    trainer = DreamShard(policy, DreamShardSettings(learning_rate=3e-3), seed=0)
    noise = gumbel_noise((64, 10, 3), np.random.default_rng(5))
    before = problem.rollout(policy, noise).cost_E.mean()
    for _ in range(60):
        trainer.reinforce(trainer.sampled(problem, 10))
    assert problem.rollout(policy, noise).cost_E.mean() < before


def test_dreamshard_beats_random_and_the_heuristics_in_the_mean_on_a_simulated_pool() -> None:
    """Costs are simulated; the planner learned from 100 profiles of other plans on the same simulated cluster."""
    cluster = SimulatedCluster(seed=0)
    fitted = Planner("dreamshard", seed=0)
    fitted.costs.learn(random_samples(cluster, profiles=100), updates=600)
    measure, totals = measurer(cluster), dict.fromkeys(("dreamshard", *HEURISTICS), 0.0)
    for seed in range(6):
        task = some_task(24, 4, seed=100 + seed)
        result = fitted.plan(task)
        for name in totals:
            totals[name] += step_cost_ms(measure(task, [result.best(name).plan])[0].ranks)
    assert all(totals["dreamshard"] < totals[name] for name in HEURISTICS), totals


def test_fitting_on_measured_placements_improves_costs_and_reports_progress() -> None:
    planner = Planner("auto", settings=DreamShardSettings(iterations=3, placements=4, cost_updates=100), seed=0)
    seen: list[tuple[int, int]] = []
    tasks = [some_task(12, 3, seed) for seed in range(3)]
    report = planner.fit(tasks, measurer(SimulatedCluster(seed=2)), progress=lambda done, all: seen.append((done, all)))
    assert seen[-1] == (12, 12) and max(report.error_after) < 0.1


def test_published_dreamshard_learns_and_places_legally() -> None:
    settings = DreamShardSettings(iterations=3, placements=10, cost_updates=100)
    planner = Planner("dreamshard", seed=0, published=True, settings=settings)
    task = some_task(16, 3, 5)
    with pytest.raises(PlanError, match="measured placements only"):
        planner.plan(task)
    planner.fit([task], measurer(SimulatedCluster(seed=0)))
    plan = planner.plan(task).plan
    task.check(plan)
    again = Planner("dreamshard", published=True)
    again.load_state_dict(planner.state_dict())
    assert again.plan(task).plan == plan


def test_published_gradients_written_by_hand_are_those_of_autograd() -> None:
    tasks = [some_task(6, 3, 8), some_task(5, 2, 9)]
    measure, generator = measurer(SimulatedCluster(seed=0)), np.random.default_rng(0)
    buffer = []
    for number in (0, 1, 0, 1, 0):
        task = tasks[number]
        rank_T = generator.integers(task.world_size - 1, size=len(task.tables))  # the last device stays empty
        ranks = measure(task, [task.plan_from(rank_T)])[0].ranks
        heads = np.array([(r.fwd_compute_ms, r.bwd_compute_ms, r.bwd_comms_ms) for r in ranks], dtype=np.float32)
        buffer.append(Measured(number, rank_T, heads, float(heads.sum())))
    placements = stacked([scaled_by_task(task) for task in tasks], buffer)
    net = PublishedCostNet(torch.Generator().manual_seed(0))
    training, chosen = CostNetTraining(net), np.array([3, 0, 1, 3, 4])
    training.gradients(placements, chosen)

    present = torch.from_numpy(placements.present_PD[chosen]).unsqueeze(-1)
    owned = torch.from_numpy(placements.owned_PDR[chosen])
    devices = owned @ net.table_net(torch.from_numpy(placements.features_RF))
    heads_error = (net.heads(devices) - torch.from_numpy(placements.heads_PD3[chosen])) * present
    overall = net.overall(devices.masked_fill(~present, -1e9))
    expected = heads_error.square().sum() / present.sum()
    expected = expected + (overall - torch.from_numpy(placements.overall_P[chosen])).square().mean()
    expected.backward()
    gradients = torch.cat([p.grad.ravel() for p in training.adam.parameters if p.grad is not None]).numpy()
    np.testing.assert_allclose(training.adam.flat_gradient, gradients, rtol=1e-2, atol=1e-4 * np.abs(gradients).max())


def test_the_published_policys_gradient_is_that_of_autograd() -> None:
    task = some_task(7, 3, 13)
    trainer = PublishedDreamShard(0)
    features = scaled_by_task(task)
    episodes, policy = trainer.rollout(task, features, 6), trainer.policy
    training = PublishedPolicyTraining(policy)
    training.gradients(features.numpy(), episodes, entropy_weight=0.3)

    embedding = policy.table_net(features)
    actions = torch.from_numpy(episodes.actions_TE)
    placed = torch.nn.functional.one_hot(actions, 3).unsqueeze(-1)
    added = placed * embedding[episodes.order][:, None, None, :]
    before = placed.cumsum(dim=0) - placed
    held = torch.where(before > 0, added.cumsum(dim=0) - added, embedding[-1])
    log_probs = policy.logits(held, torch.from_numpy(episodes.costs_TED3)).log_softmax(dim=-1)
    taken = log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1).sum(dim=0)
    reward = torch.from_numpy(-episodes.predicted_E)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-9)
    entropy = -(log_probs.exp() * log_probs).sum(dim=-1).mean()
    (-(advantage * taken).mean() - 0.3 * entropy).backward()
    gradients = torch.cat([p.grad.ravel() for p in training.adam.parameters if p.grad is not None]).numpy()
    np.testing.assert_allclose(training.adam.flat_gradient, gradients, rtol=1e-2, atol=1e-4 * np.abs(gradients).max())


def test_published_cost_network_learns_its_heads() -> None:
    task, cluster = some_task(12, 2, 6), SimulatedCluster(seed=0)
    trainer = PublishedDreamShard(0, DreamShardSettings(iterations=6, placements=10, policy_updates=1))
    trainer.train([task], measurer(cluster))
    episode = trainer.rollout(task, scaled_by_task(task), 20)
    predicted = episode.predicted_E
    real = []
    for actions in episode.actions_TE.T:
        rank_T = np.empty(12, dtype=np.int64)
        rank_T[episode.order] = actions
        ranks = measurer(cluster)(task, [task.plan_from(rank_T)])[0].ranks
        real.append(max(rank.total_ms for rank in ranks))
    assert np.abs(predicted / np.array(real) - 1).mean() < 0.15


@pytest.mark.parametrize("enriched", [True, False])
def test_sequence_policies_learn_to_place_better(enriched: bool) -> None:
    problem = mdp(some_task(10, 3, 7))
    trainer = SequenceTrainer(SequencePolicy(0, enriched), seed=0)
    reward_before = float(trainer.episodes(problem, 64).reward_E.mean())
    trainer.train([problem.task], lambda task: problem)
    assert float(trainer.episodes(problem, 64).reward_E.mean()) > reward_before
    for rank_U in trainer.place(problem):
        problem.task.check(problem.task.plan_from(rank_U))
