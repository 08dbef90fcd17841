"""Two namespaces and a slow link, where this machine can make them: real sockets, four real ranks."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import pytest

from dlrm_autoshard.benchmarks import slow_link as links
from dlrm_autoshard.benchmarks.harness import BenchError
from dlrm_autoshard.benchmarks.slow_link import Link, cannot_make_link, slow_link


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
    with pytest.raises(BenchError, match=r"rank 0 .*no such thing"):
        link.run(["sh", "-c", "echo no such thing >&2; exit 3"], hosts=(0, 1), timeout=10)


def test_where_it_cannot_be_made_the_reason_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links.shutil, "which", lambda tool: None)
    assert cannot_make_link() == "`ip` is missing: install iproute2."


@pytest.mark.slow
def test_the_loop_learns_that_the_link_is_dear_and_leaves_the_far_rank_alone() -> None:
    from dlrm_autoshard.benchmarks import loop_netem

    why_not = cannot_make_link()
    if why_not is not None:
        pytest.skip(why_not)
    figures = loop_netem.run(quick=True)["figures"]
    assert figures["tables_behind_the_link_at_last"] < figures["tables_behind_the_link_at_first"]
    assert figures["gain_over_static"] > 0.1
