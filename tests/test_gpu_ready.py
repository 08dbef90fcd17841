"""What can be said of the GPU's path without a GPU: the choice of backend, and when gpu-all is met."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.benchmarks.gpu_all import LIMITS, TARGETS, judged, run_section
from dlrm_autoshard.benchmarks.gpu_kernels import compared
from dlrm_autoshard.benchmarks.gpu_peer import covered_share
from dlrm_autoshard.benchmarks.gpu_sections import SECTIONS
from dlrm_autoshard.benchmarks.harness import finish
from dlrm_autoshard.benchmarks.planner_quality_record import LEARNED
from dlrm_autoshard.config import TablesConfig
from dlrm_autoshard.distributed.device import SideStreams
from dlrm_autoshard.distributed.ranks.runtime import RuntimeFailure, choose_backend
from dlrm_autoshard.distributed.tables.storage import Storage
from dlrm_autoshard.distributed.tables.tbe import RowCache
from dlrm_autoshard.tables import Shard, TableConfig


@pytest.mark.parametrize(
    "devices,backend",
    [
        (["GPU a", "GPU b"], "nccl"),  # also where each rank sees one GPU only, as SLURM's --gpus-per-task=1 has it
        (["GPU a", "GPU a"], "gloo"),  # two ranks share one
        (["GPU a", "GPU a", "GPU b"], "gloo"),  # on one host of two: no rank may choose otherwise
        (["cpu", "cpu"], "gloo"),
        (["cpu"], "gloo"),
        (["GPU a"], "nccl"),
    ],
)
def test_the_whole_job_takes_nccl_where_every_rank_has_a_gpu_of_its_own(devices: list[str], backend: str) -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(len(devices)) as ranks:
        chosen = ranks.map(lambda rank: choose_backend(devices[rank], rank, len(devices), store), range(len(devices)))
        assert list(chosen) == [backend] * len(devices)


def test_a_rank_without_a_gpu_among_others_is_named_on_all() -> None:
    """They would exchange other things, in another order."""
    store, devices = dist.HashStore(), ["GPU a", "cpu", "GPU b"]
    with ThreadPoolExecutor(len(devices)) as ranks:
        for chosen in [ranks.submit(choose_backend, device, rank, 3, store) for rank, device in enumerate(devices)]:
            with pytest.raises(RuntimeFailure, match="rank 1 sees no GPU, but rank 0 has one"):
                chosen.result()


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


class _Stream:
    """One that notes which others it waits for."""

    def __init__(self, device: object = None) -> None:
        self.waited_for: list[object] = []

    def wait_stream(self, other: object) -> None:
        self.waited_for.append(other)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[_Stream]:
    """Without a GPU: streams that have been made, after the one that computes."""
    known = [_Stream()]

    def stream(device: torch.device) -> _Stream:
        known.append(_Stream())
        return known[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "stream", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: known[0])
    return known


def test_what_is_copied_is_kept_for_both_streams_that_read_it(streams: list[_Stream]) -> None:
    host = _OfHost()
    SideStreams(torch.device("cuda")).copy(host)  # type: ignore[arg-type]
    computes, _copies, travels = streams
    assert host.kept_for == [travels, computes]


def test_what_is_on_the_device_already_is_read_when_it_has_been_computed(streams: list[_Stream]) -> None:
    on_device = _OfHost()
    on_device.device = torch.device("cuda")
    assert SideStreams(torch.device("cuda")).copy(on_device) is on_device  # type: ignore[arg-type,comparison-overlap]
    computes, _copies, travels = streams
    assert travels.waited_for == [computes]


class _CachingTbe:
    """As much of fbgemm's lookup as its cache of rows has to do with: a queue of what was prefetched, and locks."""

    def __init__(self) -> None:
        self.lxu_cache_locations_list: list[torch.Tensor] = []
        self.timesteps_prefetched: list[int] = []
        self.lxu_cache_locking_counter = torch.zeros(10, dtype=torch.int32)

    def prefetch(self, values_N: torch.Tensor, offsets: torch.Tensor, forward_stream: object = None) -> None:
        self.lxu_cache_locations_list.append(values_N.clone())
        self.timesteps_prefetched.append(1)
        self.lxu_cache_locking_counter[values_N] += 1

    def look_up(self, values_N: torch.Tensor) -> torch.Tensor:
        """Whose rows it takes: of the first in the queue, whatever is asked for."""
        if not self.timesteps_prefetched:
            self.prefetch(values_N, values_N)
        self.timesteps_prefetched.pop()
        return self.lxu_cache_locations_list.pop()

    def backward(self, values_N: torch.Tensor) -> None:
        self.lxu_cache_locking_counter[values_N] -= 1


@pytest.mark.parametrize("between", ["nothing", "an evaluation", "a batch that is left out"])
def test_rows_that_were_prefetched_are_those_of_the_ids_looked_up(
    streams: list[_Stream], between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fbgemm gives the oldest of its queue to whoever asks, and locks rows until a backward pass unlocks them."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    tbe = _CachingTbe()
    cache, ids, offsets = RowCache(tbe, torch.device("cuda")), torch.arange(6).view(3, 2), torch.zeros(1)

    def look_up(values_N: torch.Tensor, *, training: bool) -> torch.Tensor:
        with cache.lookup(values_N, training=training):
            return tbe.look_up(values_N)

    first, second, other = ids
    assert look_up(first, training=True).equal(first)
    cache.prefetch(second, offsets)
    if between == "a batch that is left out":
        cache.take_back()  # no backward pass of it
    else:
        tbe.backward(first)
    if between == "an evaluation":
        assert look_up(other, training=False).equal(other)
        assert not tbe.lxu_cache_locking_counter.any()
    assert look_up(second, training=True).equal(second)
    assert tbe.lxu_cache_locking_counter.nonzero().flatten().equal(second)
    tbe.backward(second)
    assert not tbe.lxu_cache_locking_counter.any()
    computes, beside = streams
    assert beside.waited_for == [computes]
    assert set(computes.waited_for) == {beside}


def test_rows_that_were_loaded_over_are_not_taken_from_the_cache(streams: list[_Stream]) -> None:
    """A checkpoint is read into host memory: an evaluation of it would have had the last step's hot rows."""
    tbe, forgotten = _CachingTbe(), list[bool]()
    tbe.reset_cache_states = lambda: forgotten.append(True)  # type: ignore[attr-defined]
    tables = [TableConfig("a", 100, 8), TableConfig("b", 50, 8)]
    storage = Storage(tables, TablesConfig(), torch.device("cpu"))
    storage.hold([Shard("a"), Shard("b")])
    storage.lookups[0].cache = RowCache(tbe, torch.device("cuda"))
    tbe.prefetch(torch.arange(3), torch.zeros(1))
    storage.overwritten()
    assert forgotten and not tbe.timesteps_prefetched and not tbe.lxu_cache_locking_counter.any()


def test_weighted_ids_ask_a_gpu_for_no_gradients_of_their_weights() -> None:
    """Its kernel checks bounds of the first table's allocation, of which the others' rows are outside."""
    asked: list[dict[str, torch.Tensor]] = []

    def lookup(*ids: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
        asked.append(more)
        return torch.zeros(1)

    storage = Storage([TableConfig("a", 100, 8)], TablesConfig(), torch.device("cpu"))
    storage.hold([Shard("a")])
    fused = storage.lookups[0]
    fused.tbe, fused.no_weight_gradients = lookup, torch.zeros(1, dtype=torch.int32)
    ids = torch.arange(2), torch.tensor([0, 2])
    storage.look_up(*ids)
    storage.look_up(*ids, torch.ones(2))
    assert asked == [{}, {"feature_requires_grad": fused.no_weight_gradients}]


def test_a_move_of_others_leaves_a_ranks_lookup_as_it_is() -> None:
    storage = Storage([TableConfig(name, 100, 8) for name in "abc"], TablesConfig(), torch.device("cpu"))
    storage.hold([Shard("a"), Shard("b")])
    lookups = storage.lookups
    storage.hold([Shard("a"), Shard("b")])
    assert storage.lookups is lookups
    storage.hold([Shard("a"), Shard("c")])
    assert storage.lookups is not lookups


def test_gpu_all_is_not_met_where_a_section_failed_or_found_nothing() -> None:
    found = {name: 5000.0 if target.startswith(">") else 0.0 for name, target in TARGETS.items()}

    def met(figures: dict[str, float], failed: int) -> bool:
        return bool(finish("gpu-all", False, judged(figures, failed, []), 1.0)["verdict"] == "met")

    assert met(found, 0)
    assert not met(found, 1)
    assert not any(met({k: v for k, v in found.items() if k != name}, 0) for name in found)


def test_plans_on_a_gpu_are_compared_with_the_heuristic_that_is_best_of_all_tasks() -> None:
    tasks = np.linspace(1.0, 2.0, 8)
    times = {"random": 1.3, "dim_greedy": 1.1, "size_greedy": 1.2} | dict.fromkeys(LEARNED, 1.0)
    figures, spread = compared(20, {name: (factor * tasks).tolist() for name, factor in times.items()})
    assert figures["20_tables_tasks"] == 8
    assert figures["20_tables_auto_v_best_heuristic"] == pytest.approx(1.1)
    assert figures["20_tables_auto_speedup_over_random"] == pytest.approx(1.3)
    assert spread["20_tables_auto_v_best_heuristic"] == pytest.approx([1.1, 1.1])


def test_how_much_of_the_copying_other_work_hides() -> None:
    copies, kernels = [(0.0, 4.0), (10.0, 14.0)], [(1.0, 2.0), (1.5, 3.0), (9.0, 11.0), (20.0, 30.0)]
    assert covered_share(copies, kernels) == 3 / 8
    assert covered_share(copies, []) == 0
    assert covered_share(copies, [(-1.0, 15.0)]) == 1


def test_every_section_of_gpu_all_exists() -> None:
    assert LIMITS.keys() == SECTIONS.keys()
    assert {name.partition(".")[0] for name in TARGETS} <= LIMITS.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_a_section_that_fails_says_why(tmp_path: Path) -> None:
    _, failure = run_section("shards", tmp_path, 30)
    assert failure and "Traceback" in (tmp_path / "shards.log").read_text()


def test_a_section_that_takes_too_long_ends_with_what_it_started_and_what_it_found_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = "from dlrm_autoshard.benchmarks import gpu_sections as s; import subprocess, sys, time\n"
    section += "def slow(folder, seconds, found):\n"
    section += "    found['loss'] = 0.5\n"
    section += "    found['child'] = subprocess.Popen(['sleep', '600']).pid\n"
    section += "    time.sleep(600)\n"
    section += "s.SECTIONS['slow'] = slow\ns.main()\n"
    (tmp_path / "sections.py").write_text(section)
    popen = subprocess.Popen

    def started(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        return popen([sys.executable, str(tmp_path / "sections.py"), *command[3:]], **options)

    monkeypatch.setattr("dlrm_autoshard.benchmarks.gpu_all.subprocess.Popen", started)
    monkeypatch.setattr("dlrm_autoshard.benchmarks.gpu_all.GRACE", 15)
    found, failure = run_section("slow", tmp_path, 5)
    assert failure == "took more than 20 s" and found["loss"] == 0.5
    assert not psutil.pid_exists(found["child"]) or psutil.Process(found["child"]).status() == psutil.STATUS_ZOMBIE


def test_runs_without_a_gpu_say_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("needs a machine without a GPU")
    command = [sys.executable, "-m", "dlrm_autoshard.commands.main", "bench", "gpu-all"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode and "needs a GPU" in done.stderr + done.stdout
    assert "Traceback" not in done.stderr
