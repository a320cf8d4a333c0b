"""Layers of the provisioner: facts, decisions on them, and the edges to GKE and Kubernetes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tpufleet_gke import provisioner

PACKAGE = "tpufleet_gke.provisioner"
ROOT = Path(provisioner.__file__).parent
FORBIDDEN = {"model": ("planning", "gke", "kube"), "planning": ("gke", "kube")}


@pytest.mark.parametrize(("layer", "edges"), FORBIDDEN.items(), ids=FORBIDDEN)
def test_facts_and_decisions_know_nothing_of_the_edges(layer, edges):
    for path in (ROOT / layer).glob("*.py"):
        imported = {
            node.module
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.ImportFrom) and node.module
        }
        wrong = [
            name for name in imported if name.startswith(tuple(f"{PACKAGE}.{e}" for e in edges))
        ]
        assert not wrong, path.name
