"""Ranks of jobs in the race that users have no command for: the clairvoyant's, whose moves are free, and TorchRec's.

Started by torchrun: -m dlrm_autoshard.benchmarks.race_jobs ARM CONFIG RUN, where RUN/schedule.json has plans by epoch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from dlrm_autoshard.benchmarks.race_worlds import NUM_DENSE
from dlrm_autoshard.plan import ShardingPlan


def _clairvoyant(config_file: Path, run: Path, plans: Mapping[int, ShardingPlan]) -> None:
    """A job whose tables move at the epochs that the schedule names."""
    from dlrm_autoshard.autoshard.intervals import Ended
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.distributed.moves.reshard import reshard
    from dlrm_autoshard.distributed.ranks.runtime import Runtime
    from dlrm_autoshard.training.start_record import record_start
    from dlrm_autoshard.training.trainer import Trainer

    config = load_config(config_file)
    with Runtime.start(config.run) as runtime:

        class Clairvoyant(Trainer):
            def _tell(self, ended: Ended) -> None:
                super()._tell(ended)
                plan = plans.get(self.job.position.epoch + 1)
                if plan is None:
                    return
                stats = reshard(self.job.embeddings, plan, group=self.job.runtime.control)
                self.job.step.redistribute()
                free.append((self.job.position.step, stats.seconds))

        free: list[tuple[int, float]] = []
        job = run / "job"
        if runtime.rank == 0:
            job.mkdir(parents=True, exist_ok=True)
        runtime.barrier()
        trainer = Clairvoyant(config, runtime, job)
        if runtime.rank == 0:
            record_start(job, config, runtime.world_size)
        trainer.run()
        if runtime.rank == 0:
            (job / "free_seconds.json").write_text(json.dumps(free))


def _torchrec(config_file: Path, run: Path, plan: ShardingPlan | None) -> None:
    """TorchRec's job on the same loader: a bottom MLP, pooled vectors beside it, a top MLP. plan: None for its own.
    It writes checkpoints where ours do by default, and keeps as many."""
    import torch

    from dlrm_autoshard.benchmarks.race_torchrec import Job
    from dlrm_autoshard.config import load_config
    from dlrm_autoshard.data.loader import Loader
    from dlrm_autoshard.data.open import open_source
    from dlrm_autoshard.distributed.ranks.runtime import Runtime, keep_freed_memory

    keep_freed_memory()
    config = load_config(config_file)
    source = open_source(config.data, config.tables)
    with Runtime.start(config.run) as runtime:
        poolings = source.read("train", 0, 0, config.train.batch_size).lengths_TB.double().mean(1).tolist()
        size, adagrad = config.train.batch_size, torch.optim.Adagrad  # which our jobs have by default
        trainer = Job(source.tables, poolings, NUM_DENSE, size, plan, dense=adagrad)
        job, number = run / "job", 0
        job.mkdir(parents=True, exist_ok=True)
        seconds = 0.0

        def save(epoch: int) -> None:
            nonlocal seconds
            if config.checkpoint.enabled:
                started = time.perf_counter()
                trainer.save(job / "checkpoints" / str(epoch))
                if runtime.rank == 0:
                    shutil.rmtree(job / "checkpoints" / str(epoch - config.checkpoint.keep), ignore_errors=True)
                runtime.barrier()
                seconds += time.perf_counter() - started

        (job / "environment.json").touch()
        save(0)
        with open(job / f"metrics{'' if runtime.rank == 0 else runtime.rank}.jsonl", "w") as metrics:
            for epoch in range(config.train.epochs):
                ranks = (size, runtime.rank, runtime.world_size)
                with Loader(source, "train", epoch, *ranks, cores=runtime.loader_cores) as loader:
                    for batch in itertools.islice(loader, config.train.max_steps):
                        trainer.step(batch)
                        number += 1
                        if number % config.train.log_every_steps == 0:
                            print(json.dumps({"step": number}), file=metrics, flush=True)
                save(epoch + 1)
        if runtime.rank == 0:
            (job / "result.json").write_text(json.dumps({"seconds": {"checkpoints": seconds}}))


STARTS: dict[str, Callable[[Path, Path, Mapping[int, ShardingPlan]], None]] = {
    "clairvoyant": _clairvoyant,
    "torchrec": lambda config, run, _: _torchrec(config, run, None),
    "torchrec_our_plan": lambda config, run, plans: _torchrec(config, run, plans[0]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arm", choices=list(STARTS))
    parser.add_argument("config", type=Path)
    parser.add_argument("run", type=Path)
    given = parser.parse_args()
    schedule = json.loads((given.run / "schedule.json").read_text())
    STARTS[given.arm](given.config, given.run, {int(e): ShardingPlan.load(Path(path)) for e, path in schedule.items()})


if __name__ == "__main__":
    main()
