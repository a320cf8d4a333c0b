"""`tpu cluster` as a user gives it, and the commands of docs/gke-environment.md word for word."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from tests import fake_gcs
from tests.docs import markdown
from tests.environment import terraform_programs
from tests.environment.environments import EXAMPLE, SMALLEST
from tpufleet.errors import BadInput, Conflict
from tpufleet.views.cli import registry
from tpufleet_gke.environment.terraform.live_slices import LiveSlices
from tpufleet_gke.environment.terraform.stages import StageName

pytest.importorskip("grpc", reason="needs the extra `gke`: pip install 'tpufleet[gke]'")

from tpufleet_testbed.terraform.emulated_google_cloud import EmulatedGoogleCloud
from tpufleet_testbed.terraform.google_provider import serve


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("TPUFLEET_TERRAFORM", terraform_programs.opentofu())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tpu(*args: str) -> Result:
    done = CliRunner().invoke(registry.root(), list(args), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def test_the_page_can_be_followed_word_for_word(folder):
    page = "docs/gke-environment.md"
    block = next(block for block in markdown.blocks("sh") if block.where.startswith(page))
    printed = [tpu(*shlex.split(line)[1:]).output for line in block.text.splitlines()]
    assert len(printed) == 4
    assert "wrote cluster.yaml" in printed[0]
    assert "create GKE cluster ml-cluster  [+0.10 USD/hour]" in printed[1]
    assert "applied" in printed[2]
    assert printed[3].startswith("no changes\n")


@pytest.mark.slow
def test_the_whole_life_of_an_environment(folder):
    file = folder / "cluster.yaml"
    file.write_text(EXAMPLE.read_text())
    applied = json.loads(tpu("cluster", "apply", "--rehearse", "--yes", "--json").stdout)
    cloud = folder / ".rehearsal" / "google-cloud.json"
    assert len(applied["changes"]) == len(json.loads(cloud.read_text())) > 60
    outputs = json.loads((folder / ".rehearsal/outputs/1-infrastructure.json").read_text())
    assert outputs["cluster_name"] == "ml-cluster"
    assert outputs["tpu_slices"] == {"v5e-16": 4, "v5p-128": 2}
    with pytest.raises(BadInput, match="deletion_protection: true protects"):
        tpu("cluster", "destroy", "--rehearse", "--yes")
    document = yaml.safe_load(file.read_text())
    file.write_text(yaml.safe_dump({**document, "deletion_protection": False}))
    tpu("cluster", "apply", "--rehearse", "--yes")
    tpu("cluster", "destroy", "--rehearse", "--yes")
    kept = {key.partition("/")[0] for key in json.loads(cloud.read_text())}
    assert "google_container_cluster" not in kept and "google_project_service" in kept
    tpu("cluster", "destroy", "--rehearse", "--yes", "--bootstrap")
    assert json.loads(cloud.read_text()) == {}


@pytest.mark.slow
def test_destroy_deletes_nothing_while_the_applied_cluster_is_protected(folder):
    """deletion_protection was changed in the file, and not applied."""
    file = folder / "cluster.yaml"
    file.write_text(yaml.safe_dump(SMALLEST))
    tpu("cluster", "apply", "--rehearse", "--yes")
    cloud = folder / ".rehearsal" / "google-cloud.json"
    before = json.loads(cloud.read_text())
    file.write_text(yaml.safe_dump({**SMALLEST, "deletion_protection": False}))
    with pytest.raises(BadInput) as refused:
        tpu("cluster", "destroy", "--rehearse", "--yes")
    assert "ml-cluster is still protected" in str(refused.value)
    assert "`tpu cluster apply --rehearse`" in str(refused.value)
    assert json.loads(cloud.read_text()) == before


def with_slices(count: int, **network: object) -> str:
    pool = {"type": "v5p-128", "slices": count}
    return yaml.safe_dump({**SMALLEST, "tpu_pools": {"a": pool}, "network": network})


def ranges(folder: Path) -> dict[str, str]:
    records = json.loads((folder / ".rehearsal" / "google-cloud.json").read_text())
    [subnet] = [each for key, each in records.items() if key.startswith("google_compute_subnetw")]
    found = {each["range_name"]: each["ip_cidr_range"] for each in subnet["secondary_ip_range"]}
    return {"nodes": subnet["ip_cidr_range"], **found}


def test_ranges_are_sized_once_and_a_plan_beyond_them_is_refused(folder):
    """Was: four slices more asked Google for another range of pods, which it refuses."""
    file = folder / "cluster.yaml"
    file.write_text(with_slices(4))
    tpu("cluster", "apply", "--rehearse", "--yes")
    live = ranges(folder)
    file.write_text(with_slices(8))
    assert "subnetwork" not in tpu("cluster", "plan", "--rehearse").stdout
    tpu("cluster", "apply", "--rehearse", "--yes")
    assert ranges(folder) == live
    records = (folder / ".rehearsal" / "google-cloud.json").read_text()
    for text, problem in {
        with_slices(
            100
        ): f"tpu_pools: need 52736 addresses for pods, the live range {live['pods']}",
        with_slices(4, pods="10.64.32.0/19"): f"network.pods: is {live['pods']} in the cloud, and",
        with_slices(4, services="10.65.0.0/20"): "network.services: is 10.64.0.0/20 in the cloud",
        with_slices(4, nodes="10.0.0.0/19"): "write 10.0.0.0/18",
        with_slices(4, control_plane="172.17.0.0/28"): "replace GKE cluster ml-cluster",
    }.items():
        file.write_text(text)
        for command in (("apply", "--yes"), ("plan",)):
            with pytest.raises(BadInput) as refused:
                tpu("cluster", *command, "--rehearse")
            assert problem in str(refused.value) and "cluster.yaml" in str(refused.value)
    assert (folder / ".rehearsal" / "google-cloud.json").read_text() == records
    file.write_text(with_slices(4, nodes="10.0.0.0/17"))  # the range of nodes may grow
    tpu("cluster", "apply", "--rehearse", "--yes")
    assert ranges(folder) == {**live, "nodes": "10.0.0.0/17"}


def test_a_range_beside_that_of_pods_is_compared_with_the_live_one(folder):
    """Was: with the one that growing pools would have in a new network."""
    file = folder / "cluster.yaml"
    beside = "10.128.48.0/20"
    file.write_text(with_slices(8, services=beside))
    with pytest.raises(BadInput, match=r"network.services: .*pods \(10.128.0.0/18"):
        tpu("cluster", "apply", "--rehearse", "--yes")
    file.write_text(with_slices(4, services=beside))
    tpu("cluster", "apply", "--rehearse", "--yes")
    assert ranges(folder)["pods"] == "10.128.0.0/19"
    file.write_text(with_slices(8, services=beside))
    tpu("cluster", "plan", "--rehearse")


OTHER_ZONES = {
    "of another region": ("v4-8", "us-central1-a", "us-central2-b"),
    "that does not exist": ("v5e-16", "us-central1-z", "us-central1-a"),
}


@pytest.mark.parametrize(("kind", "zone", "instead"), OTHER_ZONES.values(), ids=OTHER_ZONES)
def test_plan_warns_of_a_zone_in_which_google_does_not_offer_a_type(folder, kind, zone, instead):
    """Not an error: Google adds zones."""
    tpu("cluster", "init", "--project", "my-project", "--zone", zone, "--type", kind)
    shown = tpu("cluster", "plan", "--rehearse").stderr
    (warning,) = [line for line in shown.splitlines() if line.startswith("warning:")]
    assert f"no {kind} in {zone}" in warning
    assert instead in warning and "`tpu types --zones`" in warning


def test_plan_does_not_warn_of_a_documented_zone(folder):
    (folder / "cluster.yaml").write_text(EXAMPLE.read_text())
    assert "warning" not in tpu("cluster", "plan", "--rehearse").stderr


@pytest.mark.parametrize("zone", ["us-central1", "us_central1_a"])
def test_init_names_the_option_that_is_wrong(folder, zone):
    with pytest.raises(BadInput, match=r"^--zone: .* us.central1.*-a$"):
        tpu("cluster", "init", "--project", "my-project", "--zone", zone)
    assert not (folder / "cluster.yaml").exists()


def test_a_file_that_is_not_yaml_is_refused_with_the_line(folder):
    (folder / "cluster.yaml").write_text("project: p\ntpu_pools:\n  a:\n    x: 1\n   y: 2\n")
    with pytest.raises(BadInput, match=r"^cluster.yaml: line 5: not valid YAML: "):
        tpu("cluster", "plan", "--rehearse")


GCLOUD = """\
#!{python}
# The calls of gcloud that are made, against a storage server for tests, and a list of VMs.
import json, sys, urllib.request
if sys.argv[1:4] == ["compute", "instances", "list"]:
    print(open({records!r} + ".vms").read())
    sys.exit()
verb, url = sys.argv[3:5]
name = url.removeprefix("gs://")
try:
    if verb == "describe":
        urllib.request.urlopen(f"{server}/storage/v1/b/{{name}}")
    else:
        body = json.dumps({{"name": name}}).encode()
        urllib.request.urlopen(urllib.request.Request(f"{server}/storage/v1/b", data=body))
        records = {{"google_storage_bucket/" + name: {{"name": name, "id": name}}}}
        open({records!r}, "w").write(json.dumps(records))
except urllib.error.HTTPError as error:
    sys.exit(f"ERROR: {{url}} {{error.code}}")
"""


@pytest.mark.slow
def test_state_is_kept_in_the_bucket_from_the_first_stage_to_the_last(folder, monkeypatch):
    """Without --rehearse: the GCS backend on a storage server, gcloud replaced by a script."""
    records = folder / "google-cloud.json"
    cloud = EmulatedGoogleCloud(records)
    with fake_gcs.server() as server, serve(cloud) as variables:
        gcloud = folder / "bin" / "gcloud"
        gcloud.parent.mkdir()
        script = GCLOUD.format(python=sys.executable, server=server, records=str(records))
        gcloud.write_text(script)
        gcloud.chmod(0o755)
        for name, value in {
            **variables, "PATH": f"{gcloud.parent}{os.pathsep}{os.environ['PATH']}",
            "GOOGLE_BACKEND_STORAGE_CUSTOM_ENDPOINT": f"{server}/storage/v1/",
            "STORAGE_EMULATOR_HOST": server, "GOOGLE_OAUTH_ACCESS_TOKEN": "test",
        }.items():  # fmt: skip
            monkeypatch.setenv(name, value)
        document = {**SMALLEST, "deletion_protection": False}
        (folder / "cluster.yaml").write_text(yaml.safe_dump(document))
        # A plan of a new environment creates nothing, not even the bucket.
        assert "create GKE cluster ml-cluster" in tpu("cluster", "plan").output
        assert not records.exists()
        tpu("cluster", "apply", "--yes")
        bucket = f"{server}/storage/v1/b/my-project-ml-automation/o"
        listed = json.load(urllib.request.urlopen(bucket))["items"]
        assert {item["name"] for item in listed} == {
            f"tfstate/{stage}/default.tfstate" for stage in StageName
        }
        assert tpu("cluster", "plan").output.startswith("no changes\n")
        tracked = {path.name for path in folder.rglob("*") if path.is_file()}
        assert not [name for name in tracked if name == "terraform.tfstate.backup"]
        before = cloud.records()
        vms = Path(f"{records}.vms")
        cpu, slice_of_job = vm("default", "n2-standard-4"), vm("train-0", "ct5lp-hightpu-4t")
        vms.write_text(json.dumps([cpu, slice_of_job]))
        with pytest.raises(LiveSlices, match=r"live in ml-cluster; .*\n.* train-0, nodes: 1"):
            tpu("cluster", "destroy", "--bootstrap", "--yes")
        assert cloud.records() == before
        vms.write_text(json.dumps([cpu]))
        tpu("cluster", "destroy", "--bootstrap", "--yes")
        assert cloud.records() == {}


def vm(node_pool: str, machine_type: str) -> dict:
    """As Compute Engine lists those of GKE."""
    url = "https://www.googleapis.com/compute/v1/projects/my-project/zones/us-central1-a"
    labels = {"goog-k8s-cluster-name": "ml-cluster", "goog-k8s-node-pool-name": node_pool}
    return {"machineType": f"{url}/machineTypes/{machine_type}", "labels": labels}


@pytest.mark.slow
def test_after_ctrl_c_the_same_command_continues(folder):
    (folder / "cluster.yaml").write_text(EXAMPLE.read_text())
    command = [sys.executable, "-m", "tpufleet", "cluster", "apply", "--rehearse", "--yes"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        assert process.stderr is not None
        for line in process.stderr:
            if line.startswith("1-infrastructure: 3/"):
                os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        process.wait(900)
    assert process.returncode in (0, 130)
    tpu("cluster", "apply", "--rehearse", "--yes")
    assert tpu("cluster", "plan", "--rehearse").output.startswith("no changes\n")


def test_nothing_of_a_rehearsal_is_written_beside_the_file(folder):
    (folder / "cluster.yaml").write_text(EXAMPLE.read_text())
    tpu("cluster", "plan", "--rehearse")
    assert {path.name for path in folder.iterdir()} == {"cluster.yaml", ".rehearsal"}


def test_a_former_file_is_not_overwritten(folder):
    tpu("cluster", "init", "--project", "my-project", "--zone", "us-central1-a")
    with pytest.raises(Conflict, match=r"cluster\.yaml exists"):
        tpu("cluster", "init", "--project", "my-project", "--zone", "us-central1-a")


def test_what_is_rendered_is_valid(folder):
    (folder / "cluster.yaml").write_text(EXAMPLE.read_text())
    files = json.loads(tpu("cluster", "render", "--folder", "out", "--json").stdout)["files"]
    assert "out/settings.env" in files
    assert {"out/helm/tpufleet/Chart.yaml", "out/helm/tpufleet/values.yaml"} <= set(files)
    for name in files:
        if "/templates/" in name:
            continue
        assert list(yaml.safe_load_all((folder / name).read_text())), name
    kubectl = pytest.importorskip("tests.k8s.test_manifests").kubectl()
    done = subprocess.run([*kubectl, "kustomize", "out/k8s"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_without_terraform_the_message_says_how_to_get_it(folder, monkeypatch):
    (folder / "cluster.yaml").write_text(EXAMPLE.read_text())
    monkeypatch.delenv("TPUFLEET_TERRAFORM")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BadInput, match="next: install OpenTofu"):
        tpu("cluster", "plan", "--rehearse")


def test_without_a_file_the_message_says_how_to_write_one(folder):
    with pytest.raises(BadInput, match="`tpu cluster init"):
        tpu("cluster", "plan", "--rehearse")
