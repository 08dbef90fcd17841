"""Types of values in files: whole numbers of 64 bits, finite numbers, printable names."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("it holds characters that cannot be printed")
    return text


Count = Annotated[int, Field(ge=0, lt=2**63)]
Positive = Annotated[int, Field(gt=0, lt=2**63)]
BatchSize = Annotated[int, Field(gt=0, lt=2**31)]
Ranks = Annotated[int, Field(gt=0, le=2**16)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
Number = Annotated[int, Field(gt=-(2**63), lt=2**63)] | Finite  # an int stays an int
Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(gt=0, le=1)]
Name = Annotated[str, Field(min_length=1, max_length=1000), AfterValidator(_printable)]
