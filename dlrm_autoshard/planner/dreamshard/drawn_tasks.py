"""Draws placement tasks to fit and compare planners; training and test tasks share no tables.

tasks = draw_tasks(pool, tables_per_task=50, count=50, seed=0)
tasks.train[0], tasks.test[0]                 # TablePools of 50 tables each
tasks.save(Path("tasks.json"))
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field
from typing_extensions import TypedDict

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats.json_file import read_json
from dlrm_autoshard.formats.numbers import BatchSize, Count
from dlrm_autoshard.planner.dreamshard.pool import PoolRecord, TablePool

TASKS_SCHEMA = 1
Task = Annotated[list[Count], Field(min_length=1)]


class TasksRecord(TypedDict):
    """tasks.json: tables by their index in the pool."""

    schema: Literal[1]
    batch_size: BatchSize
    train: list[Task]
    test: list[Task]
    pool: PoolRecord


@dataclass(frozen=True)
class TaskSet:
    """Training and test tasks: `train` and `test` list table indices of `pool`. batch_size: global."""

    pool: TablePool
    train_indices: tuple[tuple[int, ...], ...]
    test_indices: tuple[tuple[int, ...], ...]
    batch_size: int

    @property
    def train(self) -> list[TablePool]:
        return [self.pool.chosen(task) for task in self.train_indices]

    @property
    def test(self) -> list[TablePool]:
        return [self.pool.chosen(task) for task in self.test_indices]

    def to_json(self) -> dict[str, Any]:
        return {
            "schema": TASKS_SCHEMA,
            "batch_size": self.batch_size,
            "train": [list(task) for task in self.train_indices],
            "test": [list(task) for task in self.test_indices],
            "pool": self.pool.to_json(),
        }

    def save(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_json()) + "\n")

    @staticmethod
    def load(path: Path) -> TaskSet:
        record = read_json(path, TasksRecord, "task file")
        try:
            pool = TablePool.from_json(record["pool"])
            for name in ("train", "test"):
                for number, task in enumerate(record[name]):
                    bad = next((table for table in task if table >= len(pool)), None)
                    if bad is not None or len(set(task)) < len(task):
                        what = "names a table twice" if bad is None else f"names table {bad} of {len(pool)}"
                        raise UserError(f"'{name}.{number}' {what}; numbers go from 0 to {len(pool) - 1}, each once.")
        except UserError as error:
            raise UserError(f"task file '{path}': {error}") from error
        train, test = (tuple(map(tuple, record[name])) for name in ("train", "test"))
        return TaskSet(pool, train, test, record["batch_size"])


def draw_tasks(pool: TablePool, tables_per_task: int, count: int, seed: int, batch_size: int) -> TaskSet:
    """Draws `count` training tasks from one random half of the tables, and `count` test tasks from the other."""
    generator = np.random.default_rng(seed)
    shuffled = generator.permutation(len(pool))
    halves = np.array_split(shuffled, 2)
    if tables_per_task > len(halves[1]):
        raise UserError(
            f"a task of {tables_per_task} tables needs a pool of at least {2 * tables_per_task}, since training and "
            f"test tables are kept apart; this one has {len(pool)}. Ask for at most {len(halves[1])} a task."
        )
    train, test = (
        tuple(
            tuple(sorted(int(table) for table in generator.choice(half, tables_per_task, replace=False)))
            for _ in range(count)
        )
        for half in halves
    )
    return TaskSet(pool, train, test, batch_size)
