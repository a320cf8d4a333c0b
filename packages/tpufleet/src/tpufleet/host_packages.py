"""What tpufleet imports, in the environment of a job. That holds the tpufleet package without its
requirements, which could conflict with the job's own; they are taken from the agent's environment
on the same host, after everything that the job has installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FILE = "host_packages.json"  # beside this module, in the wheel that agents give to jobs


def make_importable() -> None:
    """Nothing outside the environment of a job, or for a Python with another binary interface."""
    path = os.path.join(os.path.dirname(__file__), FILE)
    if os.path.exists(path):
        import json  # not in every process that imports tpufleet

        with open(path, encoding="utf-8") as file:
            there = json.load(file)
        if tuple(there["python"]) == sys.version_info[:2]:
            sys.meta_path.append(HostFinder(there["folders"], frozenset(there["modules"])))


class HostFinder:
    def __init__(self, folders: Sequence[str], modules: frozenset[str]) -> None:
        self._folders, self._modules = folders, modules

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return PathFinder.find_spec(name, self._folders) if name in self._modules else None
