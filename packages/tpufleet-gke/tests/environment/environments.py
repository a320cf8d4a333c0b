"""Environments that the tests share."""

from __future__ import annotations

from typing import Any

import yaml

from tests.repository import ROOT
from tpufleet_gke.environment.config.parse import parse
from tpufleet_gke.environment.config.sections import Environment

EXAMPLE = ROOT / "examples" / "gke" / "cluster.yaml"
SMALLEST = {"project": "my-project", "region": "us-central1", "zones": ["us-central1-a"]}


def environment(**changes: Any) -> Environment:
    """The smallest valid environment, with fields added or replaced."""
    return parse({**SMALLEST, **changes})


def example() -> Environment:
    return parse(yaml.safe_load(EXAMPLE.read_text()))


def tpu(kind: str, **fields: Any) -> dict[str, Any]:
    """One TPU pool that Terraform creates."""
    return {"tpu_pools": {"pool": {"type": kind, "managed_by": "terraform", **fields}}}
