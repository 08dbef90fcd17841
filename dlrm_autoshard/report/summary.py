"""A run in a few sentences: what the terminal and the HTML report both open with.

for sentence in summary(record): print(sentence)
loop_in_one_line(record)                 # "The loop moved tables 2 times (82 MiB) and kept them 3 times: ..."
"""

from __future__ import annotations

from collections import Counter

from dlrm_autoshard.costs import imbalance
from dlrm_autoshard.plan import gib
from dlrm_autoshard.records.diagnosis import STARVED_BELOW
from dlrm_autoshard.records.epoch import EpochProfile
from dlrm_autoshard.records.run import RunRecord


def summary(record: RunRecord) -> list[str]:
    sentences = []
    if record.epochs:
        sentences += [where_it_ran(record), step_time(record.last), *who_is_slow(record.last), *who_was_slow(record)]
        sentences += all_starved(record.last)
        if record.last.prediction_error is not None:
            sentences.append(prediction(record.last))
        if record.last.samples and abs(record.last.accounted - 1) > 0.03:
            sentences.append(
                f"Stages and waits add up to {record.last.accounted:.0%} of the step: read the stages with care."
            )
    else:
        sentences.append("Profiling was off (profile.enabled: false), so there are metrics but no costs.")
    if record.decisions:
        sentences.append(loop_in_one_line(record))
    quality = model_quality(record)
    if quality:
        sentences.append(quality)
    if record.stopped_early:
        sentences.append(record.stopped_early)
    if record.environment:
        sentences.append(made_with(record))
    return sentences


def where_it_ran(record: RunRecord) -> str:
    last = record.last
    hosts, devices = len(set(last.hosts)), " and ".join(sorted(set(last.devices)))
    return (
        f"{_count(last.world_size, 'rank')} ({devices}) on {_count(hosts, 'host')}, "
        f"{_count(len(last.tables), 'table')}, {_count(len(record.epochs), 'epoch')} profiled, {last.end_step:,} steps."
    )


def step_time(profile: EpochProfile) -> str:
    """Gain is against the sampled step; below a tenth of a percent it is none."""
    took = f"In epoch {profile.epoch} a step took {profile.mean_step_ms:.3g} ms ({profile.throughput:,.0f} examples/s)."
    if profile.samples == 0:
        return f"{took} No step was sampled: lower profile.every_steps to see where the time goes."
    gain = 1 - profile.balanced_ms / profile.step_ms
    verdict = f"would take {profile.balanced_ms:.3g} ms ({gain:.1%} less)" if gain >= 0.001 else "would gain nothing"
    return (
        f"{took} Stage by stage, with nothing overlapped, it took {profile.step_ms:.3g} ms "
        f"({_count(profile.samples, 'sampled step')}); with perfect balance it {verdict}."
    )


def who_is_slow(profile: EpochProfile) -> list[str]:
    if profile.world_size == 1 or profile.samples == 0:
        return []
    if profile.straggler is None:
        return ["No rank holds the others up: their differences are below 3% of the step."]
    said = profile.straggler.sentence
    return [said[0].upper() + said[1:]]


def who_was_slow(record: RunRecord) -> list[str]:
    """The earlier epochs' stragglers, neighbouring epochs with the same one and the same cause drawn together."""
    runs: list[tuple[str, list[str]]] = []
    for profile in record.epochs[:-1]:
        straggler = profile.straggler
        who = f"rank {straggler.rank} ({straggler.cause})" if straggler else ""
        if runs and runs[-1][0] == who:
            runs[-1][1].append(record.label(profile))
        else:
            runs.append((who, [record.label(profile)]))
    said = [
        f"{who} in epoch {epochs[0]}" if len(epochs) == 1 else f"{who} in epochs {epochs[0]} to {epochs[-1]}"
        for who, epochs in runs
        if who
    ]
    shown = said if len(said) <= 5 else [*said[:4], f"{len(said) - 4} more times"]
    return [f"Earlier the others were held up by {_listed(shown)}."] if said else []


def all_starved(profile: EpochProfile) -> list[str]:
    shares = [share for share in profile.cpu_share if share is not None]
    if not shares or max(shares) >= STARVED_BELOW:
        return []
    return [
        f"Every rank had its core for at most {max(shares):.0%} of the time: more processes than cores, so all "
        "times here are longer than they need be, and noisy."
    ]


def prediction(profile: EpochProfile) -> str:
    error = profile.prediction_error or 0.0
    if abs(error) < 0.005:
        return "The cost model's prediction of this plan was right within half a percent."
    return (
        f"The cost model had expected this plan to cost {abs(error):.1%} {'more' if error > 0 else 'less'} than it did."
    )


def loop_in_one_line(record: RunRecord) -> str:
    """What the loop did, for the last line of a run."""
    actions = Counter(str(decision.get("action")) for decision in record.decisions)
    moved = sum(int(decision.get("bytes_moved") or 0) for decision in record.decisions)
    words = {
        "moved": "moved tables",
        "rolled_back": "took a move back",
        "refused": "refused a move",
        "kept": "kept the plan",
    }
    did = [f"{words[action]} {_times(actions[action])}" for action in words if actions[action]]
    done = f"The loop {_listed(did)}" if did else "The loop decided nothing"
    gains = [
        d["measured_gain"]
        for d in record.decisions
        if d.get("action") == "moved" and d.get("measured_gain") is not None
    ]
    size = f"; {gib(moved)} in all" if moved else ""
    gained = (
        f"; each move's measured change of the step: {', '.join(f'{-gain:+.1%}' for gain in gains)}"
        if 0 < len(gains) <= 4
        else ""
    )
    return f"{done}{size}{gained}."


def model_quality(record: RunRecord) -> str | None:
    found = record.final_metrics()
    if found is None:
        return None
    split, metrics = found
    parts = [f"{name} {metrics[name]:.4f}" for name in ("auc", "logloss", "ne") if metrics.get(name) is not None]
    data = {"test": "test", "val": "validation"}[split]
    return f"On {data} data: {', '.join(parts)}." if parts else None


def made_with(record: RunRecord) -> str:
    """'Started 2026-01-31 12:00 UTC on node0 (16 cores), with Python 3.11.7, torch 2.13.0 and fbgemm-gpu-cpu 1.8.0.'"""
    known = record.environment
    python = f"Python {known.get('python', '?')}"
    versions = [f"{name} {version}" for name, version in known.get("versions", {}).items()]
    started = str(known.get("started", "at a time unknown"))[:16].replace("T", " ")
    again = f"Continued {_times(record.starts - 1)}, last" if record.starts > 1 else "Started"
    return (
        f"{again} {started} UTC on {known.get('host', 'a machine unknown')} ({known.get('cores', '?')} cores), with "
        f"{_listed([python, *versions])}."
    )


def compute_imbalance(profile: EpochProfile) -> float:
    """max / mean of the ranks' embedding compute, forward and backward."""
    return imbalance(
        [f + b for f, b in zip(profile.stage_ms["fwd_compute"], profile.stage_ms["bwd_compute"], strict=True)]
    )


def total_wait_ms(profile: EpochProfile) -> list[float]:
    return [sum(waits[rank] for waits in profile.wait_ms.values()) for rank in range(profile.world_size)]


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
