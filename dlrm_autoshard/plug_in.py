"""Loads users' code that the YAML names by file or module.

load("clicks.py:Clicks", "data.factory")               # a file, from the working directory
load("my_company.clicks:Clicks", "data.factory")       # an importable module
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from dlrm_autoshard.errors import UserError

_MARK = "__loaded_by_dlrm_autoshard__"


class PlugInError(UserError):
    """Users' code cannot be found or called; the message names the key, the place and the problem."""


def check_place(place: str, key: str) -> tuple[str, str]:
    """Splits a place into file or module, and name, without running its code; PlugInError if there is no such module.

    key: the YAML key, for messages."""
    where, colon, name = place.rpartition(":")
    if not (colon and where and name):
        raise PlugInError(f"{key} is '{place}'; it must have the form file.py:name or package.module:name.")
    if where.endswith(".py"):
        if not Path(where).is_file():
            raise PlugInError(f"{key}: there is no file '{where}' (from '{Path.cwd()}').")
    else:
        if str(Path.cwd()) not in sys.path:  # as `python -m` does
            sys.path.append(str(Path.cwd()))
        top = where.partition(".")[0]
        if not top or (top not in sys.modules and importlib.util.find_spec(top) is None):
            raise _no_module(where, key)
    return where, name


def load(place: str, key: str) -> Callable[..., Any]:
    """Returns the callable at `place`. key: the YAML key, for messages. Errors of the code itself are passed on
    unchanged, with their traceback."""
    where, name = check_place(place, key)
    module = _from_file(Path(where)) if where.endswith(".py") else _from_module(where, key)
    setattr(module, _MARK, True)
    found = getattr(module, name, None)
    if not callable(found):
        raise PlugInError(f"{key}: '{where}' has no function or class '{name}'.")
    return found


def lies_in(place: str, folder: Path) -> bool:
    """Returns whether loading `place` would run code in the folder; runs none."""
    where, root = place.rpartition(":")[0], folder.resolve()
    if where.endswith(".py"):
        return Path(where).resolve().is_relative_to(root)
    for end in [*re.finditer(r"\.|$", where)]:  # finding a module runs the code of its packages
        try:
            found = importlib.util.find_spec(where[: end.start()])
        except (ImportError, ValueError):
            return False  # `load` will report it
        if found is None:
            return False
        places = [
            *([found.origin] if found.has_location and found.origin else []),
            *(found.submodule_search_locations or ()),
        ]
        if any(Path(one).resolve().is_relative_to(root) for one in places):
            return True
    return False


def takes(function: Callable[..., Any], option: str) -> bool:
    """Returns whether the function has that parameter, or takes any keyword."""
    parameters = inspect.signature(function).parameters
    return option in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def call(function: Callable[..., Any], key: str, *given: Any, **options: Any) -> Any:
    """Calls function(*given, **options); PlugInError if the signature does not fit. key: of the options, for
    messages."""
    try:
        inspect.signature(function).bind(*given, **options)
    except TypeError as error:
        raise PlugInError(
            f"{key}: {getattr(function, '__name__', function)}{inspect.signature(function)} cannot be called with "
            f"{len(given)} positional arguments and the options {', '.join(options) or '(none)'}: {error}."
        ) from None
    return function(*given, **options)


def own_traceback(error: BaseException) -> str | None:
    """Returns the error with its traceback from users' code on; None if no loaded code is involved."""
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if _is_loaded(frame.filename)), None)
    if first is None:
        return None
    said = "".join(traceback.format_exception_only(error)).rstrip()
    shown = "".join(traceback.format_list(frames[first:])).rstrip()
    return f"{said}\nTraceback from where your own code is called:\n{shown}"


def _is_loaded(file: str) -> bool:
    """Returns whether the file is a module that `load` loaded, or lies beside it or in its package."""
    for module in [module for module in sys.modules.values() if _MARK in getattr(module, "__dict__", ())]:
        own = module.__file__ or "?"
        beside = Path(file).is_relative_to(Path(own).parent)
        packaged = _of_a_library(own) and bool(module.__package__)
        if file == own or (beside and (packaged or not _of_a_library(file))):
            return True
    return False


def _of_a_library(file: str) -> bool:
    return "lib/python" in file


def _from_file(path: Path) -> ModuleType:
    where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:8]  # files of one name are different modules
    name = f"dlrm_autoshard_plug_in.{path.stem}_{where}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    setattr(module, _MARK, True)  # before it runs, which may fail
    sys.modules[name] = module  # dataclasses and pickle look it up here
    if str(path.parent.resolve()) not in sys.path:
        sys.path.append(str(path.parent.resolve()))  # so that it can import its neighbours
    spec.loader.exec_module(module)
    return module


def _from_module(name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the module was found, but one of its own imports was not
        raise _no_module(name, key) from None


def _no_module(name: str, key: str) -> PlugInError:
    return PlugInError(
        f"{key}: Python finds no module '{name}'. Install it, add its folder to PYTHONPATH, or name its file."
    )
