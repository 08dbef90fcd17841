"""The config that somebody names: a YAML file, or one that comes with the package.

find_config("demo"); find_config("mine.yaml")
"""

from __future__ import annotations

import difflib
from pathlib import Path

from dlrm_autoshard.config import SHIPPED
from dlrm_autoshard.errors import UserError


def shipped_configs() -> dict[str, Path]:
    """Name -> file, of the configs that come with the package."""
    return {path.stem: path for path in sorted(SHIPPED.glob("*.yaml"))}


def find_config(given: str) -> Path:
    """The file that was named; else the shipped config of that name, in any spelling (demo, configs/demo.yaml)."""
    path = Path(given)
    if path.exists() and not path.is_dir():
        return path
    shipped = shipped_configs().get(path.stem)
    if shipped is not None and path.suffix in ("", ".yaml"):
        return shipped
    if given and (path / "config.yaml").is_file():
        raise UserError(
            f"'{given}' is a folder, perhaps a run's: `dlrm-autoshard train {path / 'config.yaml'} --resume {given}` "
            "goes on with it."
        )
    if given and path.is_dir():
        raise UserError(f"'{given}' is a folder. Name a YAML file, or a config of the package.{like_shipped(given)}")
    raise UserError(f"there is no file '{given}', and no config of that name.{like_shipped(given)}")


def like_shipped(given: str) -> str:
    """Returns the shipped config of which `given` may be a misspelling; else all of them."""
    names = list(shipped_configs())
    close = difflib.get_close_matches(Path(given).stem, names, n=1)
    return f" Did you mean '{close[0]}'?" if close else f" The package has {', '.join(names)}."
