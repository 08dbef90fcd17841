"""Machines that leave, join and come back: the job goes on in its own run, from its newest checkpoint."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_autoshard.benchmarks.slow_link import ADDRESSES, DEVICE, Link, cannot_make_link, slow_link
from tests.jobs import CONFIG, REPOSITORY, TRAIN, free_port, started, steps_saved, torchrun, until

pytestmark = pytest.mark.alone  # hangs are told from slowness by the clock


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(
        CONFIG + f"run: {{name: job, dir: {tmp_path / 'runs'}, pin_cores: false}}\ncheckpoint: {{every_steps: 50}}\n"
    )
    return path


def test_a_job_goes_up_and_down_with_its_machines(config: Path, tmp_path: Path) -> None:
    """Two torchrun agents, as multi_node.sh starts them with NNODES=1:2; without any id."""
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    endpoint = f"--rdzv_endpoint=127.0.0.1:{free_port()}"
    start = ("--nnodes=1:2", "--rdzv_backend=c10d", endpoint, f"--rdzv_conf={patience}")
    command = torchrun(1, "--config", str(config), "train.epochs=1000", restarts=9, start=start)
    environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "GLOO_SOCKET_IFNAME": "lo"}
    checkpoints = tmp_path / "runs" / "job"

    with started(command, tmp_path, **environment) as head:
        time.sleep(1)
        with started(command, tmp_path, **environment) as other:
            until(lambda: "on 2 rank(s)" in head.said() + other.said(), 90)
            until(lambda: steps_saved(checkpoints)[-1:] > [50], 90)
        # gone with its rank, by kill -9
        alone = r"on 1 rank\(s\), .* resumed at step [1-9]"
        until(lambda: re.search(alone, head.said()), 90)
        before = steps_saved(checkpoints)[-1]
        until(lambda: steps_saved(checkpoints)[-1] > before, 90)
        with started(command, tmp_path, **environment) as third:
            both = r"on 2 rank\(s\), .* resumed at step [1-9]"
            until(lambda: re.search(both, head.said() + third.said()), 90)
    assert [path.name for path in (tmp_path / "runs").iterdir() if not path.is_symlink()] == ["job"]


def test_whoever_starts_the_same_job_again_continues_it_and_another_job_does_not(config: Path, tmp_path: Path) -> None:
    def command(job: str, *settings: str) -> list[str]:
        start = ("--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", f"--rdzv_id={job}")
        return torchrun(2, "--config", str(config), *settings, start=start)

    with started(command("one", "train.epochs=1000"), tmp_path) as job:
        until(lambda: steps_saved(tmp_path / "runs" / "job")[-1:] > [50])
        job.process.send_signal(signal.SIGKILL)  # torchrun itself, so nothing restarts the ranks
    with started(command("two", "train.max_steps=20"), tmp_path) as job:
        assert job.ends_within(90) == 0, job.said()
    resumed_at = steps_saved(tmp_path / "runs" / "job")[-1]  # of the ranks' own end, as far as they got
    with started(command("one", f"train.max_steps={resumed_at + 100}"), tmp_path) as job:
        assert job.ends_within(90) == 0, job.said()
        assert f"resumed at step {resumed_at}" in job.said()
    saved = [steps_saved(tmp_path / "runs" / name)[-1] for name in ("job", "job-2")]
    assert saved == [resumed_at + 100, 20]


@pytest.fixture
def link() -> Iterator[Link]:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(mbit_per_s=200) as made:
        yield made


def test_the_launcher_on_a_host_that_was_cut_off_ends_soon_after_its_rank(
    link: Link, config: Path, tmp_path: Path
) -> None:
    """torch's agent alone had waited for the other host for seven minutes."""
    head, launchers = f"{ADDRESSES[0]}:{free_port()}", []
    line = f"{sys.executable} -m dlrm_autoshard train {config} --nodes 2 --ranks 1 --head {head} --job cut"
    for host, address in zip(link.hosts, ADDRESSES, strict=True):
        named = f"hostname {address} && exec {line} train.epochs=1000 run.collective_timeout_seconds=6"
        command = ["ip", "netns", "exec", host, "unshare", "--uts", "sh", "-c", named]
        with open(tmp_path / f"said_{address}", "w") as output:
            launchers.append(subprocess.Popen(
                command, env={**os.environ, "GLOO_SOCKET_IFNAME": DEVICE}, stdout=output, stderr=output, cwd=tmp_path
            ))  # fmt: skip
    said = tmp_path / f"said_{ADDRESSES[1]}"
    try:
        until(lambda: steps_saved(tmp_path / "runs" / "job")[-1:] > [50], 120)
        subprocess.run(["ip", "-n", link.hosts[1], "link", "set", DEVICE, "down"], check=True)
        assert launchers[1].wait(120) == 1, said.read_text()
    finally:
        for process in launchers:
            process.kill()
            process.wait()
    assert f"{head}, which keeps the job's store, has not answered for " in said.read_text()
    assert "Traceback" not in said.read_text()


@pytest.mark.parametrize("fault", ["cut off", "killed"])
def test_across_hosts_the_rank_at_fault_is_named(fault: str, link: Link, config: Path, tmp_path: Path) -> None:
    """Three ranks on two hosts, two network namespaces: the third rank is alone on the other one."""
    port, hosts = free_port(), (0, 0, 1)
    ranks = []
    for rank, host in enumerate(hosts):
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DEVICE, "RANK": str(rank), "WORLD_SIZE": "3",
            "LOCAL_RANK": str(hosts[:rank].count(host)), "LOCAL_WORLD_SIZE": str(hosts.count(host)),
            "MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": str(port),
        }  # fmt: skip
        command = ["ip", "netns", "exec", link.hosts[host], sys.executable, TRAIN, "--config", str(config)]
        command += ["train.epochs=1000", "run.collective_timeout_seconds=6"]
        with open(tmp_path / f"said_{rank}", "w") as output:
            ranks.append(subprocess.Popen(command, env=environment, stdout=output, stderr=output, cwd=REPOSITORY))
    try:
        until(lambda: steps_saved(tmp_path / "runs" / "job")[-1:] > [50], 90)
        if fault == "killed":
            ranks[2].kill()
        else:
            subprocess.run(["ip", "-n", link.hosts[1], "link", "set", DEVICE, "down"], check=True)
        for process in ranks[:2] if fault == "killed" else ranks:
            process.wait(30)
        said = [(tmp_path / f"said_{rank}").read_text() for rank in range(3)]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert all(re.search(r"^rank 2 on \S+ .* at step \d+", text, re.MULTILINE) for text in said[:2]), said
    if fault == "cut off":
        assert "which keeps the job's store, " in said[2], said[2]
    assert not any("Traceback" in text for text in said), said
