"""What ends a rank: an exchange with others that failed, or something of its own."""

from __future__ import annotations

import pytest
import torch

from dlrm_autoshard.distributed.lookup.exchange import Pending
from dlrm_autoshard.distributed.ranks.signs_of_life import is_exchange_failure

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
