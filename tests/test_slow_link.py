"""Two namespaces and a slow link, where this machine can make them: real sockets, four real ranks."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlrm_autoshard.benchmarks import hosts
from dlrm_autoshard.benchmarks import slow_link as links
from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.slow_link import Link, LinkError, cannot_make_link, slow_link
from dlrm_autoshard.records.interval import IntervalProfile, epochs_file
from dlrm_autoshard.records.jsonl import read_jsonl


@pytest.fixture
def link() -> Iterator[Link]:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(mbit_per_s=20) as made:
        yield made


def test_the_two_hosts_reach_each_other_and_go_away_afterwards() -> None:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(mbit_per_s=20) as link:
        seen = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
        assert all(host in seen for host in link.hosts)
        assert "20 Mbit/s" in link.made_by
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert not any(host in left for host in link.hosts)


def test_a_rank_that_fails_is_named_with_its_last_words(link: Link) -> None:
    with pytest.raises(LinkError, match=r"rank 0 .*no such thing"):
        link.run(["sh", "-c", "echo no such thing >&2; exit 3"], hosts=(0, 1), timeout=10)


def test_where_it_cannot_be_made_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda tool: None)
    assert cannot_make_link() == "`ip` is missing: install iproute2."


# Three ranks on one host, one on another behind a slow uplink. A table on the far rank sends its vectors up the slow
# link to three ranks; a table on the others sends its gradients of one rank's samples up there. So every table that
# leaves the far rank saves two thirds of its traffic.
HOSTS = (0, 0, 0, 1)


def train(link: Link, folder: Path, epochs: int, autoshard: dict[str, Any]) -> list[IntervalProfile]:
    folder.mkdir()
    settings = {
        "run": {"dir": str(folder), "name": "run", "device": "cpu", "pin_cores": False},
        "data": {
            "source": "synthetic",
            "tables": [{"name": f"t{i}", "num_embeddings": 20_000, "mean_pooling": 2.0} for i in range(16)],
            "train_samples": len(HOSTS) * 128 * 30,
            "test_samples": 0,
            "reuse_batches": 8,
        },
        "tables": {"embedding_dim": 64},
        "model": {"dense_arch_layer_sizes": [64], "over_arch_layer_sizes": [32, 1]},
        "train": {"batch_size": 128, "epochs": epochs},
        "checkpoint": {"enabled": False},
        "profile": {"every_steps": 2, "warmup_steps": 2},
        "autoshard": {"measure_plans": 0, **autoshard},
    }
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(settings))
    launcher = Path(__file__).parents[1] / "launch" / "train.py"
    link.run([sys.executable, str(launcher), "--config", str(config)], HOSTS, timeout=240)
    return [IntervalProfile.from_json(line) for line in read_jsonl(epochs_file(folder / "run"))]


@pytest.mark.slow
def test_the_loop_learns_that_the_link_is_costly_and_leaves_the_far_rank_alone(tmp_path: Path) -> None:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(mbit_per_s=50) as link:
        loop = train(link, tmp_path / "loop", 4, {"enabled": True, "algorithm": "dim_greedy"})
        start, found = loop[0].plan, loop[-1].plan
        throughput = {}
        for name, plan in (("start", start), ("found", found)):
            plan.save(tmp_path / f"{name}.json")
            fixed = {"enabled": False, "placement": str(tmp_path / f"{name}.json")}
            throughput[name] = train(link, tmp_path / name, 1, fixed)[0].throughput
    assert len(found.shards_on(3)) < len(start.shards_on(3))
    assert throughput["found"] > 1.1 * throughput["start"]


def test_bench_hosts_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosts, "cannot_make_link", lambda: "making network namespaces needs root.")
    with pytest.raises(BenchError, match=r"bench hosts .* cannot: making network namespaces needs root\."):
        hosts.run(quick=True)


@pytest.mark.slow
def test_what_crosses_the_link_in_a_step(tmp_path: Path) -> None:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    with slow_link(1000, 0, both_ways=True) as link:
        assert "each way" in link.made_by
        out = tmp_path / "found.json"
        link.run([sys.executable, "-m", "dlrm_autoshard.benchmarks.hosts", str(out), "1"], hosts.HOSTS, timeout=120)
    crossed = {name: measured["bytes"][0] for name, measured in json.loads(out.read_text()).items()}
    fp32 = crossed["fp32, ids as int32"]
    assert 0.5 < crossed["fp16"] / fp32 < 0.52 and crossed["fp16"] < crossed["fp16, ids as int32"]
    assert crossed["int8"] / fp32 <= 0.28
    ring, by_host = crossed[hosts.RING], crossed["large MLPs, int8, dense gradients by host"]
    dense = 4 * 473_411  # bytes of the gradients: 3/2 of them in a ring of four, once by two hosts
    assert 0.45 * dense < ring - by_host < 0.6 * dense
