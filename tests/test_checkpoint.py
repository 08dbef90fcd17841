"""A checkpoint is whole or not there: whatever kills the job, and whenever."""

from __future__ import annotations

import errno
import io
import os
import pickle
import random
import resource
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlrm_autoshard.errors import UserError
from dlrm_autoshard.training.checkpoints.checkpoint import Checkpoints
from dlrm_autoshard.training.checkpoints.folder import CheckpointFolder, run_and_checkpoint
from dlrm_autoshard.training.checkpoints.manifest import CheckpointError, DamagedCheckpoint, SavedState, read_manifest
from tests.ranks import RankError, run_ranks
from tests.trainers import make_runtime

ROWS = 1 << 17  # 8 MiB a table, so that a kill finds the writing under way


def state_of(step: int, rank: int) -> dict[str, torch.Tensor]:
    """This rank's table and the dense part, each filled with a number that says step and owner."""
    return {
        f"tables.t{rank}.weight": torch.full((ROWS, 16), float(100 * step + rank)),
        "dense.w": torch.full((5,), float(step)),
    }


SHAPES = {"tables.t0.weight": (ROWS, 16), "tables.t1.weight": (ROWS, 16), "dense.w": (5,)}


def save_for_ever(rank: int, world_size: int, folder: Path, first: int, asynchronous: bool) -> None:
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size), keep=1, asynchronous=asynchronous)
    if checkpoints.latest() is None:
        checkpoints.save(state_of(0, rank), SavedState(step=0))
        checkpoints.finish()
    started = folder.parent / f"started_{rank}"
    started.with_suffix(".new").write_text(str(os.getpid()))
    started.with_suffix(".new").rename(started)
    dist.barrier()
    for step in range(first, first + 1000):
        checkpoints.save(state_of(step, rank), SavedState(step=step))


def check(rank: int, world_size: int, folder: Path) -> int:
    """Loads the newest on other ranks than those that wrote it; every element is that step's."""
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size))
    newest = checkpoints.latest()
    assert newest is not None
    wanted = state_of(-1, 1 - rank)
    state, _ = checkpoints.load(newest, wanted, SHAPES)
    step = state.step
    for name, value in state_of(step, 1 - rank).items():
        assert torch.equal(wanted[name], value), name
    return step


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_in_the_middle_of_a_save_leaves_the_last_one_whole(asynchronous: bool, tmp_path: Path) -> None:
    """Of all ranks, at once."""
    folder, reached = tmp_path / "checkpoints", -1
    folder.mkdir()
    for attempt in range(2):
        with ThreadPoolExecutor() as pool:
            saving = pool.submit(run_ranks, save_for_ever, 2, folder, 1000 * attempt + 1, asynchronous)
            deadline = time.monotonic() + 60
            while not ((tmp_path / "started_0").exists() and any(folder.glob("*.tmp/*.bin"))):
                assert time.monotonic() < deadline and not saving.done()
                time.sleep(0.001)
            time.sleep(0.02 + 0.15 * attempt)
            for started in tmp_path.glob("started_*"):
                os.kill(int(started.read_text()), signal.SIGKILL)
                started.unlink()
            with pytest.raises(RankError, match="exit code -9"):
                saving.result(30)
        steps = run_ranks(check, 2, folder, timeout=60)
        assert steps[0] == steps[1] >= reached
        reached = steps[0]


def keep_and_damage(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    runtime = make_runtime(rank, world_size)
    checkpoints = Checkpoints(folder, runtime, keep=2)
    if rank == 0:
        (folder / "step_00000001.tmp").mkdir(parents=True)  # left by a kill
    runtime.barrier()
    tensors: dict[str, Any] = {"w": torch.arange(6.0) + rank, f"own{rank}": torch.zeros(4)}
    for step in (5, 10, 15):
        path = checkpoints.save(tensors, SavedState(step=step), extra={"x": step})
    kept = sorted(found.name for found in folder.iterdir())
    shapes = {"w": (6,), **{f"own{r}": (4,) for r in range(world_size)}}
    before = tensors["w"].clone()
    messages = []
    for wrong in ({**shapes, "new": (3,)}, {**shapes, "w": (7,)}, {"w": (6,)}):
        with pytest.raises(CheckpointError) as caught:
            checkpoints.load(path, tensors, wrong)
        messages.append(str(caught.value))
        assert torch.equal(tensors["w"], before)
    assert checkpoints.latest(before=15) == folder / "step_00000010"
    dist.barrier()
    if rank == 0:
        file = path / "rank_00001.bin"
        file.write_bytes(file.read_bytes()[:-200])
    dist.barrier()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.load(path, tensors, shapes)
    return kept, [*messages, str(caught.value)]


def test_the_newest_are_kept_and_what_differs_or_is_torn_is_named(tmp_path: Path) -> None:
    (kept, messages), *_ = run_ranks(keep_and_damage, 2, tmp_path)
    assert kept == ["step_00000010", "step_00000015"]
    more, shape, foreign, torn = messages
    assert "new is not in it" in more and "Nothing was loaded" in more
    assert "w is [6], the model has [7]" in shape
    assert "own0 is not in the model; own1 is not in the model" in foreign
    assert "step_00000015/rank_00001.bin' has" in torn and "Traceback" not in torn


SMALL = {"w": (6,), "own0": (40, 4), "own1": (40, 4), "half": (3, 8), "count": ()}


def small(rank: int, fill: float) -> dict[str, torch.Tensor]:
    """What a rank owns, of several types and shapes, and what all have."""
    replicated = {
        "w": torch.arange(6.0) + fill,
        "half": torch.full((3, 8), fill, dtype=torch.bfloat16),
        "count": torch.tensor(int(fill)),
    }
    return {f"own{rank}": torch.full((40, 4), fill + rank), **replicated}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def flip_bits(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str], int]:
    """One bit of one file at a time. Returns what was obeyed and should not have been, files named, flips without
    effect."""
    runtime = make_runtime(rank, world_size)
    checkpoints = Checkpoints(folder, runtime)
    path = checkpoints.save(small(rank, 7.0), SavedState(step=3, sample=8), extra={"stats": [1.5, None], "text": "é"})
    draw = random.Random(1)
    obeyed, named, without_effect = [], set(), 0
    for number in range(200):
        file = sorted(path.iterdir())[number % 4]
        whole = file.read_bytes()
        bit = draw.randrange(8 * len(whole))
        runtime.barrier()
        if rank == 0:
            damaged = bytearray(whole)
            damaged[bit // 8] ^= 1 << bit % 8
            file.write_bytes(damaged)
        runtime.barrier()
        found = small(rank, -1.0)
        try:
            state, extra = checkpoints.load(path, found, SMALL)
        except CheckpointError as error:
            named |= {name for name in (file.name,) if name in str(error)}
            if file.name not in str(error):
                obeyed.append(f"bit {bit} of {file.name} is not named: {error}")
        else:
            without_effect += 1
            same = state == SavedState(step=3, sample=8) and extra == {"stats": [1.5, None], "text": "é"}
            if not same or not equal(found, small(rank, 7.0)):
                obeyed.append(f"bit {bit} of {file.name}")
        runtime.barrier()
        if rank == 0:
            file.write_bytes(whole)
    return obeyed, sorted(named), without_effect


def test_every_flipped_bit_is_refused_and_named_or_has_no_effect(tmp_path: Path) -> None:
    for obeyed, named, without_effect in run_ranks(flip_bits, 2, tmp_path):
        assert not obeyed
        assert named == ["extra.json", "manifest.json", "rank_00000.bin", "rank_00001.bin"]
        assert without_effect < 10  # a space in the JSON, say


class Payload:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return Path.touch, (self.mark,)


def load_malicious(rank: int, world_size: int, folder: Path) -> list[str]:
    checkpoints = Checkpoints(folder / "checkpoints", make_runtime(rank, world_size))
    path = checkpoints.save(small(0, 7.0) | small(1, 7.0), SavedState(step=3))
    messages = []
    for file in sorted(path.iterdir()):
        whole = file.read_bytes()
        for attack in (pickle.dumps(Payload(folder / "ran")), saved_by_torch(Payload(folder / "ran"))):
            file.write_bytes(attack)
            with pytest.raises(DamagedCheckpoint) as caught:
                checkpoints.load(path, small(0, 1.0), SMALL)
            messages.append(str(caught.value))
        file.write_bytes(whole)
    for name in (".metadata", "extra.pt"):
        (path / name).write_bytes(pickle.dumps(Payload(folder / "ran")))  # what the earlier format executed
    checkpoints.load(path, small(0, 1.0), SMALL)
    return messages


def saved_by_torch(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def test_loading_executes_nothing(tmp_path: Path) -> None:
    [messages] = run_ranks(load_malicious, 1, tmp_path)
    assert len(messages) == 6 and all("checkpoint file" in message for message in messages)
    assert not (tmp_path / "ran").exists()


def save_a_large_table(rank: int, world_size: int, folder: Path) -> tuple[int, int]:
    """Peak memory of the process before and after saving, in bytes."""
    table = torch.ones(64 << 20)
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size))
    checkpoints.save({"w": torch.ones(1)}, SavedState(step=0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    checkpoints.save({"table": table}, SavedState(step=1))
    return 1024 * before, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_saving_needs_at_most_a_chunk_beside_the_tables(tmp_path: Path) -> None:
    [(before, after)] = run_ranks(save_a_large_table, 1, tmp_path)
    assert before > 256 << 20 and after - before <= 64 << 20


def run_out_of_disk(rank: int, world_size: int, folder: Path) -> tuple[list[str], list[str]]:
    """Rank 1 may write files of 1 MB at most: what a full disk says, says this."""
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size))
    checkpoints.save(small(rank, 1.0), SavedState(step=1))
    if rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with pytest.raises(CheckpointError) as caught:
        checkpoints.save(state_of(2, rank), SavedState(step=2))
    left = sorted(path.name for path in folder.iterdir())
    found = small(rank, 0.0)
    checkpoints.load(folder / "step_00000001", found, SMALL)
    assert equal(found, small(rank, 1.0))
    checkpoints.save(small(rank, 3.0), SavedState(step=3))  # there is space again for a small one
    return left, [str(caught.value)]


def test_a_full_disk_is_a_sentence_and_leaves_the_last_good_one(tmp_path: Path) -> None:
    for left, [message] in run_ranks(run_out_of_disk, 2, tmp_path):
        assert left == ["step_00000001"]
        assert "step_00000002' cannot be written: File too large (rank 1 on '" in message
        assert "newest complete one: " in message and "checkpoint.on_error: warn" in message


def move_checkpoints_elsewhere(rank: int, world_size: int, folder: Path) -> list[str]:
    (folder / "elsewhere").mkdir()
    (folder / "checkpoints").symlink_to(folder / "elsewhere")
    checkpoints = Checkpoints(folder / "checkpoints", make_runtime(rank, world_size), keep=1)
    for step in range(4):
        path = checkpoints.save(small(rank, step), SavedState(step=step))
        if step < 3:
            path.rename(folder / path.name)  # somebody needed the space
            path.symlink_to(folder / path.name)
    return sorted(found.name for found in (folder / "elsewhere").iterdir())


def test_links_to_checkpoints_and_to_their_folder_are_no_obstacle(tmp_path: Path) -> None:
    [left] = run_ranks(move_checkpoints_elsewhere, 1, tmp_path)
    assert left == ["step_00000003"]
    assert (tmp_path / "step_00000001" / "manifest.json").exists()  # not ours to delete


def save_in_the_background(rank: int, world_size: int, folder: Path) -> bool:
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size), asynchronous=True)
    tensors = small(rank, 5.0)
    path = checkpoints.save(tensors, SavedState(step=5))
    tensors["w"].zero_()  # training goes on
    deadline = time.monotonic() + 30
    while not path.exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    found = small(rank, 0.0)
    checkpoints.finish()
    checkpoints.load(path, found, SMALL)
    return equal(found, small(rank, 5.0))


def test_an_asynchronous_checkpoint_is_published_when_it_is_written(tmp_path: Path) -> None:
    assert run_ranks(save_in_the_background, 2, tmp_path) == [True, True]


def fail_in_the_background(rank: int, world_size: int, folder: Path) -> str:
    checkpoints = Checkpoints(folder, make_runtime(rank, world_size), asynchronous=True)
    checkpoints.save({"sparse": torch.eye(3).to_sparse()}, SavedState(step=5))  # which has no bytes to write
    with pytest.raises(RuntimeError) as caught:
        checkpoints.finish()
    return str(caught.value)


def test_an_asynchronous_checkpoint_that_fails_for_any_reason_says_so(tmp_path: Path) -> None:
    assert "parse" in run_ranks(fail_in_the_background, 1, tmp_path)[0]


def test_the_newest_is_that_of_the_highest_step_however_long_its_name(tmp_path: Path) -> None:
    for step in (99_999_998, 99_999_999, 100_000_000):
        (tmp_path / f"step_{step:08d}").mkdir()
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.newest() == tmp_path / "step_100000000"
    folder.remove_old()
    assert [path.name for path in tmp_path.iterdir()] == ["step_100000000"]


@pytest.mark.parametrize("name", ["step_²", "step_" + "9" * 200, "step_٣", "step_7", "step_0000000٣", "step_-0000007"])
def test_what_has_nearly_a_checkpoints_name_is_none(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    folder = CheckpointFolder(tmp_path)
    assert folder.newest() is None and folder.choose(None, fall_back=True) == (None, [])
    assert folder.set_aside_after(0) == []
    folder.remove_old()
    assert (tmp_path / name).is_dir()
    for asked in (tmp_path / name, tmp_path / ("step_" + "9" * 5000)):
        with pytest.raises(CheckpointError):
            folder.choose(asked, fall_back=True)


@pytest.mark.parametrize("place", ["/etc", "..", "nowhere", "step_²", "step_00000005/../step_00000005", "."])
def test_a_best_that_leads_elsewhere_is_none(place: str, tmp_path: Path) -> None:
    folder = CheckpointFolder(tmp_path / "checkpoints")
    (folder.folder / "step_00000005").mkdir(parents=True)
    (folder.folder / "best").symlink_to(place)
    assert folder.best() is None
    for ask in (lambda: folder.asked_for(Path("best")), lambda: run_and_checkpoint(str(folder.folder / "best"))):
        with pytest.raises(UserError, match=r"best' is a link to '.*', which is no checkpoint beside it"):
            ask()
    folder.point_best_at(5)
    assert folder.best() == folder.folder / "step_00000005"


def test_a_copied_run_may_have_a_folder_in_the_place_of_the_link_to_its_best(tmp_path: Path) -> None:
    for name in ("step_00000005", "step_00000010", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "best" / "manifest.json").touch()
    folder = CheckpointFolder(tmp_path)
    assert folder.best() is None
    folder.point_best_at(10)
    assert folder.best() == tmp_path / "step_00000010"


def prune_what_is_being_read(rank: int, world_size: int, folder: Path) -> list[list[str]]:
    """A network file system keeps the files of a folder that somebody reads, and so the folder."""
    checkpoints, rmtree = Checkpoints(folder, make_runtime(rank, world_size), keep=1), shutil.rmtree
    left: list[list[str]] = []

    def busy(path: Path, ignore_errors: bool = False, **others: Any) -> None:
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(path))

    for step in range(3):
        shutil.rmtree = busy if step == 1 else rmtree  # type: ignore[assignment]
        checkpoints.save(small(rank, step), SavedState(step=step))
        left.append(sorted(path.name for path in folder.iterdir()))
    return left


def test_an_old_checkpoint_that_is_being_read_keeps_no_new_one_from_being_written(tmp_path: Path) -> None:
    [left] = run_ranks(prune_what_is_being_read, 1, tmp_path)
    assert left == [["step_00000000"], ["step_00000000.old", "step_00000001"], ["step_00000002"]]


def test_an_earlier_format_is_told_from_damage(tmp_path: Path) -> None:
    old = tmp_path / "step_00000004"
    old.mkdir()
    (old / "state.json").write_text('{"schema": 1, "step": 4}')
    with pytest.raises(CheckpointError, match="earlier format"):
        read_manifest(old)
