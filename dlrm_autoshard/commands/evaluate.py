"""`dlrm-autoshard evaluate RUN` and `predict RUN`: metrics and predictions of a trained model.

dlrm-autoshard evaluate runs/mine --ranks 4                        # metrics on the test split; tables on four ranks
dlrm-autoshard predict runs/mine --split val --out val.npy         # one probability per sample, in the data's order
dlrm-autoshard predict runs/mine 'data.test=[new.parquet]' --out new.npy       # for other data
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.arguments import check_out, positive
from dlrm_autoshard.distributed.ranks.launch import launch, leave


def add_parser(subparsers: Any) -> None:
    evaluate = subparsers.add_parser("evaluate", help="metrics of a trained model on a split of its data")
    add_model(evaluate)
    add_split(evaluate)
    evaluate.add_argument("--json", action="store_true", help="print JSON")
    evaluate.set_defaults(run=run)
    predict = subparsers.add_parser("predict", help="write a trained model's probabilities to .npy; needs no labels")
    add_model(predict)
    add_split(predict)
    predict.add_argument("--out", type=Path, required=True, metavar="FILE", help="float32, one per sample and label")
    predict.add_argument(
        "--logits", action="store_true", help="write logits; large ones all become probability 1 in float32"
    )
    predict.set_defaults(run=run_predict)


def add_model(parser: argparse.ArgumentParser) -> None:
    """Adds RUN and the arguments that choose one of its checkpoints."""
    parser.add_argument("model", type=Path, metavar="RUN", help="a run's directory")
    parser.add_argument(
        "--checkpoint", type=Path, metavar="DIR", help="one of its checkpoints, or best (default: the newest)"
    )
    parser.add_argument("--trust", action="store_true", help="run the Python files in RUN that its config names")


def add_split(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments that choose device, data and ranks."""
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], help="device that the tables' weights fit on (default: the run's)"
    )
    parser.add_argument("--split", choices=["test", "val", "train"], default="test", help="default: test")
    parser.add_argument("--ranks", type=positive, default=1, metavar="N", help="processes that share the tables")
    parser.add_argument("overrides", nargs="*", default=[], metavar="data.key=value", help="other data than the run's")


def on_ranks(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Runs the command on --ranks new ranks, or on torchrun's ranks under torchrun."""

    @wraps(command)
    def started(arguments: argparse.Namespace) -> int:
        from dlrm_autoshard.training.run_directory import check_run

        check_run(arguments.model)
        if "RANK" in os.environ:
            signal.signal(signal.SIGINT, leave)
        elif arguments.ranks > 1:
            return launch(["-m", "dlrm_autoshard", *arguments.words], arguments.ranks, after_a_kill="")
        return command(arguments)

    return started


@on_ranks
def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.training.checkpoints.saved_model import saved_model
    from dlrm_autoshard.training.display import describe
    from dlrm_autoshard.training.evaluation import metrics_of

    model, device = (arguments.model, arguments.checkpoint, arguments.overrides), arguments.device
    with saved_model(*model, splits=[arguments.split], device=device, trust=arguments.trust) as saved:
        found = saved.logits(arguments.split, quiet=arguments.json)
        names, step = saved.data.label_names, saved.step
    if found is None:
        return 0
    metrics = metrics_of(*found, names)
    if arguments.json:
        print(json.dumps({"step": step, "split": arguments.split, **metrics}, indent=1))
    else:
        print(f"step {step}  {arguments.split}  {describe(metrics)}")
    return 0


@on_ranks
def run_predict(arguments: argparse.Namespace) -> int:
    """Writes one probability per sample and label."""
    import numpy as np

    from dlrm_autoshard.training.checkpoints.saved_model import saved_model

    check_out(arguments.out)
    model, device = (arguments.model, arguments.checkpoint, arguments.overrides), arguments.device
    splits, trust = [arguments.split], arguments.trust
    with saved_model(*model, labelled=False, splits=splits, device=device, trust=trust) as saved:
        found, labels = saved.logits(arguments.split), saved.data.label_names
    if found is None:
        return 0
    logits, _ = found
    with arguments.out.open("wb") as file:
        np.save(file, (logits if arguments.logits else logits.sigmoid()).numpy())
    of_labels = f" of {', '.join(labels)}" if len(labels) > 1 else ""  # in the order of the file's columns
    print(f"{len(logits):,} predictions{of_labels}: {arguments.out}")
    return 0
