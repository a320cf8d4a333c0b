"""What the distribution imports: little of the core, nothing upward, and no circles."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import tpufleet_activations

ROOT = Path(tpufleet_activations.__file__).parent
NAME = "tpufleet_activations"
# Of the core. Whatever runs on a worker works without a server.
CORE = ("tpufleet.runtime", "tpufleet.errors", "tpufleet.backoff", "tpufleet.clocks")
ENTRY_POINTS = ("tpufleet.entry_points", "tpufleet.views.cli.registry")
# Besides, for tables and JSON, for prices, and to run workers as jobs.
MORE = {
    "cli/output.py": ("tpufleet.views.cli",),
    "cli/plan.py": ("tpufleet.model", "tpufleet.views.cli"),
    "cli/deploy.py": (
        "tpufleet.model",
        "tpufleet.client",
        "tpufleet.views",
        "tpufleet.installed_packages",
    ),
}
EVERYWHERE = {"input_errors"}
MAY_IMPORT = {
    "model": {"io", "daemon_threads", "start_times"},
    "io": {"plans", "formatting"},
    "inputs": {"io"},
    "streams": {"io", "plans"},
    "pipeline": {
        "model", "io", "inputs", "streams", "plans", "formatting", "daemon_threads", "start_times",
    },
}  # fmt: skip


def modules() -> dict[str, Path]:
    paths = (path for path in ROOT.rglob("*.py") if path.name != "__init__.py")
    return {".".join((NAME, *path.relative_to(ROOT).with_suffix("").parts)): path for path in paths}


def imports_of(path: Path) -> Iterator[str]:
    """Also of names: `from a import b` gives `a` and `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules().values(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_these_parts_of_the_core_are_imported(path):
    place = str(path.relative_to(ROOT))
    allowed = (*CORE, *ENTRY_POINTS, *MORE.get(place, ()))
    imported = [name for name in imports_of(path) if name.split(".")[0].startswith("tpufleet")]
    foreign = [name for name in imported if name.split(".")[0] != NAME and name != "tpufleet"]
    assert [name for name in foreign if not name.startswith(allowed)] == []


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_imports_only_go_down(package):
    allowed = MAY_IMPORT[package] | EVERYWHERE | {package}
    upward = [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in (ROOT / package).rglob("*.py")
        for name in imports_of(path)
        if name.startswith(f"{NAME}.") and name.split(".")[1] not in allowed
    ]
    assert upward == []


def test_no_modules_import_each_other_in_a_circle():
    known = modules()
    graph = {name: set(imports_of(path)) & known.keys() - {name} for name, path in known.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"circle: {error.args[1]}")
