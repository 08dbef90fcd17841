"""Starts a job's ranks by torchrun's API, and prints each final message once.

status = launch(["-m", "dlrm_autoshard.commands.rank", "--config", "mine.yaml"], ranks=2)    # the launcher's side
complain("tables.embedding_dim is 6")                                                        # a rank's side
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import hashlib
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, TypeVar

from typing_extensions import ParamSpec

from dlrm_autoshard.errors import UserError, readable
from dlrm_autoshard.formats.whole_file import write_whole

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_CHECKPOINT_SECONDS = 300  # for ranks to write their last checkpoint after a signal, before they are killed
_SILENT_SECONDS = 20  # without an answer from the head, after which a launcher without ranks gives up

P = ParamSpec("P")
T = TypeVar("T")


def launch(
    arguments: Sequence[str],
    ranks: int,
    *,
    nodes: int = 1,
    head: str | None = None,
    job: str = "",
    restarts: int = 0,
    after_a_kill: str = "--resume continues from its last checkpoint.",
) -> int:
    """Runs `python ARGUMENTS` as `ranks` processes on this machine, and waits for them; returns the exit status.

    nodes, head, job: number of machines, `host:port` on one of them, and a name unique to this job; for several
    machines. restarts: of the ranks after one died. after_a_kill: what to try after a kill.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # torch prints C++ stacks when the head ends first
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    if nodes > 1:  # torch 2.13 otherwise sends a machine that joins late to a store that is gone
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    def hang_up(number: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # it may come several times, while ranks write a checkpoint
        raise SignalException("the terminal is gone", signal.SIGHUP)

    before = signal.getsignal(signal.SIGHUP)
    if before != signal.SIG_IGN:  # nohup ignores it
        signal.signal(signal.SIGHUP, hang_up)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # more threads make fbgemm's CPU backward erratic
    config = LaunchConfig(
        min_nodes=nodes,
        max_nodes=nodes,
        nproc_per_node=ranks,
        run_id=job or uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint=head or "localhost:0",
        local_addr="127.0.0.1" if nodes == 1 else _own_name(),
        max_restarts=restarts,
        shutdown_timeout=_CHECKPOINT_SECONDS,
        signals_to_handle="SIGTERM,SIGINT,SIGQUIT",
    )
    logging.disable(logging.ERROR)  # replaces the launcher's own messages by the sentences below
    try:
        with _while_head_answers(head, arguments) if nodes > 1 and head else contextlib.nullcontext():
            elastic_launch(config, sys.executable)("-u", *arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        return _exit_status(rank, failure, after_a_kill)
    except RendezvousError as error:
        what = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"the machines did not find each other ({what}): this one waited for {nodes}, at --head {head}. Start the "
            "same command, with the same --nodes, --head and --job, on each, and name a host and port that all reach."
        ) from error
    except SignalException as stopped:
        return 128 + int(stopped.sigval)  # the ranks have printed where they stopped
    finally:
        logging.disable(logging.NOTSET)
        if signal.getsignal(signal.SIGHUP) is hang_up:
            signal.signal(signal.SIGHUP, before)
        _end_children()
    return 0


@contextlib.contextmanager
def _while_head_answers(head: str, arguments: Sequence[str]) -> Iterator[None]:
    """Ends this process if its ranks have ended and the machine with the job's store does not answer. torch's agent
    would wait for it, seven minutes if the network is cut, and restart nothing."""
    import psutil

    over, (host, _, port) = threading.Event(), head.rpartition(":")

    def watch() -> None:
        had_ranks, silent_since = False, None
        while not over.wait(1.0):
            ranks = 0
            for child in psutil.Process().children():
                with contextlib.suppress(psutil.Error):
                    ranks += child.cmdline()[-len(arguments) :] == list(arguments)
            had_ranks |= ranks > 0
            if ranks or not had_ranks or _answers(host, int(port)):
                silent_since = None
            elif silent_since is None:
                silent_since = time.monotonic()
            elif time.monotonic() - silent_since > _SILENT_SECONDS:
                print(
                    f"this machine's ranks have ended, and {head}, which keeps the job's store, has not answered for "
                    f"{_SILENT_SECONDS} s: it is gone, or the network is cut. Start the same command again on each "
                    "machine once they reach each other.",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    try:
        yield
    finally:
        over.set()


def _answers(host: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def _own_name() -> str:
    """Returns the name by which other machines reach this one; UserError if it resolves to no address."""
    name = socket.getfqdn()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        raise UserError(
            f"this machine's name, '{name}', resolves to no address ({error.strerror or error}), but other machines "
            "reach it by that name: add it to /etc/hosts or DNS, or rename the machine."
        ) from error
    return name


def _exit_status(rank: int, failure: ProcessFailure, after_a_kill: str) -> int:
    """Returns the exit status of the first failed rank; prints a sentence if the rank could not."""
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        hint = ": out of memory, perhaps" if name == "SIGKILL" else ""
        print(f"rank {rank} was ended by {name}{hint}. {after_a_kill}".rstrip(), file=sys.stderr)
        return 128 - failure.exitcode
    if not Path(failure.error_file).exists():
        print(f"rank {rank} ended with status {failure.exitcode}; its own words are above.", file=sys.stderr)
    return int(failure.exitcode)


def _end_children() -> None:
    """Kills child processes: after a second Ctrl-C nobody waits for a checkpoint."""
    import psutil

    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def complain(message: str) -> None:
    """Prints a message once per machine, with the rank, and passes it to torchrun's closing summary."""
    message = readable(message)
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        print(message, file=sys.stderr, flush=True)
        return
    # All error files of this machine, also of restarts, share this folder, in which its ranks agree on who prints.
    said = Path(error_file).parents[2] / f"said_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    try:
        said.open("x").close()
        first = True
    except OSError as error:  # on a full disk each rank prints
        first = not isinstance(error, FileExistsError)
    if first:
        print(f"[rank {os.environ.get('RANK')}] {message}", file=sys.stderr, flush=True)
    _leave_to_launcher(message, message)


def _leave_to_launcher(message: str, trace: str) -> None:
    """Writes the error file that torchrun reads, atomically: torchrun gives up on one that it cannot read, whatever
    restarts were asked for."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is not None:
        extra = {"py_callstack": trace, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            write_whole(Path(error_file), json.dumps({"message": {"message": message, "extraInfo": extra}}))


def recorded(function: Callable[P, T]) -> Callable[P, T]:
    """Wraps a function so that its uncaught exceptions' text reaches the launcher."""

    @functools.wraps(function)
    def call(*given: P.args, **named: P.kwargs) -> T:
        with contextlib.suppress(OSError, RuntimeError, ValueError):  # there may be no standard error
            faulthandler.enable()  # shows where a library crashed
        try:
            return function(*given, **named)
        except Exception as error:
            _leave_to_launcher(f"{type(error).__name__}: {error}", traceback.format_exc())
            raise

    return call


def leave(number: int, frame: FrameType | None) -> None:
    """Signal handler for the time before there is anything to save. Raises no exception, which inside an import would
    come out as that package's own error."""
    complain("stopped.")
    os._exit(128 + number)
