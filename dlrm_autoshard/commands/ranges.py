"""Arguments of the form LOW:HIGH, or one number that is both: --rows 1e3:1e8, --dim 64."""

from __future__ import annotations

import argparse
from collections.abc import Callable

Range = tuple[float, float]


def range_within(least: float, most: float) -> Callable[[str], Range]:
    """An argument's type: both ends between these."""

    def read(text: str) -> Range:
        low, colon, high = text.partition(":")
        try:
            found = float(low), float(high if colon else low)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is no number and no range LOW:HIGH, such as 16:256") from None
        if not least <= found[0] <= found[1] <= most:
            raise argparse.ArgumentTypeError(f"{text} is not within {least:g}:{most:g}, the lower end first")
        return found

    return read


def range_text(ends: Range) -> str:
    """Writes a range as it is typed: '16:256', or '16'."""
    return f"{ends[0]:g}" if ends[0] == ends[1] else f"{ends[0]:g}:{ends[1]:g}"
