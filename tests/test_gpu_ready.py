"""What can be said of the GPU's path without a GPU: the choice of backend, and when gpu-all is met."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.gpu_all import LIMITS, TARGETS, judged, run_section
from dlrm_autoshard.benchmarks.gpu_sections import SECTIONS
from dlrm_autoshard.benchmarks.harness import finish
from dlrm_autoshard.distributed.runtime import choose_backend
from dlrm_autoshard.distributed.side_streams import SideStreams


@pytest.mark.parametrize(
    "devices,backend",
    [
        (["GPU a", "GPU b"], "nccl"),  # also where each rank sees one GPU only, as SLURM's --gpus-per-task=1 has it
        (["GPU a", "GPU a"], "gloo"),  # two ranks share one
        (["GPU a", "GPU a", "GPU b"], "gloo"),  # on one host of two: no rank may choose otherwise
        (["cpu", "cpu"], "gloo"),
        (["GPU a", "cpu"], "gloo"),
        (["cpu"], "gloo"),
        (["GPU a"], "nccl"),
    ],
)
def test_the_whole_job_takes_nccl_where_every_rank_has_a_gpu_of_its_own(devices: list[str], backend: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(devices)) as ranks:
        chosen = ranks.map(lambda rank: choose_backend(devices[rank], rank, len(devices), store), range(len(devices)))
        assert list(chosen) == [backend] * len(devices)


class _OfHost:
    """A host tensor whose copy notes which streams its memory is kept for."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.kept_for: list[object] = []

    def pin_memory(self) -> _OfHost:
        return self

    def to(self, device: torch.device, non_blocking: bool) -> _OfHost:
        assert non_blocking
        return self

    def record_stream(self, stream: object) -> None:
        self.kept_for.append(stream)


def test_what_is_copied_is_kept_for_both_streams_that_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU: streams are objects that only have names."""
    made: list[object] = []

    def stream(device: torch.device) -> object:
        made.append(object())
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "computes")
    streams = SideStreams(torch.device("cuda"))
    host = _OfHost()
    streams.copy(host)  # type: ignore[arg-type]
    _copies, travels = made
    assert host.kept_for == [travels, "computes"]


def test_gpu_all_is_not_met_where_a_section_failed_or_found_nothing() -> None:
    found = {name: 5000.0 if target.startswith(">") else 0.0 for name, target in TARGETS.items()}

    def met(figures: dict[str, float], failed: int) -> bool:
        return bool(finish("gpu-all", False, judged(figures, failed, []), 1.0)["verdict"] == "met")

    assert met(found, 0)
    assert not met(found, 1)
    assert not any(met({k: v for k, v in found.items() if k != name}, 0) for name in found)


def test_every_section_of_gpu_all_exists() -> None:
    assert LIMITS.keys() == SECTIONS.keys()
    assert {name.partition(".")[0] for name in TARGETS} <= LIMITS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_section_that_fails_says_why(tmp_path: Path) -> None:
    _, failure = run_section("roofline", tmp_path, 30)
    assert failure


def test_runs_without_a_gpu_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "bench", "gpu-all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "needs a GPU" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
