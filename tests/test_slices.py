"""Benchmarks in slices: what was measured is not measured again, and what is missing is left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from dlrm_autoshard.benchmarks import slices
from dlrm_autoshard.benchmarks.harness import STATE, finish
from dlrm_autoshard.benchmarks.readme import maker_of_cpu
from dlrm_autoshard.benchmarks.slices import Key, in_slices, origins, other_work
from dlrm_autoshard.records.jsonl import read_jsonl


def test_it_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    asked: list[Key] = []

    def measure(name: str, number: int) -> dict[str, float]:
        asked.append((name, number))
        if len(asked) == 3:
            raise KeyboardInterrupt
        return {"ms": 1.5 * number}

    wanted: list[Key] = [(name, number) for number in (1, 2) for name in ("a", "b")]
    kept = tmp_path / "runs" / "rows.jsonl"
    assert len(in_slices(kept, wanted, measure)) == 2
    rows = in_slices(kept, wanted, measure)
    assert asked == [*wanted[:3], *wanted[2:]], "what was interrupted once more, and the rest"
    assert {tuple(row["of"]): row["ms"] for row in rows} == {key: 1.5 * int(key[1]) for key in wanted}
    assert in_slices(kept, wanted[:1], measure)[0]["of"] == ["a", 1] and len(asked) == 5, "others are left out"


A_LONG_RUN = """
import time
from contextlib import nullcontext
from pathlib import Path

from dlrm_autoshard.benchmarks.slices import in_slices


def measure(number):
    time.sleep(600 if number >= 2 else 0.1)
    return {"ms": number}


if __name__ == "__main__":
    print(len(in_slices(Path("rows.jsonl"), [(number,) for number in range(200)], measure)), "rows")
"""


def test_it_ends_at_ctrl_c_and_what_was_measured_is_kept(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text(A_LONG_RUN)
    command, pipe = [sys.executable, "run.py"], subprocess.PIPE
    hear = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # also where these tests run in the background
    with subprocess.Popen(
        command, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True, start_new_session=True, preexec_fn=hear
    ) as process:
        deadline = time.monotonic() + 60
        while len(read_jsonl(tmp_path / "rows.jsonl")) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        try:
            said, complained = process.communicate(timeout=30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert "Stopped" in said and said.endswith("2 rows\n") and process.returncode == 0
    assert complained == ""
    assert [row["of"] for row in read_jsonl(tmp_path / "rows.jsonl")] == [[0], [1]]


def test_rows_of_another_state_of_the_code_are_measured_again(tmp_path: Path) -> None:
    kept = tmp_path / "rows.jsonl"
    kept.write_text(json.dumps({"schema": 1, "state": STATE - 1, "of": ["a"], "ms": 7}) + "\n")
    assert [row["ms"] for row in in_slices(kept, [("a",)], lambda _: {"ms": 8})] == [8]


def test_the_record_has_the_load_and_cpus_of_all_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[Key] = [("a",), ("b",)]
    for number, (cpu, load) in enumerate([("AMD EPYC", 9.0), ("Intel Xeon", 0.1), ("none", 99.0)]):
        monkeypatch.setattr(slices, "cpu_model", lambda cpu=cpu: cpu)
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, 0.0, 0.0))
        monkeypatch.setattr(slices, "other_work", lambda: nullcontext({}))  # as in rows of before it was measured
        rows = in_slices(tmp_path / "rows.jsonl", wanted[: number + 1], lambda _: {"ms": 8})
    record = finish("own-loop", False, {"figures": {}, **origins(rows)}, 1.0, load_before=0.0, cores=2)
    assert record["environment"]["cpu"] == "AMD EPYC, Intel Xeon", "not of the last start, which measured nothing"
    assert record["environment"]["load_before"] == 9.0
    assert record["reservations"] == ["other work ran beside it: a load of 9.0 on 2 cores"]
    assert maker_of_cpu(record) == "AMD, Intel"


@pytest.mark.alone
def test_work_of_others_beside_a_row_is_measured_and_ones_own_is_not_taken_for_it() -> None:
    """Work of all that one has started counts as one's own, as that of a benchmark's ranks."""
    for_a_second = [sys.executable, "-c", "import time; end = time.time() + 1.5\nwhile time.time() < end: pass"]
    with other_work() as beside_own:
        subprocess.run(for_a_second, check=True)
    with subprocess.Popen(for_a_second) as child:
        with other_work() as beside_child:
            time.sleep(1.5)
        child.wait()
    subprocess.run(["bash", "-c", '"$@" &', "bash", *for_a_second], check=True)  # its parent is gone: it is others'
    with other_work() as beside_others:
        time.sleep(1.5)
    assert beside_others["load_beside"] > max(beside_own["load_beside"], beside_child["load_beside"]) + 0.3
    rows = [{"load_before": 9.0, **beside_own}, {"load_before": 0.0, **beside_others}]
    assert origins(rows)["load_before"] == max(beside_own["load_beside"], beside_others["load_beside"])


def test_nothing_is_kept_where_nobody_says_where() -> None:
    for ms in (8, 9):
        assert [row["ms"] for row in in_slices(None, [("a",)], lambda _, ms=ms: {"ms": ms})] == [ms]
