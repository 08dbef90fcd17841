"""`dlrm-autoshard configs`: lists the configs that come with the package; `configs NAME` copies one to start from;
`configs --keys` prints every key with its default."""

from __future__ import annotations

import argparse
import difflib
import shutil
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.keys import keys_page
from dlrm_autoshard.config import SHIPPED
from dlrm_autoshard.errors import UserError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("configs", help="list the shipped configs, or copy one to start from")
    parser.add_argument("name", nargs="?", help="the config to copy; without one they are listed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (default: NAME.yaml here)")
    parser.add_argument("--keys", action="store_true", help="print every key with its default and meaning")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.keys:
        print(keys_page(), end="")
        return 0
    if arguments.name is None:
        for name, path in shipped_configs().items():
            print(f"{name:<18}  {path.read_text().splitlines()[0].lstrip('# ')}")
        return 0
    source = shipped_configs().get(Path(arguments.name).stem)
    if source is None:
        raise UserError(f"there is no config '{arguments.name}'.{_shipped(arguments.name)}")
    out = arguments.out or Path(source.name)
    if out.exists():
        raise UserError(f"'{out}' exists already. Name another file with --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, out)
    print(f"{out}; train it with: dlrm-autoshard train {out}")
    return 0


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
        raise UserError(f"'{given}' is a folder. Name a YAML file, or a config of the package.{_shipped(given)}")
    raise UserError(f"there is no file '{given}', and no config of that name.{_shipped(given)}")


def _shipped(given: str) -> str:
    """Returns the shipped config of which `given` may be a misspelling; else all of them."""
    names = list(shipped_configs())
    close = difflib.get_close_matches(Path(given).stem, names, n=1)
    return f" Did you mean '{close[0]}'?" if close else f" The package has {', '.join(names)}."
