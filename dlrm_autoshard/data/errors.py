"""The error of this folder, apart from `batch` so that reading text needs no torch."""

from __future__ import annotations

from dlrm_autoshard.errors import UserError


class DataError(UserError):
    """Input that cannot be used: the message names the file or table, the place in it, and what to try."""
