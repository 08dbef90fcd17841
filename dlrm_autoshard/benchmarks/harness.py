"""Runs benchmarks by name: their list, pinned ranks, targets and verdicts, and the record that is printed.

A benchmark is a module `dlrm_autoshard.benchmarks.<name with underscores>` in NAMES, with TITLE, ROUGH_TIME ("2 min")
and `run(quick)`, which returns its `Findings` as a dictionary.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import importlib.util
import inspect
import operator
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeGuard

from dlrm_autoshard.benchmarks.paired import Ratio
from dlrm_autoshard.errors import UserError
from dlrm_autoshard.formats import versions

SCHEMA = 2
STATE = 1
"""Raised when benchmarks measure something else, or in another way: records of older states no longer count."""
UNKNOWN = "+"
"""Marks a commit that is unknown or has local changes."""
QUIET_LOAD = 0.5
"""Largest share of the cores that other work may take; above it no target counts as met."""
NAMES = (
    "planner-quality",
    "planner-oracle",
    "loop-drift",
    "loop-straggler",
    "loop-steady",
    "torchrec-loop",
    "train-wsmall",
    "train-wemb",
    "own-loop",
    "hosts",
    "replicas",
    "splits",
    "sequences",
    "race-simulated",
    "forecast",
    "gpu-all",
)
_PACKAGES = ("dlrm_autoshard", "torch", "fbgemm-gpu", "fbgemm-gpu-cpu", "torchrec", "numpy")


Verdict: TypeAlias = Literal["met", "inconclusive", "missed"]


class BenchError(UserError):
    """A benchmark cannot run as asked; the message says why."""


@dataclass
class Findings:
    """Results of a benchmark. targets: '>= 1.0', by figure. spread: 95% intervals, by figure. notes: explanations."""

    figures: dict[str, Any] = field(default_factory=dict)
    targets: dict[str, str] = field(default_factory=dict)
    spread: dict[str, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, found: object, target: str | None = None, *, digits: int | None = None) -> None:
        """Adds a figure; a Ratio adds its interval. None was not measured, and misses its target."""
        if isinstance(found, Ratio):
            found = found if digits is None else found.map(lambda value: round(value, digits))
            self.spread[name] = [found.low, found.high]
            found = found.median
        self.figures[name] = found
        if target is not None:
            self.targets[name] = target


@dataclass(frozen=True)
class Listing:
    """A benchmark in the list that `bench` prints."""

    name: str
    title: str
    rough_time: str


def available() -> list[Listing]:
    """Lists the benchmarks. Titles are read from the source, so that listing imports neither torch nor peers."""
    listings = []
    for name in NAMES:
        spec = importlib.util.find_spec(_module(name))
        if spec is None or spec.origin is None:
            continue
        texts = {}
        for node in ast.parse(Path(spec.origin).read_text()).body:
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                value = node.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    texts[node.targets[0].id] = value.value
        listings.append(Listing(name, texts.get("TITLE", ""), texts.get("ROUGH_TIME", "")))
    return listings


def rough_seconds(name: str) -> float | None:
    """Returns about how many seconds a benchmark takes; None for an unknown one."""
    for listing in available():
        if listing.name == name and listing.rough_time:
            number, unit, *_ = listing.rough_time.replace(";", "").split()
            return float(number) * {"s": 1, "min": 60, "h": 3600}[unit]
    return None


def run_benchmark(name: str, quick: bool, without: Sequence[str] = ()) -> dict[str, Any]:
    """Runs a benchmark and returns its record. without: rules to leave out, where the benchmark takes any."""
    names = [listing.name for listing in available()]
    if name not in names:
        raise BenchError(f"there is no benchmark '{name}'. There are: {', '.join(names) or 'none yet'}.")
    load, cores, started = os.getloadavg()[0], len(os.sched_getaffinity(0)), time.perf_counter()
    run = importlib.import_module(_module(name)).run
    if without and "without" not in inspect.signature(run).parameters:
        raise BenchError(f"benchmark '{name}' takes no --without.")
    outcome = run(quick, without=without) if without else run(quick)
    return finish(name, quick, outcome, time.perf_counter() - started, load, cores)


def finish(
    name: str,
    quick: bool,
    outcome: dict[str, Any],
    seconds: float,
    load_before: float = 0.0,
    cores: int | None = None,
) -> dict[str, Any]:
    """Returns the record. load_before, cores: load average and cores when the benchmark began.

    outcome: Findings as a dictionary; if measured in several starts, also "measured_at" (commits), "cpus" and
    "load_before" (the highest).
    """
    figures, targets, spread = outcome["figures"], outcome.get("targets", {}), outcome.get("spread", {})
    cores, load_before = cores or len(os.sched_getaffinity(0)), outcome.get("load_before", load_before)
    here = environment() | {"cores": cores, "load_before": round(load_before, 2)}
    reservations = ["a quick run: fewer rounds, smaller sizes"] if quick else []
    if load_before > QUIET_LOAD * cores:
        reservations.append(f"other work ran beside it: a load of {load_before:.1f} on {cores} cores")
    verdicts = {figure: verdict(figures.get(figure), target, spread.get(figure)) for figure, target in targets.items()}
    if reservations:
        verdicts = {figure: "inconclusive" if given == "met" else given for figure, given in verdicts.items()}
    return {
        "schema": SCHEMA,
        "state": STATE,
        "name": name,
        "quick": quick,
        "figures": figures,
        "targets": targets,
        "verdicts": verdicts,
        "verdict": max(verdicts.values(), key=VERDICTS.index, default="met"),
        "reservations": reservations,
        "spread": spread,
        "notes": outcome.get("notes", []),
        "measured_at": outcome.get("measured_at") or [commit() or UNKNOWN],
        "seconds": round(seconds, 1),
        "environment": here | {"cpu": ", ".join(outcome.get("cpus") or [here["cpu"]])},
    }


VERDICTS: tuple[Verdict, ...] = ("met", "inconclusive", "missed")
"""Ordered from good to bad; a benchmark's verdict is the worst of its targets'."""


def verdict(figure: object, target: str, interval: Sequence[float] | None = None) -> Verdict:
    """Returns "met" where the whole 95% interval passes, "missed" where none of it does, else "inconclusive".

    A figure without an interval is exact, or a count. A missing figure and one that is not a number are missed."""
    if not _is_number(figure):
        return "missed"
    ends = [figure] if interval is None else list(interval)
    if not ends or not all(map(_is_number, ends)):
        return "missed"
    passed = [passes(end, target) for end in (min(ends), max(ends))]
    if all(passed):
        return "met"
    inside = target.startswith("==") and min(ends) < float(target.split()[1]) < max(ends)
    return "inconclusive" if any(passed) or inside else "missed"


def _is_number(figure: object) -> TypeGuard[float]:
    return isinstance(figure, (int, float)) and not isinstance(figure, bool) and figure == figure


def passes(figure: float, target: str) -> bool:
    """Returns whether a figure meets a target such as '<= x', '>= x' or '== x'."""
    relation, _, bound = target.partition(" ")
    if relation not in _RELATIONS:
        raise BenchError(f"target '{target}' is not of the form '<= x', '>= x' or '== x'.")
    return bool(_RELATIONS[relation](figure, float(bound)))


_RELATIONS = {"<=": operator.le, ">=": operator.ge, "==": operator.eq}


# Ranks --------------------------------------------------------------------------------------------------------------


def on_pinned_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 600.0) -> list[Any]:
    """Runs ranks with one thread each, pinned to cores in turn; returns what the function returned on each rank."""
    from dlrm_autoshard.distributed.ranks.spawn import run_ranks

    return run_ranks(function, world_size, *args, timeout=timeout, cores=sorted(os.sched_getaffinity(0)))


# Environment --------------------------------------------------------------------------------------------------------


def environment() -> dict[str, Any]:
    """Describes the machine, the packages and the commit for a record."""
    import psutil

    record: dict[str, Any] = {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "packages": {name: version for name in _PACKAGES if (version := versions.installed_version(name)) is not None},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        record["gpus"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        record["cuda"] = torch.version.cuda
    return record


def cpu_model() -> str:
    """Returns the processor's name, 'AMD EPYC 9355'."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def commit() -> str | None:
    """Returns the checkout's commit, short, with '+' if it has changes; None outside a checkout."""
    found = versions.commit()
    return found and found[:7] + ("+" if found.endswith("-dirty") else "")


def _module(name: str) -> str:
    return f"dlrm_autoshard.benchmarks.{name.replace('-', '_')}"
