"""Runs a function on N local processes in a process group, under a hard time limit; for tests and benchmarks.

    run_ranks(total, 3, 10)          # def total(rank, world_size, offset): ... -> one result per rank

Training uses torchrun instead.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# Processes are forked from a server that has imported torch, so a rank starts in hundredths of a second. A rank that
# raises, dies or hangs ends all of them, and the error names it. Functions are pickled, so they must be at module
# level.

PRELOAD = ["torch", "torch.distributed", "dlrm_autoshard.distributed.ranks.spawn"]
_GRACE_SECONDS = 5.0  # between a rank's result and its exit
_MOMENT_SECONDS = 0.3  # to find a dead rank after another one raised because of it
_START_SECONDS = 60.0  # to import torch on a busy machine; the caller's limit counts from then


class RankError(RuntimeError):
    """A rank raised, died or hung. rank: the first that did; a dead one if one died and others raised."""

    def __init__(self, rank: int, message: str) -> None:
        super().__init__(f"rank {rank} {message}")
        self.rank = rank


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    cores: list[int] | None = None,
) -> list[Any]:
    """Calls `function(rank, world_size, *args)` on every rank; returns the results by rank.

    cores[rank], if given: the core to bind the rank to.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder, _one_thread_per_rank():
        ends: list[Connection] = []
        processes = []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            core = cores[rank % len(cores)] if cores else None
            process = context.Process(
                target=_rank_main,
                args=(sender, folder, rank, world_size, timeout, core, function, args),
                name=f"rank {rank}",
                daemon=False,
            )
            process.start()
            sender.close()
            ends.append(receiver)
            processes.append(process)
        try:
            return _collect(ends, processes, Path(folder), timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
            for process, end in zip(processes, ends, strict=True):
                process.join()
                end.close()


def _collect(ends: list[Connection], processes: list[Any], folder: Path, timeout: float) -> list[Any]:
    """Waits for every rank's result; raises for the first that ended badly."""
    for rank, end in enumerate(ends):
        if not end.poll(_START_SECONDS):
            raise RankError(rank, f"did not start within {_START_SECONDS:g} s")
        with contextlib.suppress(EOFError):  # it died; found again and named below
            end.recv_bytes()
    deadline = time.monotonic() + timeout
    waiting = dict(enumerate(ends))
    results: list[Any] = [None] * len(ends)
    while waiting:
        ready = wait(list(waiting.values()), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            hung = sorted(waiting)
            stacks = "".join(_stack(folder, rank) for rank in hung)
            others = f" (so did ranks {hung[1:]})" if len(hung) > 1 else ""
            raise RankError(hung[0], f"gave no result within {timeout:g} s and was killed{others}{stacks}")
        came = {rank: _end_of(waiting.pop(rank)) for rank in [rank for rank, end in waiting.items() if end in ready]}
        if any(how == "raised" for how, _ in came.values()):
            # Perhaps because another rank died, which may show a moment later.
            time.sleep(_MOMENT_SECONDS)
            late = wait(list(waiting.values()), timeout=0)
            came |= {rank: _end_of(end) for rank, end in waiting.items() if end in late}
        bad = _bad_end(came, processes)
        if bad is not None:
            raise bad
        for rank, (_, value) in came.items():
            results[rank] = value
    for process in processes:
        process.join(_GRACE_SECONDS)
    return results


def _end_of(end: Connection) -> tuple[str, Any]:
    """Returns how a rank ended: ("returned", value), ("raised", traceback) or ("died", None)."""
    try:
        succeeded, value = pickle.loads(end.recv_bytes())
    except EOFError:
        return "died", None
    return "returned" if succeeded else "raised", value


def _bad_end(came: Mapping[int, tuple[str, Any]], processes: Sequence[Any]) -> RankError | None:
    """Returns the first bad end, of a dead rank before one that raised; None if all returned."""
    raised = [(rank, f"raised:\n{text}") for rank, (how, text) in came.items() if how == "raised"]
    died = [rank for rank, (how, _) in came.items() if how == "died"]
    if died:
        processes[died[0]].join(_GRACE_SECONDS)
        others = "".join(f"; rank {rank} {said}" for rank, said in raised[:1])
        return RankError(died[0], f"died without a result: exit code {processes[died[0]].exitcode}{others}")
    return RankError(*raised[0]) if raised else None


def _rank_main(
    sender: Connection,
    folder: str,
    rank: int,
    world_size: int,
    timeout: float,
    core: int | None,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    if core is not None:
        os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    sender.send_bytes(b"started")
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_WORLD_SIZE=str(world_size)
    )
    if Path("/sys/class/net/lo").exists():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are local, and the host's name need not resolve
    with open(Path(folder, f"stack_{rank}"), "w") as stack:
        # Writes the stack just before the parent gives up.
        faulthandler.dump_traceback_later(max(0.5, timeout - 0.5), file=stack)
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=max(timeout, 5.0)),
            )
            result = function(rank, world_size, *args)
            gc.collect()  # a DDP module that outlives its group aborts the process
            dist.barrier()
            # As bytes, because `send` would pass tensors as handles into the memory of a process that is about to end.
            sender.send_bytes(pickle.dumps((True, result)))
        except BaseException:
            sender.send_bytes(pickle.dumps((False, traceback.format_exc())))
        faulthandler.cancel_dump_traceback_later()
    sender.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _stack(folder: Path, rank: int) -> str:
    text = (folder / f"stack_{rank}").read_text() if (folder / f"stack_{rank}").exists() else ""
    return f"\n-- rank {rank} --\n{text}" if text else ""


@contextlib.contextmanager
def _one_thread_per_rank() -> Any:
    """Sets OMP_NUM_THREADS around the start of the server, which imports torch and thus reads it once."""
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
