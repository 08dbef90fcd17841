"""The error of this folder, apart from `batch` so that reading text needs no torch."""

from __future__ import annotations

from dlrm_autoshard.errors import UserError


class DataError(UserError):
    """Input that cannot be used: the message names the file or table, the place in it, and what to try."""


class BadValue(Exception):
    """A value of an array that cannot be meant: its place there, and what is wrong, as the end of a sentence. Whoever
    knows where the array is from makes a DataError of it."""

    def __init__(self, place: int, wrong: str) -> None:
        super().__init__(wrong)
        self.place = place
