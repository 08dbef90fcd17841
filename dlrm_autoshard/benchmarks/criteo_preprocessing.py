"""Criteo text to npy: ours against a plain pandas script that makes the same files, on one core.

The text is made up in Criteo's format (see `data.criteo_sample`), so distinct categories and missing fields are near
the real log's, but not equal to them. Both sides read the same file in turn; their outputs are compared byte by byte.
Memory is the peak of a process of its own, on a file and on one that holds the same lines four times.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from dlrm_autoshard.benchmarks.criteo_text import write_sample_text
from dlrm_autoshard.benchmarks.harness import Findings
from dlrm_autoshard.benchmarks.paired import alternate, median_with_interval, paired_ratio
from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, Modulo, preprocess
from dlrm_autoshard.data.sources.criteo.text import NUM_CATEGORIES, NUM_INTEGERS

TITLE = "Criteo text to npy, rows/s on one core against a plain pandas script; memory on a longer file"
ROUGH_TIME = "2 min"

_ENCODINGS: dict[str, Contiguous | Modulo] = {"contiguous": Contiguous(3), "modulo": Modulo(100_000)}

_PEAK_MEMORY_SCRIPT = """
import sys
from pathlib import Path
from dlrm_autoshard.data.sources.criteo.preprocess import Contiguous, preprocess
preprocess([Path(sys.argv[1])], Path(sys.argv[2]), Contiguous(3))
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


def run(quick: bool) -> dict[str, Any]:
    rows, rounds = (40_000, 3) if quick else (250_000, 5)
    found = Findings()
    cores = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = folder / "train.txt"
        write_sample_text(text, rows)
        os.sched_setaffinity(0, {min(cores)})
        try:
            for mode, encoding in _ENCODINGS.items():
                ours, theirs = folder / f"ours_{mode}", folder / f"pandas_{mode}"

                def run_ours(out: Path = ours, encoding: Contiguous | Modulo = encoding) -> None:
                    shutil.rmtree(out, ignore_errors=True)
                    preprocess([text], out, encoding)

                def run_pandas(out: Path = theirs, encoding: Contiguous | Modulo = encoding) -> None:
                    shutil.rmtree(out, ignore_errors=True)
                    plain_pandas_script(text, out, encoding)

                our_seconds, their_seconds = alternate(run_ours, run_pandas, rounds=rounds)
                _assert_same_files(ours, theirs)
                found.put(f"speedup_{mode}", paired_ratio(their_seconds, our_seconds), ">= 3.0")
                for side, seconds in (("ours", our_seconds), ("pandas", their_seconds)):
                    speed = median_with_interval([rows / s for s in seconds])
                    found.put(f"rows_per_second_{mode}_{side}", speed, digits=0)
        finally:
            os.sched_setaffinity(0, cores)
        longer = folder / "longer.txt"
        with longer.open("wb") as file:
            for _ in range(4):
                file.write(text.read_bytes())
        once, four_times = (_peak_memory_mib(file, folder) for file in (text, longer))
    found.put("peak_memory_mib", once)
    found.put("peak_memory_mib_4x_lines", four_times)
    found.put("peak_memory_growth_mib", four_times - once, "<= 16")
    found.notes = [f"{rows} made-up lines in Criteo's format; both sides wrote the same bytes."]
    return vars(found)


def plain_pandas_script(text: Path, out: Path, encoding: Contiguous | Modulo) -> None:
    """Encodes as a plain script does: the whole file in a frame, then column by column."""
    import pandas as pd

    first_category = 1 + NUM_INTEGERS
    columns = range(first_category + NUM_CATEGORIES)
    types = {column: str for column in columns[first_category:]}
    frame = pd.read_csv(text, sep="\t", header=None, names=list(columns), dtype=types)
    dense = np.log(frame[list(columns[1:first_category])].fillna(0).clip(lower=-2).to_numpy(np.float32) + 3)
    sparse = np.empty((len(frame), NUM_CATEGORIES), np.int32)
    for place, column in enumerate(columns[first_category:]):
        if isinstance(encoding, Modulo):
            sparse[:, place] = frame[column].fillna("0").map(lambda word: int(word, 16)) % encoding.rows
        else:
            counts = frame[column].value_counts().sort_index().sort_values(ascending=False, kind="stable")
            kept = counts[counts >= encoding.min_frequency].index
            rows = {word: row for row, word in enumerate(kept, start=2)}
            sparse[:, place] = frame[column].map(rows).fillna(1).where(frame[column].notna(), 0)
    out.mkdir()
    np.save(out / "day_0_dense.npy", dense)
    np.save(out / "day_0_sparse.npy", sparse)
    np.save(out / "day_0_labels.npy", frame[[0]].to_numpy(np.int32))


def _assert_same_files(ours: Path, theirs: Path) -> None:
    for part in ("dense", "sparse", "labels"):
        mine, other = (np.load(folder / f"day_0_{part}.npy") for folder in (ours, theirs))
        if mine.dtype != other.dtype or not np.array_equal(mine, other):
            raise AssertionError(f"the two sides disagree in day_0_{part}.npy, so their times are not comparable")


def _peak_memory_mib(text: Path, folder: Path) -> float:
    out = folder / f"memory_{text.stem}"
    command = [sys.executable, "-c", _PEAK_MEMORY_SCRIPT, str(text), str(out)]
    # VmHWM and not getrusage's ru_maxrss, which a child inherits from the process that started it.
    return round(int(subprocess.run(command, check=True, capture_output=True, text=True).stdout) / 1024, 1)
