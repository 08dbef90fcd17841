"""`dlrm-autoshard configs`: lists the configs that come with the package; `configs NAME` copies one to start from;
`configs --keys` prints every key with its default."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

from dlrm_autoshard.commands.keys import keys_page
from dlrm_autoshard.config import like_shipped, shipped_configs
from dlrm_autoshard.errors import UserError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("configs", help="list the shipped configs, or copy one to start from")
    parser.add_argument("name", nargs="?", help="the config to copy; without one they are listed")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the file to write (default: NAME.yaml here)")
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
        raise UserError(f"there is no config '{arguments.name}'.{like_shipped(arguments.name)}")
    out = arguments.out or Path(source.name)
    if out.exists():
        raise UserError(f"'{out}' exists already. Name another file with --out.")
    out.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, out)
    print(f"{out}; train with: dlrm-autoshard train {out}")
    return 0
