"""`bench network`: links between a job's ranks, the slow one named, and exchanges where a start finds them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dlrm_autoshard.benchmarks.network import Link, Network, in_words
from dlrm_autoshard.benchmarks.slow_link import cannot_make_link, slow_link
from dlrm_autoshard.commands.main import main
from dlrm_autoshard.plan import Topology
from dlrm_autoshard.planner.costs.replay import CommsSample
from dlrm_autoshard.planner.task import PlacementTask
from dlrm_autoshard.probe.calibration import cost_log
from dlrm_autoshard.probe.hardware import hardware_fingerprint
from dlrm_autoshard.tables import TableConfig, TableStats


def test_what_two_ranks_measure_is_printed_and_kept_where_their_next_start_reads_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "network", "--quick", "--ranks", "2", "--costs", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert "2 ranks on 1 host" in printed and "within host 0" in printed and "slow" not in printed
    tables = [TableConfig("a", 10, 8), TableConfig("b", 10, 8)]
    task = PlacementTask.build(tables, [TableStats(1.0)] * 2, Topology(2, hosts=(0, 0)), batch_size=64)
    log = cost_log(tmp_path, task, hardware_fingerprint(), exchange="fp32 by shared memory")
    assert log is not None
    found = log.read()
    assert len(found) > 2 and all(isinstance(one, CommsSample) and one.hosts == (0, 0) for one in found)
    assert all(min(one.fwd_comms_ms) > 0 for one in found if isinstance(one, CommsSample))


def test_one_rank_has_no_network(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "network", "--ranks", "1"]) == 2
    assert "--ranks is 1; a network has 2 or more." in capsys.readouterr().err


def test_a_link_is_named_that_is_much_slower_than_most_of_its_kind() -> None:
    between = [Link(a, b, 100.0 if (a, b) == (2, 0) else 1000.0, 0.2) for a in range(3) for b in range(3) if a != b]
    within = [Link(host, host, 5000.0, 0.1) for host in range(3)]
    sample = CommsSample((64, 64), 64, (1.0, 1.0), (1.0, 1.0))
    names = ("host 0 (x)", "host 1 (y)", "host 2 (z)")
    said = in_words(Network((0, 0, 1, 1, 2, 2), names, (*within, *between), (sample,)))
    slow = [line for line in said.splitlines() if "<- slow" in line]
    assert slow == ["host 2 (z) to host 0 (x): 100 MB/s (0.80 Gbit/s), 0.20 ms  <- slow: 10.0 times slower than most"]


@pytest.mark.slow
def test_the_slow_link_between_two_hosts_is_found(tmp_path: Path) -> None:
    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    said = tmp_path / "said"
    own = f"{sys.executable} -m dlrm_autoshard bench network --quick --costs {tmp_path} > {said}.$RANK"
    with slow_link(mbit_per_s=50) as link:
        link.run(["sh", "-c", own], (0, 0, 1, 1), timeout=120)
    lines = Path(f"{said}.0").read_text().splitlines()
    assert lines[0] == "4 ranks on 2 hosts"
    slow = [line for line in lines if "<- slow" in line]
    assert len(slow) == 1 and slow[0].startswith("host 1 (") and " to host 0 (" in slow[0]
    assert 4 <= float(slow[0].split(": ")[1].split(" MB/s")[0]) <= 8, "50 Mbit/s are 6.25 MB/s"
    assert not Path(f"{said}.1").read_text()
