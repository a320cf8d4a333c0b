"""`tpu deploy init`: an overlay for kustomize."""

from __future__ import annotations

import stat

import pytest
import yaml

from tests.views.cli_runner import Tpu

OPTIONS = ("--project", "my-project", "--zone", "us-central1-a")
STORE = ("--store", "postgresql://fleet:pw@10.1.2.3/fleet")


@pytest.fixture
def tpu(tmp_path):
    return Tpu(HOME=str(tmp_path), TPUFLEET_HOME=str(tmp_path / "state"))


def test_an_overlay_has_the_values_and_no_placeholder(tpu, tmp_path):
    folder = tmp_path / "fleet"
    output = tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE, "--zone", "us-central1-b")
    assert f"kubectl apply --server-side -k {folder}" in output
    # Else flavors and priorities have two owners.
    queues = output.partition("  deploy:")[0].partition("  queues:")[2]
    assert queues.index("`tpu cluster install`") < queues.index(f"{folder / 'k8s'}/queues")
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


def test_settings_and_patches_of_ones_own_survive_a_second_run(tpu, tmp_path):
    folder = tmp_path / "fleet"
    tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE)
    settings, overlay = folder / "settings.env", folder / "kustomization.yaml"
    image = "TPUFLEET_GKE_IMAGE=us-docker.pkg.dev/my-project/tpufleet/tpufleet:0.1.0"
    assert image in settings.read_text()
    changed = settings.read_text().replace(image, image.replace("0.1.0", "0.2.0"))
    settings.write_text(f"{changed}# ours\nTPUFLEET_GKE_QUEUE=lab\n")
    overlay.write_text(f"{overlay.read_text()}patches: [path: ours.yaml]\n")
    repeated = tpu("deploy", "init", str(folder), *OPTIONS, *STORE, "--zone", "us-central1-b")
    lines = settings.read_text().splitlines()
    assert "TPUFLEET_GKE_ZONES=us-central1-a,us-central1-b" in lines
    assert image.replace("0.1.0", "0.2.0") in lines
    assert lines[-2:] == ["# ours", "TPUFLEET_GKE_QUEUE=lab"]
    assert overlay.read_text().endswith("patches: [path: ours.yaml]\n")
    assert f"kept {overlay}, which was edited" in repeated.output


def test_another_project_changes_the_names_that_contain_it(tpu, tmp_path):
    folder = tmp_path / "fleet"
    tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE)
    tpu.ok("deploy", "init", str(folder), *OPTIONS, *STORE, "--project", "other-project")
    settings = (folder / "settings.env").read_text()
    assert "my-project" not in settings and "gs://other-project-tpufleet" in settings


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((*OPTIONS,), "no Postgres: replicas share one database"),
        ((*OPTIONS, "--store", "sqlite:///x.db"), "no Postgres"),
        ((*OPTIONS, *STORE, "--project", "My Project"), "is not a project id"),
        ((*OPTIONS, *STORE, "--zone", "us-east5"), "--zone: 'us-east5' is not a zone; for example"),
    ],
)
def test_what_cannot_work_is_rejected(tpu, tmp_path, options, message):
    result = tpu("deploy", "init", str(tmp_path / "fleet"), *options)
    assert result.exit_code != 0 and message in result.output
    assert not (tmp_path / "fleet").exists()
