"""Trains a small job that splits and moves tables at random every few steps, and kills ranks on request.

    torchrun --nproc_per_node=2 --max-restarts=9 -m tests.moving_job --dir D --seed 3

Moves and data depend on seed and step alone, so every run of a seed must end with the same bits, killed, moved or not.
Rank 0 writes each step's loss to D/loss, a rank at the end its digests to D/final_RANK.json; kills: D/kills.json.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch.distributed as dist

from dlrm_autoshard.autoshard.decision import Decision, Interval
from dlrm_autoshard.config import Config, parse_config
from dlrm_autoshard.distributed.lookup.embeddings import ShardedEmbeddings
from dlrm_autoshard.distributed.lookup.lookups import SentIds
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.training.run_directory import claimed_run_dir, job_of_this_process
from dlrm_autoshard.training.trainer import Trainer

MOVE_EVERY, CHECKPOINT_EVERY = 4, 5
_LATER = 1 << 30  # "starting" is no step of its own: it is always reached
MOMENTS = ("planning", "step", "saving", "during a move", "starting", "before a move", "after a move")


@dataclass(frozen=True)
class Kill:
    """kill -9, `seconds` after the first `moment` from `step` on, of that rank or of the torchrun above it."""

    moment: str
    step: int
    rank: int
    victim: Literal["rank", "torchrun"] = "rank"
    seconds: float = 0.0


def settings(
    folder: Path,
    seed: int,
    steps: int,
    optimizer: str = "rowwise_adagrad",
    *,
    move_every: int = MOVE_EVERY,
    checkpoints: bool = True,
) -> Config:
    tables = [
        {
            "name": f"t{i}",
            "num_embeddings": 2000 * (i + 1),
            "embedding_dim": 8 * (1 + i % 3),
            "mean_pooling": 1.0 + i % 4,
        }
        for i in range(8)
    ]
    return parse_config(
        {
            "run": {"dir": str(folder), "name": "run", "device": "cpu", "seed": seed, "collective_timeout_seconds": 60},
            "data": {
                "source": "synthetic",
                "tables": tables,
                "train_samples": 128 * 40,
                "test_samples": 0,
                "seed": seed,
            },
            "tables": {"optimizer": {"name": optimizer, "lr": 0.1}},
            "train": {"batch_size": 64, "epochs": 1 + steps // 40, "max_steps": steps, "log_every_steps": 1},
            "checkpoint": {"enabled": checkpoints, "every_steps": CHECKPOINT_EVERY if checkpoints else None},
            "profile": {"enabled": False},
            "autoshard": {"enabled": False, "reshard": {"every_steps": move_every}},
        }
    )


class RandomMoves:
    """Replaces resharding by plans drawn from (seed, step). kill: called with each moment at which a rank can die.
    rows: tables are also split by rows, each range by its own columns."""

    def __init__(
        self,
        seed: int,
        embeddings: ShardedEmbeddings,
        runtime: Runtime,
        kill: Killer | None = None,
        *,
        rows: bool = False,
    ) -> None:
        self._seed, self._embeddings, self._runtime, self._kill = seed, embeddings, runtime, kill
        self._most_row_cuts = 2 if rows else 0
        self.step = 0
        self.moved = 0

    def after_interval(self, interval: Interval | None) -> Decision:
        plan = self.plan_at(self.step)
        if self._kill:
            self._kill.at("before a move", self.step)
        stats = reshard(self._embeddings, plan, group=self._runtime.control, chunk_bytes=1 << 16)
        self.moved += stats.bytes
        if self._kill:
            self._kill.at("after a move", self.step)
        return Decision(0, self.step, "moved", moves=stats.moves, new_plan=plan)

    def plan_at(self, step: int) -> ShardingPlan:
        draw = np.random.default_rng([self._seed, step])
        tables, ranks = self._embeddings.tables, self._embeddings.world_size
        if draw.random() < 0.25:  # everything on one rank, the others empty
            return ShardingPlan(dict.fromkeys((t.name for t in tables), int(draw.integers(ranks))), ranks)
        most = 2 if self._embeddings.config.optimizer.splits_tables else 0
        rank_of = {}
        for table in tables:
            row_cuts = draw.integers(0, table.num_embeddings, self._most_row_cuts)
            for rows in pairwise(sorted({0, *row_cuts.tolist(), table.num_embeddings})):
                cuts = draw.integers(0, table.embedding_dim // 4, most) * 4
                for columns in pairwise(sorted({0, *cuts.tolist(), table.embedding_dim})):
                    rank_of[table.row_range(*rows).part(*columns).name] = int(draw.integers(ranks))
        return ShardingPlan(rank_of, ranks)

    def is_due(self, epoch: int) -> bool:
        return True

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        pass


class Killer:
    """Makes this rank's kills, one a start, each once in a job's life: marks on disk outlive the rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        kills = folder / "kills.json"
        planned = [Kill(**kill) for kill in json.loads(kills.read_text())] if kills.exists() else []
        self._mark = folder / f"killed_{len(list(folder.glob('killed_*')))}"
        upcoming = planned[len(list(folder.glob("killed_*"))) :]
        self._next = upcoming[0] if upcoming and upcoming[0].rank == rank else None
        self._moving_at, self._chunks = -1, 0
        send, receive = dist.isend, dist.irecv

        def counted(transfer: Any) -> Any:
            def wrapped(*args: Any, **options: Any) -> Any:
                self._chunks += 1
                if self._chunks == 4:  # some chunks have gone, some not
                    self.at("during a move", self._moving_at)
                return transfer(*args, **options)

            return wrapped

        dist.isend, dist.irecv = counted(send), counted(receive)

    def at(self, moment: str, step: int) -> None:
        if moment == "before a move":
            self._moving_at, self._chunks = step, 0
        kill = self._next
        if kill is None or moment != kill.moment or step < kill.step:
            return
        self._next = None
        if kill.seconds:
            timer = threading.Timer(kill.seconds, self._kill, [kill])
            timer.daemon = True
            timer.start()
        else:
            self._kill(kill)

    def _kill(self, kill: Kill) -> None:
        self._mark.touch()
        os.kill(os.getpid() if kill.victim == "rank" else os.getppid(), signal.SIGKILL)


class MovingTrainer(Trainer):
    def __init__(
        self,
        config: Config,
        runtime: Runtime,
        run_dir: Path,
        *,
        moves: bool,
        killer: Killer | None = None,
        rows: bool = False,
    ) -> None:
        self._killer, self._folder = killer, Path(config.run.dir)
        if killer is not None:
            killer.at("planning", 0)
            killer.at("starting", _LATER)
        super().__init__(config, runtime, run_dir)
        self.moves = RandomMoves(config.run.seed, self.job.embeddings, runtime, killer, rows=rows) if moves else None
        self.job.intervals.resharding = self.moves  # type: ignore[assignment]
        save = self.saver.save

        def killed_or_saved() -> None:
            if killer is not None:
                killer.at("saving", self.job.position.step)
            save()

        self.saver.save = killed_or_saved  # type: ignore[method-assign]

    def _train_step(self, ids: SentIds) -> None:
        if self._killer is not None:
            self._killer.at("step", self.job.position.step)
        super()._train_step(ids)
        if self.moves is not None:
            self.moves.step = self.job.position.step
        if self.job.runtime.rank == 0:  # where the last start finds all steps done, it has no loss of its own
            (self._folder / "loss").write_text(repr(float(self.job.dense.global_loss)))

    def digests(self) -> dict[str, str]:
        """Returns digests of everything that this rank holds."""
        return {
            name: hashlib.sha256(value.detach().contiguous().numpy().tobytes()).hexdigest()
            for name, value in self.job.state.tensors().items()
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rows", action="store_true")
    arguments = parser.parse_args()
    config = settings(arguments.dir, arguments.seed, arguments.steps, "adagrad")  # whose tables may be split
    planning = {"enabled": True, "budget_seconds": 1.0, "measure_plans": 2}
    config = config.model_copy(update={"autoshard": config.autoshard.model_copy(update=planning)})
    with Runtime.start(config.run) as runtime, ExitStack() as held:
        killer = Killer(arguments.dir, runtime.rank)
        job = frozenset(filter(None, runtime.all_gather(job_of_this_process())))
        claim = claimed_run_dir(config, None, job)
        run_dir = runtime.from_rank_0(lambda: held.enter_context(claim))
        trainer = MovingTrainer(config, runtime, run_dir, moves=True, killer=killer, rows=arguments.rows)
        trainer.run()
        (arguments.dir / f"final_{runtime.rank}.json").write_text(json.dumps(trainer.digests()))
        del trainer


if __name__ == "__main__":
    main()
