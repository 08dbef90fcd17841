"""Parses arguments of the form LOW:HIGH, or a single number for both ends: --rows 1e3:1e8, --dim 64."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Range = tuple[float, float]


def range_within(least: float, most: float) -> Callable[[str], Range]:
    """Returns an argument type that reads a range with both ends between `least` and `most`."""

    def read(text: str) -> Range:
        low, colon, high = text.partition(":")
        try:
            found = float(low), float(high if colon else low)
        except ValueError:
            raise argparse.ArgumentTypeError(
                f"'{text}' is neither a number nor a range LOW:HIGH, such as 16:256"
            ) from None
        if not least <= found[0] <= found[1] <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within {least:g}:{most:g}, the lower end first")
        return found

    return read


def range_text(ends: Range) -> str:
    """Writes a range as it is typed: '16:256', or '16'."""
    return f"{ends[0]:g}" if ends[0] == ends[1] else f"{ends[0]:g}:{ends[1]:g}"
