"""`tpu deploy bundle` without a network; tests/providers/tpu_vm installs a real one."""

from __future__ import annotations

import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

import tpufleet
from tests import fake_gcs
from tests.views.cli_runner import Tpu
from tpufleet.agent import own_wheel
from tpufleet.compose import host_bundle


@pytest.fixture
def tpu(tmp_path: Path) -> Tpu:
    return Tpu(
        HOME=str(tmp_path),
        TPUFLEET_HOME=str(tmp_path / "state"),
        TPUFLEET_CONFIG=str(tmp_path / "config.yaml"),
    )


def test_without_a_bucket_the_command_says_where_to_set_one(tpu):
    result = tpu("deploy", "bundle")
    assert "no bucket to upload the bundle to" in result.stderr
    assert "--bucket gs://BUCKET/FOLDER" in result.stderr and "config.yaml" in result.stderr


def test_a_folder_that_is_not_a_python_is_rejected(tpu, tmp_path):
    result = tpu("deploy", "bundle", "--output", str(tmp_path / "b"), "--python-folder", "/etc")
    assert "'/etc' is not a Python" in result.stderr
    assert not (tmp_path / "b").exists()


def test_the_running_code_becomes_the_same_wheel_each_time(tmp_path):
    first, second = (own_wheel.build(tmp_path / name) for name in ("a", "b"))
    assert first.read_bytes() == second.read_bytes()
    names = set(zipfile.ZipFile(first).namelist())
    package = Path(tpufleet.__file__).parent
    sources = {f"tpufleet/{path.relative_to(package)}" for path in package.rglob("*.py")}
    assert sources <= names and not [name for name in names if "__pycache__" in name]
    assert "tpufleet/providers/tpu_vm/startup.sh" in names
    assert "tpufleet_activations/cli/commands.py" in names
    assert not [name for name in names if name.startswith("tpufleet_testbed/")]
    [entry_points] = [name for name in names if name.endswith("/entry_points.txt")]
    registered = zipfile.ZipFile(first).read(entry_points).decode()
    assert "tpufleet_activations.cli.commands" in registered


def test_a_job_can_import_the_runtime_from_the_wheel_alone(tmp_path):
    wheel = own_wheel.build(tmp_path)
    code = f"import sys; sys.path.insert(0, {str(wheel)!r}); import tpufleet.runtime"
    clean = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(clean, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_bundle_is_uploaded_once_under_a_name_with_its_checksum(tmp_path, monkeypatch):
    path = tmp_path / "bundle.tar.gz"
    path.write_bytes(b"content")
    bundle = host_bundle.Bundle(path=path, sha256="ab" * 32, python="3.12", packages={})
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        from tpufleet.runtime import gcs

        gcs.connect().create_bucket("lab")
        first = host_bundle.upload(bundle, "gs://lab/fleet/")
        assert first == host_bundle.upload(bundle, "gs://lab/fleet")
        assert first.endswith("/bundles/tpufleet-" + tpufleet.__version__ + "-abababababab.tar.gz")
        assert gcs.Bucket("gs://lab/fleet").read(bundle.object_name) == b"content"


@pytest.fixture
def project(tpu, tmp_path):
    """A cloud project in the config file."""
    file = tmp_path / "config.yaml"
    file.write_text(
        "bucket: gs://lab/fleet\npublic_url: https://fleet.example.com\n"
        "tpu_vm: {project: my-project, zones: [us-central1-a]}\n"
    )
    return file


@pytest.fixture
def uv(tpu, tmp_path):
    """Stands in for uv: the network is not needed."""
    program = tmp_path / "uv"
    program.write_text(
        f"#!{sys.executable}\nimport pathlib, sys\nwords = sys.argv[1:]\n"
        "if words[0] == 'python':\n"
        "    root = pathlib.Path(words[words.index('--install-dir') + 1], 'cpython-3.12')\n"
        "    for name in ('bin/python3', 'lib/python3.12/os.py'):\n"
        "        (root / name).parent.mkdir(parents=True)\n"
        "        (root / name).touch()\n"
    )
    program.chmod(0o700)
    tpu.environ["UV"] = str(program)


def test_the_bundle_is_written_to_the_config_file_of_the_project(tpu, project, uv, monkeypatch):
    with fake_gcs.server() as url:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        from tpufleet.runtime import gcs

        gcs.connect().create_bucket("lab")
        printed = tpu.ok("deploy", "bundle")
        assert f"to {project}" in printed and "tpu serve" in printed
        document = yaml.safe_load(project.read_text())
        assert document["tpu_vm"]["bundle"].startswith("gs://lab/fleet/bundles/tpufleet-")
        assert len(document["tpu_vm"]["bundle_sha256"]) == 64
        assert document["tpu_vm"]["project"] == "my-project"
        assert stat.S_IMODE(project.stat().st_mode) == 0o600
        # Comments are not lost: the lines are printed instead.
        project.write_text(f"# ours\n{project.read_text()}".replace("my-project", "other"))
        before = project.read_text().replace(document["tpu_vm"]["bundle"], "gs://old")
        project.write_text(before)
        assert "tpu_vm:\n  bundle: gs://lab/fleet/bundles/" in tpu.ok("deploy", "bundle")
        assert project.read_text() == before


def test_a_bundle_for_arm_hosts_too_has_a_second_python(tpu, uv, tmp_path):
    for extra, folders in (((), {"python"}), (("--arm64",), {"python", "python-aarch64"})):
        file = tmp_path / f"bundle{len(extra)}.tar.gz"
        tpu.ok("deploy", "bundle", "--output", str(file), *extra)
        with tarfile.open(file) as archive:
            names = archive.getnames()
        assert {name for name in names if "/" not in name and "." not in name} == folders


def test_a_server_for_a_real_project_does_not_start_where_hosts_cannot_reach_it(tpu, project):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")
    for url in ("", "http://127.0.0.1:8470", "http://localhost:8470"):
        lines = project.read_text().splitlines()
        lines = [line for line in lines if not line.startswith("public_url")]
        project.write_text("\n".join([*lines, f"public_url: {url}\n" if url else ""]))
        result = tpu("serve")
        assert result.exit_code == 2
        assert "could not reach this server" in result.stderr
        assert "tpu deploy server" in result.stderr and "public_url" in result.stderr


def test_a_server_for_a_real_project_does_not_start_without_a_bundle(tpu, project):
    pytest.importorskip("google.cloud.tpu_v2", reason="pip install 'tpufleet[tpu-vm]'")
    result = tpu("serve")
    assert result.exit_code == 2
    assert "bundle is not set" in result.stderr and "run `tpu deploy bundle`" in result.stderr
