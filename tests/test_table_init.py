"""Initial rows are the same bits wherever and in whatever pieces they are made."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_autoshard.distributed.tables.init import initialise


def reference(rows: int, columns: int, table: str, seed: int) -> np.ndarray:
    """The same hash in unsigned arithmetic, element by element of the whole table at once."""

    def lowbias32(x: np.ndarray) -> np.ndarray:
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
        return x ^ (x >> np.uint32(16))

    keys = np.frombuffer(hashlib.sha256(f"{seed}/{table}".encode()).digest()[:8], "<u4")
    of_row = lowbias32(np.arange(rows, dtype=np.uint32) ^ keys[0])
    of_column = (np.arange(columns, dtype=np.uint32) * np.uint32(0x9E3779B9)) ^ keys[1]
    uniform = (lowbias32(of_row[:, None] ^ of_column) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
    return (uniform - np.float32(0.5)) * np.float32(2.0 * rows**-0.5)


@settings(deadline=None)
@given(rows=st.integers(1, 40_000), columns=st.integers(1, 70), seed=st.integers(0, 2**40), name=st.text(max_size=9))
def test_values_are_the_references_bit_for_bit(rows: int, columns: int, seed: int, name: str) -> None:
    weight = torch.empty(rows, columns)
    initialise(weight, name, seed)
    assert np.array_equal(weight.numpy(), reference(rows, columns, name, seed))


@given(st.integers(0, 16), st.integers(1, 16))
def test_columns_of_a_shard_are_the_tables(first: int, count: int) -> None:
    whole, part = torch.empty(500, 32), torch.empty(500, count)
    initialise(whole, "t", 3)
    initialise(part, "t", 3, first_column=first)
    assert torch.equal(part, whole[:, first : first + count])


def test_values_are_uniform_and_unrelated() -> None:
    weight = torch.empty(100_000, 16)
    initialise(weight, "t", 0)
    scaled = weight.double() * 100_000**0.5
    assert scaled.abs().max() <= 1
    histogram = torch.histc(scaled, bins=64, min=-1, max=1)
    expected = scaled.numel() / 64
    assert ((histogram - expected) ** 2 / expected).sum() < 110  # chi-squared, 63 degrees of freedom: 1 in 5,000
    other = torch.empty_like(weight)
    initialise(other, "u", 0)
    pairs = [(scaled[:, 0], scaled[:, 1]), (scaled[:-1, 0], scaled[1:, 0]), (scaled[:, 0], other[:, 0])]
    for a, b in pairs:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015


def test_fp16_is_the_rounded_fp32() -> None:
    single, half = torch.empty(1000, 8), torch.empty(1000, 8, dtype=torch.float16)
    initialise(single, "t", 0)
    initialise(half, "t", 0)
    assert torch.equal(half, single.half())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_bits() -> None:
    here, there = torch.empty(300_000, 12), torch.empty(300_000, 12, device="cuda")
    initialise(here, "t", 0)
    initialise(there, "t", 0)
    assert torch.equal(here, there.cpu())
