"""The learned policies: one masked distribution, batched rollouts, and plans that beat the heuristics."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dlrm_autoshard import Constraints, Planner, ShardingPlan, SimulatedCluster, StepProfile
from dlrm_autoshard.costs import step_cost_ms
from dlrm_autoshard.planner.baselines.sequence import SequencePolicy, SequenceTrainer, balance, measured_compute
from dlrm_autoshard.planner.dreamshard.dreamshard import DreamShard
from dlrm_autoshard.planner.dreamshard.masked import entropy_of, gumbel_noise, logit_gradient, masked_log_probs
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP
from dlrm_autoshard.planner.dreamshard.policy import DevicePolicy
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.dreamshard.train_policy import draw_problem
from dlrm_autoshard.planner.search.greedy import HEURISTICS
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.task import PlacementTask
from tests.gradients import assert_gradients_of, in_double_precision
from tests.planning_problems import (
    all_placements,
    log_prob,
    measurer,
    random_samples,
    some_task,
    step_log_probs,
)


def mdp(task: PlacementTask) -> EstimatedMDP:
    planner = Planner("search", seed=0)
    return EstimatedMDP(task, planner.costs.costs_of(task))


def stirred_policy(seed: int = 0, greediness: float = 25.0) -> DevicePolicy:
    """A policy whose last layer is not zero, so that everything it sees counts."""
    policy = DevicePolicy(seed, greediness)
    last = policy.device_net.parameters[-2]
    last[:] = 0.1 * np.random.default_rng(seed).standard_normal(last.shape)
    return policy


def tight_task(seed: int = 0) -> PlacementTask:
    """Four tables on two ranks of which one holds a single table: the mask binds in most steps."""
    return some_task(4, 2, seed, memory=[10, 30], table_bytes=dict.fromkeys([f"t_{i}" for i in range(4)], 10))


def test_illegal_devices_have_no_probability_and_no_gradient() -> None:
    logits, legal = np.array([[[1.0, 5.0, 2.0]]]), np.array([[[True, False, True]]])
    probs = np.exp(masked_log_probs(logits, legal))
    assert probs[0, 0, 1] == 0 and probs.sum() == pytest.approx(1.0)
    assert np.isfinite(entropy_of(masked_log_probs(logits, legal))).all()
    gradient = logit_gradient(logits, legal, np.array([[[True, False, False]]]), np.ones(1), 0.1)
    assert gradient[0, 0, 1] == 0 and np.isfinite(gradient).all() and gradient.any()


def test_gumbel_samples_follow_the_masked_distribution() -> None:
    log_probs = masked_log_probs(np.array([0.3, 9.0, -0.7, 1.1]), np.array([True, False, True, True]))
    samples = (log_probs + gumbel_noise((40_000, 4), np.random.default_rng(0))).argmax(axis=1)
    np.testing.assert_allclose(np.bincount(samples, minlength=4) / 40_000, np.exp(log_probs), atol=0.01)


def test_the_loss_scores_the_distribution_that_sampled() -> None:
    """Frequencies of whole placements in 20,000 masked rollouts match exp(log_prob) of those placements."""
    problem, policy = mdp(tight_task()), stirred_policy(greediness=0.0)
    noise = gumbel_noise((20_000, 4, 2), np.random.default_rng(1))
    rollout = problem.rollout(policy, noise)
    log_probs = log_prob(rollout, policy)
    keys = rollout.rank_EU @ (2 ** np.arange(4))
    for key in np.unique(keys):
        same = keys == key
        assert same.mean() == pytest.approx(np.exp(log_probs[same][0]), abs=0.015)
    assert not rollout.overflow_E.any()


def test_the_policy_gradient_is_that_of_the_expected_cost_under_the_mask() -> None:
    """REINFORCE's expectation, summed over all placements, against finite differences of the expected reward."""
    problem, policy = mdp(tight_task()), stirred_policy(greediness=0.0)
    rollout = problem.rollout(policy, gumbel_noise((5000, 4, 2), np.random.default_rng(2)))
    _, first = np.unique(rollout.rank_EU @ (2 ** np.arange(4)), return_index=True)
    legal = [ranks for ranks in all_placements(4, 2) if (ranks == 0).sum() == 1]
    assert len(first) == len(legal)  # every legal placement was drawn: the expectation below is complete
    reward = -rollout.cost_E[first]
    in_double_precision(*policy.nets.values())

    def probabilities() -> np.ndarray:
        return np.exp(log_prob(rollout, policy)[first])

    assert probabilities().sum() == pytest.approx(1.0, abs=1e-4)
    # REINFORCE over all placements, each as often as its probability: the gradient of the expected reward.
    every = replace(
        rollout,
        inputs=rollout.inputs[:, first].astype(np.float64),
        legal=rollout.legal[:, first],
        actions=rollout.actions[:, first],
    )
    policy.reinforce(every, probabilities() * reward * len(first), entropy_weight=0.0)
    assert_gradients_of(lambda: -float((probabilities() * reward).sum()), list(policy.nets.values()))


def test_the_policys_gradient_is_that_of_its_loss() -> None:
    """With two tables that stay together (a unit of two), and memory that binds."""
    task = some_task(
        6, 3, 12, memory=[40, 20, 30], table_bytes=dict.fromkeys([f"t_{i}" for i in range(6)], 10),
        constraints=Constraints(together=(("t_1", "t_4"),)),
    )  # fmt: skip
    policy = stirred_policy()
    rollout = mdp(task).rollout(policy, gumbel_noise((8, 5, 3), np.random.default_rng(4)))
    assert not rollout.legal.all()
    in_double_precision(*policy.nets.values())
    advantage = np.random.default_rng(5).standard_normal(8)

    def loss() -> float:
        entropy = entropy_of(step_log_probs(rollout, policy)).mean()
        return float(-(advantage * log_prob(rollout, policy)).mean() - 0.3 * entropy)

    policy.reinforce(replace(rollout, inputs=rollout.inputs.astype(np.float64)), advantage, entropy_weight=0.3)
    assert_gradients_of(loss, list(policy.nets.values()))


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
    inputs = np.zeros((1, 3, policy.device_net.parameters[0].shape[1]), dtype=np.float32)
    other = inputs.copy()
    other[..., -16:] = 1.0  # another unit to place, all else equal
    assert not np.allclose(policy.logits(inputs)[0], policy.logits(other)[0])


def test_the_policy_treats_devices_alike() -> None:
    policy, generator = stirred_policy(), np.random.default_rng(0)
    inputs = generator.standard_normal((2, 5, policy.device_net.parameters[0].shape[1])).astype(np.float32)
    order = np.array([3, 1, 4, 0, 2])
    np.testing.assert_allclose(policy.logits(inputs[:, order])[0], policy.logits(inputs)[0][:, order], rtol=1e-4)


def test_where_no_device_has_room_the_episode_overflows_and_is_not_handed_out() -> None:
    task = some_task(3, 2, memory=[15, 15], table_bytes={"t_0": 10, "t_1": 10, "t_2": 10})
    trainer = DreamShard(DevicePolicy(0), DreamShardSettings(), seed=0)
    problem = mdp(task)
    assert problem.rollout(trainer.policy).overflow_E.all()
    assert trainer.place(problem, samples=8) == []
    trainer.reinforce(trainer.sampled(problem, 4))
    assert all(np.isfinite(array).all() for net in trainer.policy.nets.values() for array in net.parameters)


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


def test_the_shipped_policy_is_no_worse_than_one_pass_by_cost_and_needs_no_training() -> None:
    """On tasks and costs that it was not trained on, in the mean."""
    problems = [draw_problem(np.random.default_rng([9, i])) for i in range(12)]
    trainer = DreamShard(DevicePolicy.shipped(), DreamShardSettings(), seed=0)
    ratios = []
    for problem in problems:
        greedy_U = greedy_on_cost(problem.task, problem.costs)
        placed_U = next(iter(trainer.place(problem, samples=16)), greedy_U)
        problem.task.check(problem.task.plan_from(placed_U))
        ratios.append(problem.costs.step_ms(placed_U) / problem.costs.step_ms(greedy_U))
    assert np.mean(ratios) < 1


@pytest.mark.parametrize("enriched", [True, False])
def test_sequence_policies_learn_to_place_better(enriched: bool) -> None:
    problem = mdp(some_task(10, 3, 7))
    trainer = SequenceTrainer(SequencePolicy(0, enriched), seed=0)
    reward_before = float(trainer.episodes(problem, 64).reward_E.mean())
    trainer.train([problem.task], lambda task: problem)
    assert float(trainer.episodes(problem, 64).reward_E.mean()) > reward_before
    for rank_U in trainer.place(problem):
        problem.task.check(problem.task.plan_from(rank_U))


def test_autoshard_sees_how_full_a_device_is_where_memory_has_no_limit() -> None:
    """As a part of all tables; where there is a limit, of that."""

    def sizes_seen(memory: list[int] | None) -> np.ndarray:
        task = some_task(4, 2, memory=memory, table_bytes={f"t_{i}": 10 for i in range(4)})
        trainer, seen = SequenceTrainer(SequencePolicy(0, enriched=True), seed=0), list[np.ndarray]()
        trainer.policy.device_net.register_forward_pre_hook(
            lambda net, inputs: seen.append(inputs[0][..., -1].detach().numpy())
        )
        trainer.episodes(mdp(task), 0)
        return np.array(seen).sum(axis=-1).ravel()

    assert sizes_seen(None) == pytest.approx([0.0, 0.25, 0.5, 0.75])
    assert sizes_seen([80, 80]) == pytest.approx([0.0, 0.125, 0.25, 0.375])


def test_autoshards_reward_is_the_balance_that_was_measured() -> None:
    """As the micro-benchmark says, on legal placements only; an episode that overflows is punished unmeasured."""
    task, cluster = some_task(8, 2, 4), SimulatedCluster(seed=0)
    trainer = SequenceTrainer(SequencePolicy(0, enriched=True), seed=0)
    played = trainer.episodes(mdp(task), 6)
    overflowing = replace(played, overflow_E=np.array([True, *[False] * 5]))
    compute_ED = torch.from_numpy(measured_compute(task, overflowing, measurer(cluster)))
    rewards = balance(replace(overflowing, compute_ED=compute_ED)).numpy()
    assert rewards[0] == -1
    for rank_U, reward in zip(played.rank_EU[1:], rewards[1:], strict=True):
        compute = [
            r.fwd_compute_ms + r.bwd_compute_ms for r in measurer(cluster)(task, [task.plan_from(rank_U)])[0].ranks
        ]
        assert reward == pytest.approx(min(compute) / max(compute), rel=1e-5)


def test_autoshards_cost_head_learns_what_was_measured() -> None:
    """On placements of tables that it was trained on."""
    task, cluster = some_task(10, 3, 7), SimulatedCluster(seed=0)
    problem, trainer = mdp(task), SequenceTrainer(SequencePolicy(0, enriched=True), seed=0)

    def error() -> float:
        played = trainer.episodes(problem, 64)
        compute_ED = torch.from_numpy(measured_compute(task, played, measurer(cluster)) / problem.share)
        errors = trainer.policy.compute(played.held_EDH).detach() - compute_ED
        return float(errors.square().mean() / compute_ED.var())

    before = error()
    trainer.train([task], lambda task: problem, measure=measurer(cluster))
    assert error() < min(before, 0.3)


def test_autoshards_episodes_are_measured() -> None:
    task, cluster = some_task(8, 2, 4), SimulatedCluster(seed=0)
    asked: list[int] = []

    def counted(task: PlacementTask, plans: Sequence[ShardingPlan]) -> list[StepProfile]:
        asked.append(len(plans))
        return measurer(cluster)(task, plans)

    planner = Planner(
        "autoshard", settings=DreamShardSettings(iterations=1, placements=2, policy_updates=3, episodes=4)
    )
    planner.fit([task], counted)
    assert asked == [1, 1, 4, 4, 4]  # two placements for the cost model, then each update's episodes
    again = Planner("autoshard")
    again.load_state_dict(planner.state_dict())
    for made in (planner, again):  # what learned from measurements is not trained once more on predictions
        policies = made.makers.policies
        before = policies.sequences["autoshard"].to_json()
        trained: list[bool] = []
        policies.sequence_trainer = _watched(policies.sequence_trainer, trained)  # type: ignore[method-assign]
        made.plan(task)
        assert (
            not trained
            and made.makers.policies.sequences["autoshard"].to_json() == before
            and before["fitted"] == [1.0]
        )


def _watched(make: Callable[[SequencePolicy], SequenceTrainer], trained: list[bool]) -> Any:
    def made(policy: SequencePolicy) -> SequenceTrainer:
        trainer = make(policy)
        trainer.train = lambda *_: trained.append(True)  # type: ignore[method-assign]
        return trainer

    return made
