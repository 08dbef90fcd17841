"""Trains a DLRM as a YAML file says.

    torchrun --nproc_per_node=2 launch/train.py --config configs/movielens.yaml [section.key=value ...]
    torchrun --nproc_per_node=2 launch/train.py --config configs/movielens.yaml --resume
    python launch/train.py --config configs/debug_cpu.yaml             # one process, no torchrun

What people can mend (config, data, plan, packages) ends in a sentence and exit status 2, all else in a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from dlrm_autoshard.errors import UserError, in_a_sentence

if TYPE_CHECKING:
    from dlrm_autoshard.config import Config


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], usage=__doc__)
    parser.add_argument("--config", type=Path, required=True, metavar="FILE", help="the YAML file")
    parser.add_argument(
        "--resume", nargs="?", const="", metavar="DIR", help="from the run's (or DIR's) last checkpoint"
    )
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the file's")
    arguments = parser.parse_intermixed_args(argv)
    if arguments.resume and "=" in arguments.resume and not Path(arguments.resume).exists():
        # `--resume train.epochs=3`: the override is no directory.
        arguments.overrides.insert(0, arguments.resume)
        arguments.resume = ""
    return arguments


def complain(message: str) -> None:
    """Says it once a machine, with the rank that says it, and leaves it to torchrun's closing summary too."""
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if error_file is None:
        print(message, file=sys.stderr, flush=True)
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    Path(error_file).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))
    # All error files of this machine, restarts included, share this folder: there its ranks agree who speaks.
    said = Path(error_file).parents[2] / f"said_{hashlib.sha256(message.encode()).hexdigest()[:16]}"
    with contextlib.suppress(FileExistsError):
        said.open("x").close()
        print(f"[rank {os.environ['RANK']}] {message}", file=sys.stderr, flush=True)


def leave(number: int, frame: FrameType | None) -> None:
    """Ctrl-C before there is anything to save (stop.py takes over then). No exception: thrown into an import that is
    half done, it comes out as an error of that package's own."""
    complain("stopped.")
    os._exit(128 + number)


def main() -> int:
    signal.signal(signal.SIGINT, leave)
    from dlrm_autoshard.commands.environment_checks import require_pair
    from dlrm_autoshard.config import load_config

    arguments = parse()
    try:
        require_pair()
        config = load_config(arguments.config, arguments.overrides)
    except UserError as error:
        complain(str(error))
        return 2
    # Only now what takes seconds to import. `record`: an uncaught exception's text reaches torchrun's summary.
    from torch.distributed.elastic.multiprocessing.errors import record

    return record(run)(config, arguments.resume) or 0


def run(config: Config, resume: str | None) -> int:
    from dlrm_autoshard.train.stop_signals import Stopped
    from dlrm_autoshard.train.trainer import train

    try:
        train(config, resume=resume)
    except Stopped as stopped:
        complain(str(stopped))
        return 128 + stopped.number
    except RuntimeError as error:
        if not any(words in str(error).lower() for words in ("connection closed", "connection reset by peer")):
            raise
        # torchrun has seen why and ends this rank meanwhile; if not, the other rank is on another machine.
        time.sleep(3)
        complain("a rank on another machine went away in the middle of an exchange; what it says there is the cause.")
        return 3
    except Exception as error:
        text = in_a_sentence(error)
        if text is None:
            raise
        complain(text)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
