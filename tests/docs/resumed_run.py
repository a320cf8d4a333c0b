"""Runs the program of an example in one process: whole, then stopped after a step and continued.

    python -m tests.docs.resumed_run FOLDER examples/flax/train.py steps=6 every=2

Prints both results as JSON.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any


def run(program: Any, settings: dict[str, Any], folder: Path, *, stopped: bool = False) -> int:
    """Its exit status. `stopped`: it is asked to stop, and does so after its first step."""
    os.environ["TPUFLEET_CHECKPOINT_DIR"] = str(folder / "checkpoints")
    os.environ["TPUFLEET_RUN_DIR"] = str(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "stop").unlink(missing_ok=True)
    if stopped:
        (folder / "stop").touch()
    try:
        program.main(**settings)
    except SystemExit as exited:
        return 1 if exited.code else 0
    return 0


def main(folder: Path, path: Path, arguments: list[str]) -> None:
    sys.path.insert(0, str(path.parent))
    program = importlib.import_module(path.stem)
    given = dict(argument.split("=", 1) for argument in arguments)
    settings = {
        name: type(value)(given.get(name, value)) for name, value in program.SETTINGS.items()
    }
    if "model" in settings:
        settings["model_name"] = settings.pop("model")
    statuses = [
        run(program, settings, folder / "whole"),
        run(program, settings, folder / "cut", stopped=True),
        run(program, settings, folder / "cut"),
    ]
    results = [
        json.loads((folder / name / "checkpoints" / "result.json").read_text())
        for name in ("whole", "cut")
    ]
    print(json.dumps({"statuses": statuses, "results": results}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]).absolute(), sys.argv[3:])
