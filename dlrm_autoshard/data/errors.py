"""The error of this room, apart from `batch` so that reading text needs no torch."""

from __future__ import annotations


class DataError(ValueError):
    """Input that cannot be used: the message names the file or table, the place in it, and what to try."""
