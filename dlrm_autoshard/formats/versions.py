"""Versions of packages and of this code, for records.

installed_version("torch")      # "2.13.0+cpu"
commit()                        # "1f0c...-dirty"
"""

from __future__ import annotations

import importlib.metadata
import subprocess
from pathlib import Path


def installed_version(package: str) -> str | None:
    """Returns the version that pip would show, without importing the package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """Returns the commit of the checkout this code runs from, with '-dirty' if files have changed; None for a wheel."""
    repository = Path(__file__).parents[2]
    if not (repository / ".git").exists():
        return None
    try:
        git = ["git", "-C", str(repository), "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty"]
        return subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
