"""The layers: imports only go down, files form no circles, and facts and decisions stay pure."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from tests.repository import ROOT, SOURCES

CLI = {
    "client", "model", "schema", "config", "errors", "backoff", "clocks", "views", "entry_points",
}  # fmt: skip
ACTIVATIONS = {"runtime", "errors", "backoff", "entry_points"}  # plug-ins
SERVICE = {
    "policy", "model", "errors", "clocks", "stores.base", "deep_folders", "disk_space",
    "entry_points", "web_server",
}  # fmt: skip

# What modules may import of ours: the packages and modules named, and what is in them. The longest
# name here that a module is in governs it, and modules that one name governs may import each other.
# Names of the core are without `tpufleet.`.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "clocks": set(),
    "backoff": {"clocks"},
    "deep_folders": set(),
    "disk_space": set(),
    "entry_points": set(),
    "linux": set(),
    "host_packages": set(),
    "installed_packages": set(),
    "schema": {"errors"},
    "web_server": {"errors"},
    "model": {"errors", "schema", "model.values"},
    "model.values": {"errors", "schema"},
    "policy": {"model", "policy.accounting", "policy.recovery", "policy.scheduling"},
    "policy.accounting": {"model", "policy.recovery"},
    "policy.recovery": {"model", "backoff", "policy.events"},
    "policy.scheduling": {"model", "backoff", "policy.accounting"},
    "runtime": {"errors", "backoff"},
    "demo": {"runtime"},
    "stores": {"model", "errors", "backoff", "disk_space"},
    "kubernetes": {"errors", "clocks", "backoff"},
    "providers": {
        "model", "schema", "errors", "clocks", "backoff", "kubernetes", "linux", "deep_folders",
    },
    "client": {"model", "errors", "backoff"},
    "agent": {
        "client", "runtime", "model", "clocks", "backoff", "errors", "linux", "deep_folders",
        "host_packages", "installed_packages",
    },
    "controller": {
        "policy", "model", "clocks", "backoff", "errors", "stores.base", "providers.base",
    },
    "service": SERVICE,
    "service.api": SERVICE | {"service"},
    "service.transport.app": SERVICE | {"service"},  # gathers the routes
    "config": {
        "errors", "model", "schema", "providers.compute.settings", "providers.gke.settings",
        "providers.tpu_vm.settings",
    },
    # It alone names concrete classes.
    "compose": {
        "agent", "client", "clocks", "config", "controller", "deep_folders", "disk_space", "errors",
        "linux", "model", "policy", "providers", "runtime", "service", "stores", "web_server",
    },
    "views": {"client", "model", "errors"},
    # `compose` and `agent.main` are imported when the command is called.
    "views.cli": CLI | {"compose", "agent.main", "policy.recovery.retry_rules"},
    "views.python": CLI,
    "views.top": CLI,
    "__main__": {"agent.main", "errors", "views.cli"},
    "__init__": {"views.python", "host_packages"},
    "tpufleet_activations": ACTIVATIONS | {
        "tpufleet_activations.io", "tpufleet_activations.model",
    },
    "tpufleet_activations.io": ACTIVATIONS | {
        "tpufleet_activations.formatting", "tpufleet_activations.input_errors",
        "tpufleet_activations.plans",
    },
    "tpufleet_activations.model": ACTIVATIONS | {
        "tpufleet_activations.daemon_threads", "tpufleet_activations.input_errors",
        "tpufleet_activations.io", "tpufleet_activations.start_times",
    },
    "tpufleet_activations.cli": ACTIVATIONS | {
        "tpufleet_activations", "client", "installed_packages", "model", "views.cli", "views.text",
    },
    "tpufleet_gke.locations": {"schema", "model", "errors"},
    "tpufleet_gke.environment": {
        "model", "schema", "errors", "providers.gke", "tpufleet_gke.locations",
    },
    "tpufleet_gke.provisioner": {
        "model", "schema", "clocks", "backoff", "errors", "kubernetes",
        "providers.tpu_vm.google_rest", "web_server", "tpufleet_gke.locations",
        "tpufleet_gke.provisioner.model", "tpufleet_gke.provisioner.planning",
    },
    "tpufleet_gke.provisioner.model": {
        "model", "schema", "errors", "kubernetes.quantities",
        "tpufleet_gke.provisioner.settings",
    },
    "tpufleet_gke.provisioner.planning": {
        "model", "backoff", "errors", "tpufleet_gke.provisioner.model",
        "tpufleet_gke.provisioner.settings",
    },
    "tpufleet_gke.cli": {
        "tpufleet_gke", "model", "schema", "errors", "views.cli",
        "tpufleet_testbed.terraform",  # for a rehearsal, where it is installed
    },
    "tpufleet_firestore": {
        "client", "model", "config", "clocks", "backoff", "errors", "kubernetes.probes",
        "runtime.gcs",
    },
    "tpufleet_firestore.cli": {"tpufleet_firestore", "errors", "views.cli", "views.text"},
    "tpufleet_testbed": {
        "model", "clocks", "backoff", "errors", "providers", "kubernetes", "schema",
    },
    "tpufleet_testbed.cli": {"tpufleet_testbed", "model", "errors", "views.cli"},
    "tpufleet_migration": {
        "client", "config", "errors", "model", "runtime", "views", "tpufleet_activations",
    },
}  # fmt: skip

PURE = ("model", "policy", "tpufleet_gke.provisioner.planning")
IMPURE = {
    "asyncio", "http", "httpx", "io", "logging", "os", "pathlib", "psycopg", "random",
    "requests", "secrets", "shutil", "socket", "sqlite3", "subprocess", "tempfile",
    "threading", "time", "urllib", "uuid",
}  # fmt: skip
HARMLESS = {("model.values.encoding", "threading")}  # a lock decides nothing

MOST_MODULES = 15
# Packages that hold more, and why sub-packages would not help.
LARGE: dict[str, str] = {
    "providers.tpu_vm": "one provider: its requests, listings, notices, start-up and adoption",
    "service.api": "one module per group of routes",
    "tpufleet_activations.io": "one module per format and per kind of storage",
    "tpufleet_activations.model": "one module per part of a network",
    "tpufleet_testbed.cloud_tpu": "one module per part of the emulated API",
    "tpufleet_testbed.compute_engine": "one module per part of the emulated API",
    "views.cli.jobs": "one module per command",
}


@cache
def modules() -> Mapping[str, Path]:
    """By name: `model.job.jobs`, `tpufleet_gke.cli.commands`."""
    return {name_of(path, source): path for source in SOURCES for path in source.rglob("*.py")}


def name_of(path: Path, source: Path) -> str:
    parts = path.relative_to(source).with_suffix("").parts
    if parts[-1] == "__init__" and parts != ("tpufleet", "__init__"):
        parts = parts[:-1]
    return ".".join(parts).removeprefix("tpufleet.")


@cache
def imports_of(path: Path) -> tuple[tuple[int, str], ...]:
    """Line and full name of each import, at any depth; of names as well as modules."""
    imports: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by absolute path"
            imports += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
    return tuple(imports)


def our_imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and name of each module of ours that a file imports."""
    for line, full in imports_of(path):
        if full.partition(".")[0] not in distributions():
            continue
        name = full.removeprefix("tpufleet.")
        # `from tpufleet import __version__` names what `__init__.py` defines.
        yield line, name if name in modules() else parent(name) or "__init__"


@cache
def distributions() -> frozenset[str]:
    return frozenset(folder.name for source in SOURCES for folder in source.iterdir())


def parent(name: str) -> str:
    return name.rpartition(".")[0]


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def governing(name: str) -> str | None:
    return max((package for package in MAY_IMPORT if within(name, package)), key=len, default=None)


def upward_imports(name: str, path: Path) -> list[str]:
    package = governing(name)
    if package is None:
        return []  # another test finds it
    return [
        f"{name}:{line} imports {target}"
        for line, target in our_imports(path)
        if target != "__init__"  # the version
        and governing(target) != package
        and not any(within(target, allowed) for allowed in MAY_IMPORT[package])
    ]


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    components: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in graph[node]:
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                components.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return components


def test_every_module_has_a_place_in_the_layers():
    empty = {name for name, path in modules().items() if not imports_of(path)}
    assert [name for name in modules() if governing(name) is None and name not in empty] == []


def test_every_layer_exists():
    names = set(modules()) | {parent(name) for name in modules()}
    layers = set(MAY_IMPORT) | set[str]().union(*MAY_IMPORT.values())
    layers -= {each for each in layers if within(each, "tpufleet_migration")}  # may be deleted
    assert sorted(layers - names) == []


def test_imports_only_go_down():
    assert [line for name, path in modules().items() for line in upward_imports(name, path)] == []


def test_files_import_each_other_in_no_circle():
    """Imports inside functions and for types alone count too."""
    graph = {
        name: {target for _, target in our_imports(path) if target in modules()} - {name}
        for name, path in modules().items()
    }
    assert circles(graph) == []


def test_no_file_imports_a_private_name_of_another():
    private = [
        f"{name}:{line} imports {full}"
        for name, path in modules().items()
        for line, full in imports_of(path)
        if full.partition(".")[0] in distributions()
        and any(part.startswith("_") and not part.endswith("__") for part in full.split("."))
    ]
    assert private == []


@pytest.mark.parametrize("package", PURE)
def test_facts_and_decisions_touch_nothing_outside(package):
    violations = [
        f"{name}:{line} imports {full}"
        for name, path in modules().items()
        if within(name, package)
        for line, full in imports_of(path)
        if full.partition(".")[0] in IMPURE and (name, full) not in HARMLESS
    ]
    assert violations == []


def test_large_packages_have_sub_packages():
    sizes = Counter(
        name_of(path.parent / "__init__.py", source)
        for source in SOURCES
        for path in source.rglob("*.py")
        if path.name != "__init__.py"
    )
    assert sorted(name for name, size in sizes.items() if size > MOST_MODULES) == sorted(LARGE)


@pytest.mark.parametrize(
    ("file", "source", "found"),
    [
        ("model/job.py", "from tpufleet.controller import loop", "controller.loop"),
        ("model/values/text.py", "import tpufleet.model.job.jobs", "model.job.jobs"),
        ("policy/a.py", "def f():\n    from tpufleet.stores.base import Store", "stores.base"),
        ("runtime/a.py", "from tpufleet_testbed.gke import main", "tpufleet_testbed.gke.main"),
    ],
    ids=["module", "sub-package", "inside a function", "distribution"],
)
def test_an_upward_import_is_found(file, source, found, tmp_path):
    path = tmp_path / "tpufleet" / file
    path.parent.mkdir(parents=True)
    path.write_text(source)
    [violation] = upward_imports(name_of(path, tmp_path), path)
    assert violation.endswith(f" imports {found}")


def test_a_circle_is_found():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == [["b", "c"]]


def test_the_workspace_is_read():
    assert {"model.job.jobs", "__init__", "tpufleet_gke.cli.commands"} <= set(modules())
    assert all(path.is_relative_to(ROOT) for path in modules().values())
