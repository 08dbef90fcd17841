"""Trains the policy that the package ships, by REINFORCE on tasks and costs drawn at random; writes `policy.json`.

    python -m dlrm_autoshard.planner.dreamshard.train_policy --updates 3000

A minute or two on one core. Weights, seed, command and figures on tasks that were not trained on go into the file.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

import numpy as np

from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.costs.cost_model import CostModel
from dlrm_autoshard.planner.dreamshard.dreamshard import DreamShard
from dlrm_autoshard.planner.dreamshard.mdp import EstimatedMDP
from dlrm_autoshard.planner.dreamshard.policy import SHIPPED, DevicePolicy
from dlrm_autoshard.planner.dreamshard.pool import synthetic_pool
from dlrm_autoshard.planner.dreamshard.settings import DreamShardSettings
from dlrm_autoshard.planner.learned_costs import LearnedCosts
from dlrm_autoshard.planner.search.greedy import KEYS, greedy
from dlrm_autoshard.planner.search.greedy_on_cost import greedy_on_cost
from dlrm_autoshard.planner.search.local_search import improve, search
from dlrm_autoshard.planner.task import PlacementTask

TASKS, HELD_OUT = 300, 40
LEARNING_RATE, EPISODES = 5e-3, 16


def draw_problem(generator: np.random.Generator) -> EstimatedMDP:
    """Draws a task of 8 to 120 tables on 2 to 16 ranks, two in five with little memory, and random costs."""
    tables = int(np.exp(generator.uniform(np.log(8), np.log(120))))
    devices = int(np.exp(generator.uniform(np.log(2), np.log(min(16, tables / 2) + 0.99))))
    batch_size = int(generator.choice([1024, 4096, 16384]))
    pool = synthetic_pool(tables, seed=int(generator.integers(1 << 30)), batch_size=batch_size)
    task = PlacementTask.build(pool.tables, pool.stats, Topology(devices), batch_size=batch_size)
    if generator.random() < 0.4:
        total, largest = sum(task.table_bytes.values()), max(task.table_bytes.values())
        room = int(max(1.1 * largest, generator.uniform(1.15, 1.6) * total / devices))
        topology = Topology(devices, (room,) * devices)
        task = PlacementTask.build(pool.tables, pool.stats, topology, batch_size=batch_size)
    model = CostModel(int(generator.integers(1 << 30)))
    model.prices_PS *= np.exp(0.5 * generator.standard_normal(model.prices_PS.shape)).astype(np.float32)
    for net in model.nets.values():
        net.parameters[-2] *= 20  # tables and fusion differ from what the prices say by some 20%
    costs = LearnedCosts(0, model)
    costs.exchange.prices_SP *= np.exp(0.7 * generator.standard_normal(costs.exchange.prices_SP.shape))
    return EstimatedMDP(task, costs.costs_of(task))


def judge(policy: DevicePolicy, problems: list[EstimatedMDP]) -> dict[str, float]:
    """Returns mean predicted step cost over that of `search` with 20 kicks, and seconds of one pass."""
    trainer, ratios, seconds = DreamShard(policy, DreamShardSettings(), seed=0), [], []
    for mdp in problems:
        task, costs = mdp.task, mdp.costs
        started = time.perf_counter()
        found = trainer.place(mdp, samples=0)
        seconds.append(time.perf_counter() - started)
        greedy_U = greedy_on_cost(task, costs)
        policy_U = found[0] if found else greedy_U
        sampled_U = next(iter(trainer.place(mdp, samples=16)), greedy_U)
        plans = {
            "best_heuristic": min((greedy(task, key) for key in KEYS), key=costs.step_ms),
            "greedy_on_cost": greedy_U,
            "policy": policy_U,
            "policy_and_16_samples": sampled_U,
            "greedy_on_cost_and_search": improve(task, costs, greedy_U),
            "policy_and_search": improve(task, costs, policy_U),
        }
        best = costs.step_ms(search(task, costs, kicks=20))
        ratios.append({name: costs.step_ms(rank_U) / best for name, rank_U in plans.items()})
    means = {name: float(np.mean([ratio[name] for ratio in ratios])) for name in ratios[0]}
    return {**means, "policy_seconds": float(np.mean(seconds))}


def train(updates: int, seed: int) -> tuple[DevicePolicy, dict[str, Any]]:
    """Trains the policy that the package ships; returns it with its figures on held-out tasks."""
    generator = np.random.default_rng(seed)
    problems = [draw_problem(generator) for _ in range(TASKS)]
    held_out = [draw_problem(np.random.default_rng([seed, 1, i])) for i in range(HELD_OUT)]
    policy = DevicePolicy(seed)
    before = judge(policy, held_out)
    trainer = DreamShard(policy, DreamShardSettings(episodes=EPISODES), seed)
    started = time.perf_counter()
    for update in range(updates):
        trainer.learning_rate = LEARNING_RATE * (1 - update / updates)
        trainer.reinforce(trainer.sampled(problems[int(generator.integers(TASKS))], EPISODES))
    return policy, {
        "command": f"python -m dlrm_autoshard.planner.dreamshard.train_policy --updates {updates} --seed {seed}",
        "seconds": time.perf_counter() - started,
        "held_out_cost_over_search": {"untrained": before, "trained": judge(policy, held_out)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--updates", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    policy, figures = train(arguments.updates, arguments.seed)
    weights = {name: np.round(array, 5).tolist() for name, array in policy.to_json().items()}
    SHIPPED.write_text(json.dumps({"schema": 1, **figures, "weights": weights}) + "\n")
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
