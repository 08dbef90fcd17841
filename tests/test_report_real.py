"""Reports on records that real trainers wrote: a rank with more lookups, a rank whose core something else uses."""

import os
from pathlib import Path

import pytest

from dlrm_autoshard.commands.main import main
from dlrm_autoshard.records.diagnosis import waited_for
from dlrm_autoshard.records.run import RunRecord
from tests.busy_core import busy_in_epochs
from tests.ranks import run_ranks
from tests.trainers import config, make_runtime, trainer


def train(rank: int, world_size: int, folder: Path, pooling: list[float]) -> None:
    tables = [
        {"name": f"table_{i}", "num_embeddings": 20_000, "embedding_dim": 64, "mean_pooling": mean}
        for i, mean in enumerate(pooling)
    ]
    samples = 512 * world_size * 40
    settings = config(
        folder.parent,
        data={"tables": tables, "train_samples": samples, "reuse_batches": 4},
        train={"batch_size": 512, "epochs": 4},
        profile={"every_steps": 2, "warmup_steps": 2},
    )
    if rank == 0:
        folder.mkdir()
        (folder / "config.yaml").write_text(settings.to_yaml())
    with trainer(settings, make_runtime(rank, world_size), folder) as running:
        running.run()
        running.write_report()


def two_cores() -> list[int]:
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("needs a core for each of two ranks")
    return cores[:2]


@pytest.mark.alone  # another test on rank 0's core makes that rank the slow one
def test_a_real_rank_with_more_lookups_is_the_one_that_others_wait_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Tables go round robin: rank 1 gets the odd ones, with six times the lookups."""
    for attempt in range(3):  # machines that tests run on are shared, and a job of some seconds may be disturbed
        run = tmp_path / f"attempt_{attempt}" / "run"
        run.parent.mkdir()
        run_ranks(train, 2, run, [10, 60, 10, 60], timeout=120, cores=two_cores())
        record = RunRecord.load(run)
        assert len(record.intervals) == 4 and record.stopped_early is None
        for profile in record.intervals:
            assert profile.samples >= 8
            assert profile.accounted == pytest.approx(1.0, abs=0.03)
        stragglers = [profile.straggler for profile in record.intervals]
        waits = [waited_for(profile)["grad_allreduce_wait"]["rank"] for profile in record.intervals]
        blamed_1 = [s is not None and s.rank == 1 and s.stage in ("fwd_compute", "bwd_compute") for s in stragglers]
        if waits.count(1) >= 3 and sum(blamed_1) >= 3:
            break
    else:
        pytest.fail(f"others waited for ranks {waits}, and {stragglers} were blamed, in the last of three jobs")
    compute = [sum(p.measured[rank].bwd_compute_ms + p.measured[rank].fwd_compute_ms for p in record.intervals)
               for rank in (0, 1)]  # fmt: skip
    assert compute[1] > 2 * compute[0]
    blamed = next(s for s in stragglers if s is not None and s.cause == "load")
    assert {name for name, _ in blamed.tables} == {"table_1", "table_3"}
    assert main(["report", str(run)]) == 0
    assert "table_1" in capsys.readouterr().out
    assert (run / "report.html").stat().st_size > 800_000


@pytest.mark.slow  # it needs a machine that does nothing else
def test_a_real_rank_whose_core_is_shared_from_epoch_2_on_is_starved(tmp_path: Path) -> None:
    cores = two_cores()
    with busy_in_epochs(cores[1], 2, 3, tmp_path / "run"):
        run_ranks(train, 2, tmp_path / "run", [40, 40, 40, 40], timeout=200, cores=cores)
    record = RunRecord.load(tmp_path / "run")
    alone, shared = record.intervals[1], record.intervals[3]
    assert alone.cpu_share[1] is not None and shared.cpu_share[1] is not None
    assert shared.cpu_share[1] < 0.85 * alone.cpu_share[1]  # beside itself: nobody promises a whole core when alone
    assert shared.straggler is not None
    assert (shared.straggler.rank, shared.straggler.cause) == (1, "starved of CPU")
