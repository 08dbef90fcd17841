"""Summarizes a run in sentences, the verdict first. The terminal report opens with it.

for sentence in summary(record): print(sentence)
"""

from __future__ import annotations

from dlrm_autoshard.costs import imbalance
from dlrm_autoshard.formats.words import count
from dlrm_autoshard.plan.replicated import said_of
from dlrm_autoshard.records.diagnosis import STARVED_BELOW
from dlrm_autoshard.records.interval import IntervalProfile
from dlrm_autoshard.records.run import RunRecord
from dlrm_autoshard.report.verdict import bottom_line, verdict


def summary(record: RunRecord) -> list[str]:
    """Returns a run's summary, the verdict first."""
    return [*filter(None, [bottom_line(record)]), *verdict(record), *details(record)]


def details(record: RunRecord) -> list[str]:
    """Returns the summary's sentences after the verdict."""
    sentences = []
    if record.intervals:
        sentences += [
            where_it_ran(record),
            *([f"{said_of(record.replicated)}."] if record.replicated else []),
            step_time(record, record.reported),
            *earlier_stragglers(record),
            *autoshard_overhead(record),
            *all_starved(record.reported),
        ]
        if record.reported.prediction_bias is not None:
            sentences.append(prediction(record.reported))
        if record.reported.samples and abs(record.reported.accounted - 1) > 0.03:
            sentences.append(
                f"Stages and waits add up to {record.reported.accounted:.0%} of the step, so stage times are inexact."
            )
    else:
        sentences.append("Profiling was off (profile.enabled: false), so there are metrics but no stage times.")
    quality = model_quality(record)
    if quality:
        sentences.append(quality)
    if record.stopped_early:
        sentences.append(record.stopped_early)
    if record.environment:
        sentences.append(made_with(record))
    return sentences


def where_it_ran(record: RunRecord) -> str:
    """Says how many ranks, hosts, tables and steps the run had."""
    last = record.last
    hosts, devices = len(set(last.hosts)), " and ".join(sorted(set(last.devices)))
    epochs = count(len({interval.epoch for interval in record.intervals}), record.unit)
    return (
        f"{count(last.world_size, 'rank')} ({devices}) on {count(hosts, 'host')}, "
        f"{count(len(last.tables), 'table')}, {epochs} profiled, {last.end_step:,} steps."
    )


def step_time(record: RunRecord, profile: IntervalProfile) -> str:
    """Says how long a step took in an interval."""
    when = f"In {record.span(profile)}"
    took = f"{when} a step took {profile.mean_step_ms:.3g} ms ({profile.throughput:,.0f} examples/s)."
    if profile.samples == 0:
        return f"{took} {why_unsampled(profile)}"
    return (
        f"{took} Sampled steps, which have barriers and overlap nothing, took {profile.step_ms:.3g} ms "
        f"({count(profile.samples, 'sampled step')})."
    )


def balanced_ms(record: RunRecord, profile: IntervalProfile) -> float:
    """Returns a sampled step's ms less what perfect balance would save."""
    balance = record.balance(profile)
    return profile.step_ms - (0.0 if balance is None else balance.gain * profile.mean_step_ms)


def why_unsampled(profile: IntervalProfile) -> str:
    """Says why an interval has no stages."""
    steps = profile.end_step - profile.first_step
    return (
        f"None of these {steps:,} steps was sampled, so there are no stage times. Lower profile.warmup_steps (steps "
        "skipped at the start of an epoch) or profile.every_steps."
    )


def earlier_stragglers(record: RunRecord) -> list[str]:
    """Names the stragglers of intervals before the reported one; consecutive ones with the same cause are merged."""
    runs: list[tuple[str, list[IntervalProfile]]] = []
    for profile in record.intervals[: record.intervals.index(record.reported)]:
        straggler = profile.straggler
        who = f"rank {straggler.rank} ({straggler.cause})" if straggler else ""
        if runs and runs[-1][0] == who:
            runs[-1][1].append(profile)
        else:
            runs.append((who, [profile]))
    parts = [f"{who} in {record.span(profiles[0], profiles[-1])}" for who, profiles in runs if who]
    shown = parts if len(parts) <= 5 else [*parts[:4], f"{len(parts) - 4} more times"]
    return [f"Earlier stragglers: {_listed(shown)}."] if parts else []


def autoshard_overhead(record: RunRecord) -> list[str]:
    """States the time spent on deciding, moving and start planning, but not the extra time of sampled steps."""
    if not record.decisions:
        return []
    deciding, moving = (sum(d.get(key) or 0.0 for d in record.decisions) for key in ("decide_seconds", "move_seconds"))
    text = f"Of the run's time, deciding took {deciding:.1f} s and moving tables {moving:.1f} s"
    if record.starts == 1 and {"planning", "total"} <= record.seconds.keys():  # a resumed run knows its last start only
        text = f"Deciding took {deciding:.1f} s and moving tables {moving:.1f} s of {record.seconds['total']:,.0f} s"
        text += f"; planning before the start took {record.seconds['planning']:.1f} s"
    return [f"{text}."]


def all_starved(profile: IntervalProfile) -> list[str]:
    """Says where no rank had its core to itself."""
    shares = [share for share in profile.cpu_share if share is not None]
    if not shares or max(shares) >= STARVED_BELOW:
        return []
    return [
        f"Every rank got at most {max(shares):.0%} of its CPU core: more processes than cores are running, so all "
        "times are inflated and noisy."
    ]


def prediction(profile: IntervalProfile) -> str:
    """Says how far off the cost model was."""
    error = profile.prediction_bias or 0.0
    if abs(error) < 0.005:
        return "The cost model predicted this plan's cost within 0.5%."
    return f"The cost model's prediction for this plan was {abs(error):.1%} too {'high' if error > 0 else 'low'}."


def model_quality(record: RunRecord) -> str | None:
    """States the last evaluation's metrics; None without one."""
    found = record.final_metrics()
    if found is None:
        return None
    split, metrics = found
    parts = [f"{name} {metrics[name]:.4f}" for name in ("auc", "logloss", "ne") if metrics.get(name) is not None]
    data = {"test": "test", "val": "validation"}[split]
    return f"On {data} data: {', '.join(parts)}." if parts else None


def made_with(record: RunRecord) -> str:
    """Returns 'Started 2026-01-31 12:00 UTC on node0 (16 cores), with Python 3.11.7 and torch 2.13.0.'"""
    known = record.environment
    python = f"Python {known.get('python', '?')}"
    versions = [f"{name} {version}" for name, version in known.get("versions", {}).items()]
    started = str(known.get("started", "at an unknown time"))[:16].replace("T", " ")
    again = f"Continued {_times(record.starts - 1)}, last" if record.starts > 1 else "Started"
    return (
        f"{again} {started} UTC on {known.get('host', 'an unknown machine')} ({known.get('cores', '?')} cores), with "
        f"{_listed([python, *versions])}."
    )


def compute_imbalance(profile: IntervalProfile) -> float:
    """Returns max / mean over ranks of embedding compute, forward and backward."""
    return imbalance(
        [f + b for f, b in zip(profile.stage_ms["fwd_compute"], profile.stage_ms["bwd_compute"], strict=True)]
    )


def comms_imbalance(profile: IntervalProfile) -> float:
    """Returns max / mean over ranks of the exchanges, forward and backward."""
    return imbalance([f + b for f, b in zip(profile.stage_ms["fwd_comms"], profile.stage_ms["bwd_comms"], strict=True)])


def total_wait_ms(profile: IntervalProfile) -> list[float]:
    """Returns the sum of each rank's waits."""
    return [sum(waits[rank] for waits in profile.wait_ms.values()) for rank in range(profile.world_size)]


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
