"""`dlrm-autoshard doctor`: prints a table of checks with a command that fixes each problem; exits 1 if one fails."""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any

from dlrm_autoshard.errors import UserError

_MARKS = {"ok": "ok", "warn": "warning", "fail": "FAIL"}


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("doctor", help="check Python, torch, fbgemm, backend, cores and memory")
    parser.add_argument("--ranks", type=int, default=2, help="ranks that will run on this machine (default 2)")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from dlrm_autoshard.commands.environment_checks import examine

    if arguments.ranks < 1:
        raise UserError(f"--ranks is {arguments.ranks}; it must be 1 or more.")
    checks = examine(arguments.ranks)
    if arguments.json:
        print(json.dumps([dataclasses.asdict(check) for check in checks], indent=2))
    else:
        width = max(len(check.name) for check in checks)
        for check in checks:
            print(f"{check.name:<{width}}  {_MARKS[check.status]:<7}  {check.finding}")
            if check.fix:
                # On a line of its own and unwrapped, so that it can be copied.
                print(f"{'':<{width}}  {'fix:':<7}  {check.fix}")
    return 1 if any(check.status == "fail" for check in checks) else 0
