"""`tpu deploy init`: an overlay for kustomize."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from tests.views.cli_runner import Tpu

MANIFESTS = str(Path(__file__).parents[2] / "deploy" / "k8s")
OPTIONS = ("--project", "my-project", "--zone", "us-central1-a", "--manifests", MANIFESTS)
STORE = ("--store", "postgresql://fleet:pw@10.1.2.3/fleet")


@pytest.fixture
def tpu(tmp_path):
    return Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))


def test_an_overlay_has_the_values_and_no_placeholder(tpu, tmp_path):
    folder = tmp_path / "fleet"
    output = tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE, "--zone", "us-central1-b")
    assert f"kubectl apply --server-side -k {folder}" in output
    settings = dict(line.split("=") for line in (folder / "settings.env").read_text().splitlines())
    assert settings["TPUFLEET_GKE_ZONES"] == "us-central1-a,us-central1-b"
    assert settings["TPUFLEET_BUCKET"] == "gs://my-project-tpufleet"
    assert "PROJECT" not in "".join(settings.values())
    overlay = yaml.safe_load((folder / "kustomization.yaml").read_text())
    for path in (*overlay["resources"], *overlay["components"]):
        assert (folder / path / "kustomization.yaml").is_file(), "relative to the folder"


def test_secrets_are_private_and_survive_a_second_run(tpu, tmp_path):
    folder = tmp_path / "fleet"
    tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE)
    secrets = folder / "secrets"
    before = {path.name: path.read_text() for path in secrets.iterdir()}
    assert before["store-url"] == STORE[1], "without a line end"
    assert before["admin-token"].startswith("tpf_") and len(before["secret"]) == 64
    assert before[".gitignore"] == "*\n"
    for name in ("store-url", "admin-token", "secret"):
        assert stat.S_IMODE((secrets / name).stat().st_mode) == 0o600
    tpu.ok("deploy", "init", str(folder), *OPTIONS, "--store", "postgresql://other/fleet")
    after = {path.name: path.read_text() for path in secrets.iterdir()}
    assert after == {**before, "store-url": "postgresql://other/fleet"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*OPTIONS,), "no Postgres: replicas share one database"),
        ((*OPTIONS, "--store", "sqlite:///x.db"), "no Postgres"),
        ((*OPTIONS, *STORE, "--project", "My Project"), "is not a project id"),
        ((*OPTIONS, *STORE, "--manifests", "/none"), "/none has no overlays/gke"),
    ],
)
def test_what_cannot_work_is_rejected(tpu, tmp_path, options, message):
    result = tpu("deploy", "init", str(tmp_path / "fleet"), *options)
    assert result.exit_code != 0 and message in result.output
    assert not (tmp_path / "fleet").exists()
