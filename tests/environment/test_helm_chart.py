"""The Helm chart is generated from the kustomize overlay, and renders to the same manifests."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from scripts import helm_chart

from tests.environment.environments import example
from tests.k8s.test_manifests import kubectl
from tpufleet.environment.addons import helm_values

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tpufleet/servers"


def helm() -> str:
    path = shutil.which("helm", path=f"{CACHE}{os.pathsep}{os.environ.get('PATH', '')}")
    if path is None:
        pytest.skip("helm not found; ./test builds it where Go is installed")
    return path


def helm_rendered(*options: str) -> list[dict[str, Any]]:
    done = subprocess.run(
        [helm(), "template", "tpufleet", str(helm_chart.CHART), *options],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def ordered(documents: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(
        documents,
        key=lambda item: (
            item["kind"], item["metadata"].get("namespace", ""), item["metadata"]["name"],
        ),
    )  # fmt: skip


def test_the_chart_is_up_to_date():
    generated = helm_chart.files(helm_chart.rendered(kubectl()))
    written = {
        str(path.relative_to(helm_chart.CHART)): path.read_text()
        for path in helm_chart.CHART.rglob("*.yaml")
    }
    assert written == generated, "run `python scripts/helm_chart.py --write`"


def test_helm_and_kustomize_render_the_same():
    assert ordered(helm_rendered()) == ordered(helm_chart.rendered(kubectl()))


def test_values_of_an_environment_leave_no_placeholder(tmp_path):
    values = tmp_path / "values.yaml"
    values.write_text(helm_values.text(example()))
    documents = helm_rendered("--values", str(values))
    assert "PROJECT" not in yaml.safe_dump_all(documents).replace("GOOGLE_CLOUD_PROJECT", "")
    accounts = {
        item["metadata"]["name"]: item["metadata"].get("annotations", {})
        for item in documents if item["kind"] == "ServiceAccount"
    }  # fmt: skip
    assert accounts["tpufleet"]["iam.gke.io/gcp-service-account"] == (
        "ml-tpufleet@my-project.iam.gserviceaccount.com"
    )


def test_every_value_of_an_environment_is_one_of_the_chart():
    defaults = yaml.safe_load((helm_chart.CHART / "values.yaml").read_text())
    given = yaml.safe_load(helm_values.text(example()))
    assert set(given) <= set(defaults)
    for key in ("serviceAccounts", "replicas"):
        assert set(given[key]) <= set(defaults[key])
