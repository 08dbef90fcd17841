"""A run in a few sentences: its verdict first, then what one asks next. The terminal opens with it.

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
    """Returns the run in sentences, the verdict first."""
    return [*filter(None, [bottom_line(record)]), *verdict(record), *details(record)]


def details(record: RunRecord) -> list[str]:
    """Returns the sentences that the verdict leaves out."""
    sentences = []
    if record.intervals:
        sentences += [
            where_it_ran(record),
            *([f"{said_of(record.replicated)}."] if record.replicated else []),
            step_time(record, record.reported),
            *who_was_slow(record),
            *what_it_cost(record),
            *all_starved(record.reported),
        ]
        if record.reported.prediction_bias is not None:
            sentences.append(prediction(record.reported))
        if record.reported.samples and abs(record.reported.accounted - 1) > 0.03:
            sentences.append(
                f"Stages and waits add up to {record.reported.accounted:.0%} of the step: read the stages with care."
            )
    else:
        sentences.append("Profiling was off (profile.enabled: false), so there are metrics but no costs.")
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
        f"{took} Sampled, with barriers and nothing overlapped, it took {profile.step_ms:.3g} ms "
        f"({count(profile.samples, 'sampled step')})."
    )


def balanced_ms(record: RunRecord, profile: IntervalProfile) -> float:
    """The sampled step without what perfect balance would save."""
    balance = record.balance(profile)
    return profile.step_ms - (0.0 if balance is None else balance.gain * profile.mean_step_ms)


def why_unsampled(profile: IntervalProfile) -> str:
    """Says why an interval has no stages."""
    steps = profile.end_step - profile.first_step
    return (
        f"None of these {steps:,} steps was sampled, so there are no stages to show: lower profile.warmup_steps (those "
        "at the start of an epoch that are left out) or profile.every_steps."
    )


def who_was_slow(record: RunRecord) -> list[str]:
    """Stragglers of the intervals before the one that is told; neighbours with the same one and the same cause are
    drawn together."""
    runs: list[tuple[str, list[IntervalProfile]]] = []
    for profile in record.intervals[: record.intervals.index(record.reported)]:
        straggler = profile.straggler
        who = f"rank {straggler.rank} ({straggler.cause})" if straggler else ""
        if runs and runs[-1][0] == who:
            runs[-1][1].append(profile)
        else:
            runs.append((who, [profile]))
    said = [f"{who} in {record.span(profiles[0], profiles[-1])}" for who, profiles in runs if who]
    shown = said if len(said) <= 5 else [*said[:4], f"{len(said) - 4} more times"]
    return [f"Earlier the others were held up by {_listed(shown)}."] if said else []


def what_it_cost(record: RunRecord) -> list[str]:
    """Resharding, and the start's plan; sampled steps, which are longer by their barriers, are left out."""
    if not record.decisions:
        return []
    deciding, moving = (sum(d.get(key) or 0.0 for d in record.decisions) for key in ("decide_seconds", "move_seconds"))
    said = f"Deciding took {deciding:.1f} s and moving tables {moving:.1f} s"
    if record.starts == 1 and {"planning", "total"} <= record.seconds.keys():  # else only the last start's are known
        said += f", of {record.seconds['total']:,.0f} s; planning before that {record.seconds['planning']:.1f} s"
    return [f"{said}."]


def all_starved(profile: IntervalProfile) -> list[str]:
    """Says where no rank had its core to itself."""
    shares = [share for share in profile.cpu_share if share is not None]
    if not shares or max(shares) >= STARVED_BELOW:
        return []
    return [
        f"Every rank had its core for at most {max(shares):.0%} of the time: more processes than cores, so all "
        "times here are longer than they need be, and noisy."
    ]


def prediction(profile: IntervalProfile) -> str:
    """Says how far off the cost model was."""
    error = profile.prediction_bias or 0.0
    if abs(error) < 0.005:
        return "The cost model's prediction of this plan was right within half a percent."
    return (
        f"The cost model had expected this plan to cost {abs(error):.1%} {'more' if error > 0 else 'less'} than it did."
    )


def model_quality(record: RunRecord) -> str | None:
    """Says the last evaluation's metrics; None where there was none."""
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


def compute_imbalance(profile: IntervalProfile) -> float:
    """max / mean of the ranks' embedding compute, forward and backward."""
    return imbalance(
        [f + b for f, b in zip(profile.stage_ms["fwd_compute"], profile.stage_ms["bwd_compute"], strict=True)]
    )


def comms_imbalance(profile: IntervalProfile) -> float:
    """max / mean of the ranks' exchanges, forward and backward."""
    return imbalance([f + b for f, b in zip(profile.stage_ms["fwd_comms"], profile.stage_ms["bwd_comms"], strict=True)])


def total_wait_ms(profile: IntervalProfile) -> list[float]:
    """Returns each rank's waits together."""
    return [sum(waits[rank] for waits in profile.wait_ms.values()) for rank in range(profile.world_size)]


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")


def _listed(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
