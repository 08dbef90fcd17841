"""What ends a rank: an exchange with others that failed, or something of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.ranks.heartbeats import busy_at, is_exchange_failure
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.plan import ShardingPlan
from dlrm_autoshard.training.run_log import Journal
from tests.report_records import write_run

GLOO_SAYS = "Application timeout caused pair closure"  # without a word of gloo


def fail() -> None:
    raise RuntimeError(GLOO_SAYS)


def test_an_exchange_that_fails_in_any_words_is_an_exchange_failure() -> None:
    with pytest.raises(RuntimeError) as failed:
        Pending(fail, torch.empty(0)).wait()
    assert is_exchange_failure(failed.value)


def test_the_same_words_from_a_ranks_own_code_are_not() -> None:
    with pytest.raises(RuntimeError) as failed:
        fail()
    assert not is_exchange_failure(failed.value)


def test_an_error_of_a_users_own_service_is_told_as_it_is() -> None:
    for raised in (ConnectionRefusedError("no answer"), RuntimeError("the socket of the feature store is closed")):
        with pytest.raises(type(raised)) as failed:
            raise raised
        assert not is_exchange_failure(failed.value)
    with pytest.raises(UserError) as told:
        try:
            Pending(fail, torch.empty(0)).wait()
        except RuntimeError as error:
            raise UserError("the feature store does not answer") from error
    assert not is_exchange_failure(told.value)


class Looking:
    """A callback of `callbacks:`, or an exchange's work, that looks where its thread is taken to be."""

    def __init__(self) -> None:
        self.seen: list[str | None] = []

    def look(self, *_: object) -> None:
        self.seen.append(busy_at(sys._getframe()))

    scalars = finish = look


def test_a_rank_that_writes_its_last_files_is_not_taken_to_wait_for_others(tmp_path: Path) -> None:
    """`finish` is a name of both: of what waits for an exchange, and of what writes to a disk that may hang."""
    writes, waits = Looking(), Looking()
    run = write_run(tmp_path / "run", epochs=1)
    Journal(run, [writes], active=True).finish(ShardingPlan({"cat_0": 0}, 1), {"training": 1.0})
    Pending(waits.look, torch.empty(0)).wait()
    assert writes.seen[0] is not None and "test_signs_of_life.py" in writes.seen[0]
    assert waits.seen == [None]
