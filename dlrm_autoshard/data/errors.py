"""Errors of this folder; apart from `batch`, so that reading text needs no torch."""

from __future__ import annotations

from dlrm_autoshard.errors import UserError


class DataError(UserError):
    """Input cannot be used; the message names the file or table, the place, and what to try."""


class BadValue(Exception):
    """A bad value in an array: its index, and the end of a sentence about it. The caller, which knows the file, turns
    it into a DataError."""

    def __init__(self, place: int, wrong: str) -> None:
        super().__init__(wrong)
        self.place = place
