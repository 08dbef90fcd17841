"""Writes a made-up click log in the format of Criteo's text files, to measure preprocessing.

write_sample_text(Path("train.txt"), rows=100_000)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlrm_autoshard.data.hashing import GOLDEN, mix64
from dlrm_autoshard.data.sources.criteo.sample import integers, sample_source
from dlrm_autoshard.data.sources.criteo.text import NUM_CATEGORIES

_MISSING_SHARE = 0.12
_ROWS_AT_A_TIME = 1 << 14


def write_sample_text(path: Path, rows: int, seed: int = 0, separator: str = "\t") -> None:
    """Writes lines as in Criteo's train.txt; about an eighth of the fields is missing."""
    source = sample_source(seed)
    with path.open("w") as file:
        for first in range(0, rows, _ROWS_AT_A_TIME):
            batch = source.read("train", 0, first, min(rows, first + _ROWS_AT_A_TIME))
            ids_BT = batch.values_N.numpy().reshape(NUM_CATEGORIES, -1).T
            steps_T = np.arange(NUM_CATEGORIES, dtype=np.uint64) * GOLDEN
            categories_BT = mix64(ids_BT.astype(np.uint64) + steps_T) >> np.uint64(32)
            missing = (mix64(categories_BT + steps_T) & np.uint64(0xFF)) < int(256 * _MISSING_SHARE)
            for label, counts, categories, gone in zip(
                batch.labels_B.tolist(),
                integers(batch).tolist(),
                categories_BT.tolist(),
                missing.tolist(),
                strict=True,
            ):
                fields = [f"{label:.0f}"]
                fields += ["" if skip else str(x) for x, skip in zip(counts, gone, strict=False)]
                fields += ["" if skip else f"{x:08x}" for x, skip in zip(categories, gone, strict=True)]
                file.write(separator.join(fields) + "\n")
