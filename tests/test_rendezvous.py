"""Ranks that start again over the same store find each other, not what an earlier start left there."""

import os
from datetime import timedelta

import pytest
from torch.distributed import HashStore, TCPStore

from dlrm_autoshard.config import RunConfig
from dlrm_autoshard.distributed.ranks import runtime
from dlrm_autoshard.distributed.ranks.launch import launch
from dlrm_autoshard.distributed.ranks.rendezvous import RendezvousFailed, fresh_store
from dlrm_autoshard.distributed.ranks.runtime import Runtime
from dlrm_autoshard.errors import UserError
from tests.ranks import RankError, run_ranks


def start_twice(rank: int, world_size: int, port: int) -> list[str]:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    names = []
    for start in range(2):
        store = fresh_store(rank, world_size, timedelta(seconds=20))
        assert not store.check([f"address/{rank}"]), "something of an earlier start is in the store"
        store.set(f"address/{rank}", f"{start}")
        names.append(",".join(store.get(f"address/{peer}").decode() for peer in range(world_size)))
    return names


def one_stays_away(rank: int, world_size: int, port: int, away: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
    if rank != away:
        fresh_store(rank, world_size, timedelta(seconds=2))


def test_each_start_finds_an_empty_store_and_only_its_own_ranks() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True)
    agent.set("dlrm_autoshard/hello/1", "0123456789abcdef")  # of a rank that is gone
    assert run_ranks(start_twice, 3, agent.port) == [["0,0,0", "1,1,1"]] * 3


def test_a_rank_that_stays_away_is_named() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True)
    with pytest.raises(RankError, match=r"rank\(s\) 2 of 3 did not arrive within 2 s"):
        run_ranks(one_stays_away, 3, agent.port, 2, timeout=30)
    with pytest.raises(RankError, match=r"rank 1 of 2 did not reach the others at 127\.0\.0\.1:\d+"):
        run_ranks(one_stays_away, 2, agent.port, 0, timeout=30)


@pytest.mark.parametrize(
    ("host", "port"),
    [("", "29500"), ("127.0.0.1", ""), ("127.0.0.1", "abc"), ("127.0.0.1", "0"), ("127.0.0.1", "99999")],
)
def test_a_rank_that_is_told_of_no_meeting_place_says_so(host: str, port: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(RendezvousFailed, match=f"MASTER_ADDR is '{host}' and MASTER_PORT '{port}'; launchers set them"):
        fresh_store(0, 2, timedelta(seconds=2))
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(RendezvousFailed, match="MASTER_PORT ''"):
        fresh_store(0, 2, timedelta(seconds=2))


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"RANK": "0", "WORLD_SIZE": "abc"},
            "the environment variable WORLD_SIZE is 'abc'; launchers set it to a whole",
        ),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK is '-1'; launchers set it to a whole number, 0 or more"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE is '0'; launchers set it to a whole number, 1 or more"),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1.5"}, "LOCAL_RANK is '1.5'"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK is 2 and WORLD_SIZE 2 .*; ranks count from 0"),
        ({"WORLD_SIZE": "4"}, "RANK is not set and WORLD_SIZE 4 "),
    ],
)
def test_what_launchers_cannot_have_set_is_a_sentence(
    environment: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=said), Runtime.start(RunConfig(device="cpu", pin_cores=False)):
        pass


def nameless_host(rank: int, world_size: int, port: int, ranks_here: int) -> str:
    os.environ.update(MASTER_ADDR="no-such-host.invalid", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(ranks_here))
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    fresh_store(rank, world_size, timedelta(seconds=20))
    return os.environ["MASTER_ADDR"]


def test_one_host_needs_no_name_and_of_several_the_one_that_resolves_nowhere_is_said() -> None:
    agent = TCPStore("127.0.0.1", 0, is_master=True)
    assert run_ranks(nameless_host, 2, agent.port, 2, timeout=60) == ["127.0.0.1"] * 2
    with pytest.raises(RankError, match=r"'no-such-host\.invalid' \(MASTER_ADDR\), a name that resolves to no address"):
        run_ranks(nameless_host, 2, agent.port, 1, timeout=60)


def test_machines_are_told_whose_own_name_resolves_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.getfqdn", lambda: "no-such-host.invalid")
    with pytest.raises(UserError, match=r"this machine's name, 'no-such-host\.invalid', resolves to no address"):
        launch(["-c", "pass"], 1, nodes=2, head="127.0.0.1:1", job="x")


def test_ranks_are_counted_by_host_where_the_launcher_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of three ranks two are on one host."""
    store = HashStore()
    for rank, host in enumerate(("a", "b", "a")):
        store.set(f"host/{rank}", host)
    found = []
    for rank, host in enumerate(("a", "b", "a")):
        monkeypatch.setattr(runtime, "host_id", lambda host=host: host)
        found.append(runtime.place_on_host(store, rank, 3))
    assert found == [(0, 2), (0, 1), (1, 2)]
