"""The layers: imports only go down, and facts and decisions stay pure."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import tpufleet

ROOT = Path(tpufleet.__file__).parent

# What each package may import of ours. `stores.base` means that module alone.
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "schema": {"errors"},
    "clocks": set(),
    "backoff": {"clocks"},
    "deep_folders": set(),
    "disk_space": set(),
    "linux": set(),
    "model": {"errors", "schema"},
    "policy": {"model", "backoff"},
    "runtime": {"errors", "backoff"},
    "workloads": {"runtime", "errors", "backoff"},
    "demo": {"runtime"},
    "bridges": {"client", "model", "config", "clocks", "backoff", "errors", "kubernetes.probes"},
    "stores": {"model", "errors", "backoff", "disk_space"},
    "providers": {
        "model", "errors", "schema", "clocks", "backoff", "kubernetes", "linux", "deep_folders",
    },
    "kubernetes": {"errors", "clocks", "backoff"},
    "provisioner": {"policy", "model", "clocks", "backoff", "errors", "schema", "kubernetes"},
    "testbed": {"model", "clocks", "backoff", "errors", "providers", "kubernetes"},
    "environment": {"model", "errors", "schema", "providers.gke"},
    "client": {"model", "errors", "backoff"},
    "agent": {
        "client", "runtime", "model", "clocks", "backoff", "errors", "linux", "deep_folders",
    },
    "controller": {
        "policy", "model", "clocks", "backoff", "errors", "stores.base", "providers.base",
    },
    "service": {
        "policy", "model", "errors", "clocks", "stores.base", "deep_folders", "disk_space",
    },
    "config": {"errors", "schema", "model", "providers.gke", "providers.tpu_vm"},
    "views": {
        "client", "model", "config", "errors", "schema", "backoff", "policy.retry_rules",
        # The programs that the command line starts, imported when the command is called:
        "compose", "agent.main", "provisioner", "bridges.firestore", "workloads.activations",
        "testbed.kubernetes", "testbed.terraform", "environment",
    },
}  # fmt: skip
TOP = {"compose", "__main__", "__init__"}  # compose alone names concrete classes
PURE = ("model", "policy")
IMPURE = {
    "asyncio", "http", "httpx", "io", "logging", "os", "pathlib", "psycopg", "random",
    "requests", "secrets", "shutil", "socket", "sqlite3", "subprocess", "tempfile",
    "threading", "time", "urllib", "uuid",
}  # fmt: skip
HARMLESS = {("encoding.py", "threading")}  # a lock decides nothing


def modules() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def package_of(path: Path, root: Path = ROOT) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return parts[0]


def imports_of(path: Path) -> list[tuple[int, str]]:
    imports: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imports += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: import by absolute path"
            base = node.module or ""
            imports.append((node.lineno, base))
            if base == "tpufleet":
                imports += [(node.lineno, f"tpufleet.{alias.name}") for alias in node.names]
            elif base in ("tpufleet.stores", "tpufleet.providers"):
                imports += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return imports


def breaches(path: Path, root: Path = ROOT) -> list[str]:
    package = package_of(path, root)
    if package in TOP:
        return []
    allowed = MAY_IMPORT[package] | {package}
    violations = []
    for line, name in imports_of(path):
        if not name.startswith("tpufleet.") or name == "tpufleet.__version__":
            continue
        target = name.removeprefix("tpufleet.")
        head = target.split(".")[0]
        if head in allowed or ".".join(target.split(".")[:2]) in allowed:
            continue
        if target in ("stores", "providers"):
            continue  # `from tpufleet.stores import base`: judged by the name it brings in
        violations.append(f"{path.relative_to(root)}:{line} imports {name}")
    return violations


def test_the_composition_root_does_not_import_the_command_line():
    imports = [
        name
        for path in modules()
        if package_of(path) == "compose"
        for _, name in imports_of(path)
        if name.startswith("tpufleet.views")
    ]
    assert imports == []


def test_imports_only_go_down():
    assert [line for path in modules() for line in breaches(path)] == []


def test_every_package_has_a_place_in_the_layers():
    known = set(MAY_IMPORT) | TOP
    assert {package_of(path) for path in modules()} <= known


@pytest.mark.parametrize("package", PURE)
def test_facts_and_decisions_touch_nothing_outside(package):
    violations = [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in modules()
        if package_of(path) == package
        for line, name in imports_of(path)
        if name.split(".")[0] in IMPURE and (path.name, name) not in HARMLESS
    ]
    assert violations == []


def test_an_upward_import_would_be_found(tmp_path):
    package = tmp_path / "model"
    package.mkdir()
    module = package / "upward.py"
    module.write_text("from tpufleet.controller import loop\n")
    assert breaches(module, tmp_path) == ["model/upward.py:1 imports tpufleet.controller"]
