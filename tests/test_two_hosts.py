"""Jobs on two hosts: two network namespaces with a slow link between them, where this machine can make them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from dlrm_autoshard.benchmarks.slow_link import ADDRESSES, DEVICE, Link, cannot_make_link, slow_link
from dlrm_autoshard.config import ExchangeDtypes
from dlrm_autoshard.distributed.lookup.link_speed import SLOW_FOR_IDS, mb_per_s, remark
from dlrm_autoshard.distributed.moves.reshard import reshard
from dlrm_autoshard.plan import ShardingPlan
from tests.jobs import CONFIG, REPOSITORY, TRAIN, free_port, steps_saved, until
from tests.small_embeddings import TABLES, global_batch, make, train_step, world

HOSTS, INT8 = (0, 0, 1, 1), ExchangeDtypes.model_validate("int8")


@pytest.fixture
def link() -> Iterator[Link]:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(100, 0, both_ways=True) as made:
        yield made


def train(moves: bool) -> list[list[float]]:
    """Pooled vectors of each step, and what this rank's tables are afterwards. moves: to the other host and back."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    here, there = (
        ShardingPlan({table.name: (first + i) % 4 for i, table in enumerate(TABLES)}, world_size) for first in (0, 2)
    )
    embeddings, found = make(rank, here, "rowwise_adagrad", "fp32", TABLES), list[list[float]]()
    for step in range(7):
        if moves and step in (2, 5):
            stats = reshard(embeddings, there if step == 2 else here, group=world(), checksums=True)
            assert len(stats.moves) == len(TABLES)
        found.append(train_step(embeddings, global_batch(step, world_size)[rank]).flatten().tolist())
    tensors = [embeddings.storage.tensors(name) for name in here.shards_on(rank)]
    return found + [tensor.flatten().tolist() for own in tensors for tensor in own.values()]


def train_both_ways(folder: str) -> None:
    """On each rank."""
    dist.init_process_group("gloo")
    Path(folder, f"{dist.get_rank()}.json").write_text(json.dumps([train(moves) for moves in (True, False)]))
    dist.barrier()
    dist.destroy_process_group()


def test_tables_move_to_the_other_host_and_back_and_no_bit_changes(link: Link, tmp_path: Path) -> None:
    call = f"from tests.test_two_hosts import train_both_ways; train_both_ways({str(tmp_path)!r})"
    link.run([sys.executable, "-c", call], HOSTS, timeout=120)
    for rank in range(len(HOSTS)):
        moved, still = json.loads((tmp_path / f"{rank}.json").read_text())
        assert moved == still and len(moved) == 7 + 2, "seven steps, a table's weights and its optimizer's state"


def measure_link(folder: str) -> None:
    """On each rank."""
    dist.init_process_group("gloo")
    Path(folder, f"carried-{dist.get_rank()}").write_text(str(mb_per_s(world())))
    dist.barrier()
    dist.destroy_process_group()


def test_what_the_slow_link_carries_is_known_on_every_rank(link: Link, tmp_path: Path) -> None:
    call = f"from tests.test_two_hosts import measure_link; measure_link({str(tmp_path)!r})"
    link.run([sys.executable, "-c", call], HOSTS, timeout=120)
    first, *others = (float((tmp_path / f"carried-{rank}").read_text()) for rank in range(4))
    assert others == [first] * 3
    assert first < 3 * 100 / 8 / 4 * 1.5, "100 Mbit/s, of which a rank has half, two thirds of what it sends"
    assert first < SLOW_FOR_IDS and remark(INT8, first) is None


def test_where_int8_makes_steps_slower_a_start_says_so() -> None:
    assert "carries 1,250 MB/s for each rank: int8" in str(remark(INT8, 1250.0))
    assert str(remark(INT8, float("inf"))).startswith("Ranks share memory: ")
    assert remark(ExchangeDtypes.model_validate("fp16"), float("inf")) is None


def started_on(link: Link, folder: Path, name: str, *settings: str) -> list[subprocess.Popen[bytes]]:
    """A job's four ranks; what they say is in files of the folder."""
    port, ranks = free_port(), []
    for rank, host in enumerate(HOSTS):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, "RANK": str(rank), "WORLD_SIZE": "4",
            "LOCAL_RANK": str(HOSTS[:rank].count(host)), "LOCAL_WORLD_SIZE": str(HOSTS.count(host)),
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port),
        }  # fmt: skip
        command = ["ip", "netns", "exec", link.hosts[host], sys.executable, TRAIN, "--config", f"{folder}/config.yaml"]
        with open(folder / f"{name}-{rank}", "w") as output:
            ranks.append(subprocess.Popen(
                [*command, f"run.name={name}", *settings], env=environment, stdout=output, stderr=output, cwd=REPOSITORY
            ))  # fmt: skip
    return ranks


@pytest.mark.alone
def test_a_job_whose_second_host_dies_resumes_and_ends_as_if_nothing_had_been(link: Link, tmp_path: Path) -> None:
    own = f"run: {{dir: {tmp_path / 'runs'}, pin_cores: false, collective_timeout_seconds: 20}}\n"
    (tmp_path / "config.yaml").write_text(CONFIG + own + "checkpoint: {every_steps: 20}\n")
    runs, ranks = tmp_path / "runs", list[subprocess.Popen[bytes]]()
    try:
        ranks += (killed := started_on(link, tmp_path, "killed", "train.epochs=1000"))
        until(lambda: steps_saved(runs / "killed")[-1:] > [20], 120)
        for rank in killed[2:]:
            rank.kill()
        assert all(rank.wait(60) for rank in killed[:2])
        saved, said = steps_saved(runs / "killed")[-1], (tmp_path / "killed-0").read_text()
        assert re.search(r"^rank [23] on \S+ .* at step \d+", said, re.MULTILINE) and "Traceback" not in said, said
        last = f"train.max_steps={saved + 20}"
        ranks += (resumed := started_on(link, tmp_path, "resumed", last, "--resume", str(runs / "killed")))
        assert [rank.wait(120) for rank in resumed] == [0] * 4, (tmp_path / "resumed-0").read_text()
        assert f"resumed at step {saved}" in (tmp_path / "resumed-0").read_text()
        ranks += (whole := started_on(link, tmp_path, "whole", last))
        assert [rank.wait(120) for rank in whole] == [0] * 4
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    last_of = [sorted((runs / run / "checkpoints").glob(f"step_*{saved + 20}/rank_*")) for run in ("killed", "whole")]
    resumed_bytes, whole_bytes = ([file.read_bytes() for file in files] for files in last_of)
    assert len(whole_bytes) == 4 and resumed_bytes == whole_bytes
