"""A Python function and its arguments as files of a snapshot.

The host needs neither tpufleet nor cloudpickle: the runner and cloudpickle travel along."""

from __future__ import annotations

import contextlib
import functools
import json
import pickle
import sys
import sysconfig
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle

from tpufleet.errors import BadInput
from tpufleet.views.python import function_runner

FOLDER = ".tpufleet-function"
RUNNER = f"{FOLDER}/run.py"


def pack_calls(
    function: Callable[..., Any],
    calls: Iterable[tuple[Any, ...]],
    *,
    sent: Collection[str],
    return_errors: bool,
) -> dict[str, bytes]:
    """Path → content. The n-th call is run by `python <RUNNER> n`. `sent`: paths of the files that
    are sent anyway."""
    with _by_value(_module_left_behind(function, sent)):
        return _pack(function, calls, return_errors)


def _pack(
    function: Callable[..., Any], calls: Iterable[tuple[Any, ...]], return_errors: bool
) -> dict[str, bytes]:
    files = {
        RUNNER: Path(function_runner.__file__).read_bytes(),
        f"{FOLDER}/about.json": json.dumps(
            {"python": list(sys.version_info[:2]), "return_errors": return_errors}
        ).encode(),
        f"{FOLDER}/function.pickle": _pickled(function, "the function"),
    }
    for number, arguments in enumerate(calls):
        files[f"{FOLDER}/arguments/{number}.pickle"] = _pickled(arguments, f"arguments {number}")
    library = Path(cloudpickle.__file__).parent
    for source in sorted(library.glob("*.py")):
        files[f"{FOLDER}/library/cloudpickle/{source.name}"] = source.read_bytes()
    return files


def _module_left_behind(function: Callable[..., Any], sent: Collection[str]) -> ModuleType | None:
    """The module of the function, where the hosts could not import it: it is neither installed nor
    in the folder that is sent."""
    while isinstance(function, functools.partial):
        function = function.func
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None)
    if module is None or file is None or module.__name__ == "__main__":
        return None
    stem = module.__name__.replace(".", "/")
    if f"{stem}.py" in sent or f"{stem}/__init__.py" in sent:
        return None
    installed = {
        sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")
    }
    if any(Path(file).is_relative_to(folder) for folder in installed):
        return None
    return module


@contextlib.contextmanager
def _by_value(module: ModuleType | None) -> Iterator[None]:
    if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _pickled(value: Any, description: str) -> bytes:
    try:
        pickled: bytes = cloudpickle.dumps(value, protocol=pickle.DEFAULT_PROTOCOL)
    except Exception as error:  # whatever __reduce__ raises
        raise BadInput(
            f"cannot send {description}: {type(error).__name__}: {error}; pass plain data, and "
            "open files, connections and devices inside the function"
        ) from error
    return pickled
