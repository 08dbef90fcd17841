"""Resolves paths that people give, and refuses URLs, which would otherwise become folders such as `s3:`.

local_path("file:///data/runs")             # /data/runs
local_path("~/runs")                        # /home/ada/runs
local_path("s3://bucket/runs")              # UserError with what to do instead
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated
from urllib.parse import unquote

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from dlrm_autoshard.errors import UserError

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)  # `Path` has made `//` one slash


def local_path(path: str) -> str:
    """Expands `~` and `file:///`; raises UserError for any other URL."""
    found = _URL.match(path)
    if os.path.exists(path):
        return path
    if found is None:
        return os.path.expanduser(path)
    scheme, rest = found[1].lower(), found[2]
    if scheme == "file":
        if path[len("file") :].startswith("://") and not path.startswith("///", len("file:")):
            host, _, rest = rest.partition("/")
            if host != "localhost":
                raise UserError(f"a file of the host '{host}'; write file:/// and the whole path")
        return "/" + unquote(rest)
    raise UserError(
        f"a URL, but only this machine's file systems are read and written. Mount {scheme}:// in one (rclone mount, "
        "s3fs, gcsfuse), or name a local folder and copy it there meanwhile (rclone sync, aws s3 sync, gcloud storage "
        "rsync)"
    )


def _in_a_config(path: str) -> str:
    try:
        return local_path(path)
    except UserError as error:
        raise PydanticCustomError("local_path", "{said}", {"said": str(error)}) from error


LocalPath = Annotated[str, AfterValidator(_in_a_config)]
"""Type of a path in the config."""


def checked_path(path: Path, name: str) -> Path:
    """Returns `local_path` of a command's argument. name: the argument, for messages."""
    try:
        return Path(local_path(str(path)))
    except UserError as error:
        given = str(path).replace(":/", "://", 1)
        raise UserError(f"'{name}' is '{given}': {error}.") from error
