"""Formats numbers and names for people.

gib(6.6e9), count(3, "move"), some_of(names)         # '6.15 GiB', '3 moves', "'a', 'b' and 12 more"
"""

from __future__ import annotations

from collections.abc import Iterable


def gib(num_bytes: float) -> str:
    """Formats bytes: '6.2 GiB', '12 MiB', '340 KiB'."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:{'.3g' if abs(num_bytes) < 999.5 * size else ',.0f'}} {unit}"
    return f"{int(num_bytes)} bytes"


def some_of(names: Iterable[str], most: int = 5) -> str:
    """Formats names: "'a', 'b' and 12 more"."""
    ordered = sorted(names)
    shown = ", ".join(f"'{name}'" for name in ordered[:most])
    return shown if len(ordered) <= most else f"{shown} and {len(ordered) - most} more"


def count(number: int, thing: str) -> str:
    """Formats a number of things: '1 move', '3 moves'."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def duration(seconds: float) -> str:
    """Formats seconds: '42 s', '7 min', '3.5 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
