"""The base class of the config's sections: typed keys; unknown keys are errors.

class RunConfig(Section): seed: int = 0
"""

from __future__ import annotations

from typing import Any

import pydantic


class Section(pydantic.BaseModel):
    """A section of the config: unknown keys are errors, and values never change after loading."""

    model_config = pydantic.ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, strict=True)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _whole_floats(cls, record: Any) -> Any:
        """Turns whole floats into ints: YAML reads 1e6 as a float. Float keys take ints as well."""
        if not isinstance(record, dict):
            return record
        return {k: int(v) if isinstance(v, float) and v.is_integer() else v for k, v in record.items()}
