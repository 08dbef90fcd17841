"""Distinguishes errors that users can fix, shown as a sentence, from bugs, shown as a traceback.

    raise DataError("'day_0.npy' is cut short at byte 96. Copy it again.")       # users' errors derive from UserError
    in_a_sentence(error)      # the text to show; None for a bug

Only `in_a_sentence` decides this; commands/main.py and commands/rank.py call it.
"""

from __future__ import annotations

import errno
import re

_LONGEST_WORD = 400  # characters; paths are shorter
_LONGEST_TEXT = 4000
_TOO_LONG_WORD = re.compile(rf"\S{{{_LONGEST_WORD + 1},}}")


class UserError(ValueError):
    """An error that users can fix; the message says in sentences what is wrong, where, how much, and what to try."""


class BagsError(UserError):
    """Tables or ids cannot be looked up; the message says which, and what to change."""


def in_a_sentence(error: BaseException) -> str | None:
    """Returns the text to show instead of a traceback; None if only a traceback helps."""
    if isinstance(error, UserError):
        return readable(str(error))
    if isinstance(error, OSError) and error.filename is not None:  # a file that somebody named
        return readable(f"'{error.filename}': {error.strerror}.")
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"{error.strerror}: free some disk space, or write to another disk."
    return None


def in_words(error: BaseException) -> str:
    """Describes an error for another rank: its sentence, or its type and text."""
    said = in_a_sentence(error)
    return f"{type(error).__name__}: {error}".rstrip(": ") if said is None else said


def readable(text: str) -> str:
    """Makes text safe and short for a terminal, whatever it quotes, such as a field of ten million characters.

    Long words lose their middle, then long text does; the end stays, as it says what to try."""
    return _clipped(printable(_clipped(text)))


def _clipped(text: str) -> str:
    return _without_middle(
        _TOO_LONG_WORD.sub(lambda word: _without_middle(word[0], _LONGEST_WORD), text), _LONGEST_TEXT
    )


def _without_middle(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most * 3 // 4 - 3]}...{text[-(most // 4) :]}"


def printable(text: str) -> str:
    """Escapes characters that would control a terminal, such as `\\x1b`."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)
