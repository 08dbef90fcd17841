"""Tells errors that people can fix, which end in a sentence, from bugs, which end in a traceback.

    raise DataError("'day_0.npy' is cut short at byte 96. Copy it again.")       # every error for people is a UserError
    in_a_sentence(error)      # that text; None for a bug

Whoever talks to people (commands/main.py, commands/rank.py) asks `in_a_sentence`, and nobody else decides.
"""

from __future__ import annotations

import errno
import re

_LONGEST_WORD = 400  # characters; paths are shorter
_LONGEST_TEXT = 4000
_TOO_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


class UserError(ValueError):
    """An error that people can fix: its message says in full sentences what, where, how much, and what to try."""


class BagsError(UserError):
    """Tables or ids that cannot be looked up: the message says which, and what to change."""


def in_a_sentence(error: BaseException) -> str | None:
    """Returns the text to show in the place of a traceback; None where only a traceback helps."""
    if isinstance(error, UserError):
        return readable(str(error))
    if isinstance(error, OSError) and error.filename is not None:  # a file that somebody named
        return readable(f"'{error.filename}': {error.strerror}.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: free some disk space, or write to another disk."
    return None


def in_words(error: BaseException) -> str:
    """Returns what to tell another rank of an error here: its sentence, or its kind and text."""
    said = in_a_sentence(error)
    return f"{type(error).__name__}: {error}".rstrip(": ") if said is None else said


def readable(text: str) -> str:
    """The text as a terminal may show it, and no longer than people read, whatever it quotes: a field of ten million
    characters, say. A word that is too long loses its middle, as does a text that still is; the end stays, for there
    messages say what to try."""
    return _clipped(printable(_clipped(text)))


def _clipped(text: str) -> str:
    return _without_middle(
        _TOO_LONG_WORD.sub(lambda word: _without_middle(word[0], _LONGEST_WORD), text), _LONGEST_TEXT
    )


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4 - 3]}...{text[-(most // 4) :]}"


def printable(text: str) -> str:
    """The text without what would steer a terminal: `\\x1b` in the place of an escape character."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
