"""Ranks that start again over the same store find each other, not what an earlier start left there."""

import os
from datetime import timedelta

import pytest
from torch.distributed import TCPStore

from dlrm_autoshard.distributed.ranks.rendezvous import RendezvousFailed, fresh_store
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
    with pytest.raises(RankError, match=r"rank 1 of 2 has not met the others at 127\.0\.0\.1:\d+"):
        run_ranks(one_stays_away, 2, agent.port, 0, timeout=30)


def test_a_rank_that_is_told_of_no_meeting_place_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RendezvousFailed, match=r"at MASTER_ADDR:.*MASTER_ADDR expected, but not set"):
        fresh_store(1, 2, timedelta(seconds=2))
