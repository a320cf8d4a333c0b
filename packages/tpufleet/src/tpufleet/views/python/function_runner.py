"""Runs one call of a function that was submitted from Python, on a host.

This file is copied into the snapshot. It uses the standard library only, and reads what lies beside
it: the function, its arguments, and cloudpickle."""

from __future__ import annotations

import json
import os
import pickle
import sys
import traceback
from pathlib import Path
from typing import Any

MAX_RESULT_BYTES = 64 * 1024 * 1024  # that the server accepts


def main() -> int:
    folder = Path(__file__).resolve().parent
    about = json.loads((folder / "about.json").read_text())
    # The working directory stands in for this file's folder: the function may import from it.
    sys.path[0] = os.getcwd()
    sys.path.append(str(folder / "library"))
    first = int(os.environ.get("TPUFLEET_PROCESS_ID", "0")) == 0
    try:
        check_python(tuple(about["python"]))
        function = pickle.loads((folder / "function.pickle").read_bytes())
        arguments = pickle.loads((folder / "arguments" / f"{int(sys.argv[1])}.pickle").read_bytes())
        value = function(*arguments)
        if first:
            write_result(pack({"value": value}))
    except Exception as error:
        traceback.print_exc()
        if first and about["return_errors"]:
            write_result(pack_error(error))
        return 1
    return 0


def check_python(submitted: tuple[int, ...]) -> None:
    here = sys.version_info[:2]
    if here != submitted:
        raise RuntimeError(
            f"the function was sent by Python {submitted[0]}.{submitted[1]}, and this host runs "
            f"{here[0]}.{here[1]}: functions need the same version on both sides. Use a program "
            "with run(), or the same Python version"
        )


def pack(content: dict[str, Any]) -> bytes:
    import cloudpickle

    packed: bytes = cloudpickle.dumps(content, protocol=pickle.DEFAULT_PROTOCOL)
    if len(packed) > MAX_RESULT_BYTES:
        raise ValueError(
            f"the result has {len(packed):,} bytes, more than {MAX_RESULT_BYTES:,}: write it to "
            "storage, and return its location"
        )
    return packed


def pack_error(error: Exception) -> bytes:
    content: dict[str, Any] = {"traceback": traceback.format_exc()}
    try:
        packed = pack({**content, "error": error})
        pickle.loads(packed)  # some exceptions can be written but not read
    except Exception:
        return pack(content)
    return packed


def write_result(content: bytes) -> None:
    folder = Path(os.environ.get("TPUFLEET_RUN_DIR", "."))
    partial = folder / ".result.partial"
    partial.write_bytes(content)
    partial.replace(folder / "result")


if __name__ == "__main__":
    # As a module of its own name, so that pickles of `__main__` are not confused with it.
    sys.exit(main())
