"""Workload policies for tpu7x, against a fake of the Compute Engine API."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("google.auth", reason="needs the extra `gke`")

from tpufleet.errors import BadInput, BadRequest, PermissionMissing, ProviderUnavailable
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet_gke.environment.terraform import cluster_config
from tpufleet_gke.provisioner.gke import workload_policies
from tpufleet_gke.provisioner.model import pool_shapes

PAGE = 40
LIST, CREATE = "compute.resourcePolicies.list", "compute.resourcePolicies.create"
OPERATION = "compute.regionOperations.get"


class FakeComputeEngine:
    """The resource policies of one region, over HTTP."""

    def __init__(self) -> None:
        self.policies: dict[str, dict] = {}
        self.operations: dict[str, list[dict]] = {}  # responses; the last one repeats
        self.errors: list[tuple[int, str]] = []  # for the next calls
        # https://docs.cloud.google.com/compute/docs/reference/rest/v1: one for each method
        self.permissions = {LIST, CREATE, OPERATION}
        self.failing: dict[str, str] = {}  # by policy: error of its operation
        self.calls: list[str] = []
        compute = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._respond(*compute.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._respond(*compute.post(self.path, json.loads(body)))

            def _respond(self, status: int, payload: dict) -> None:
                body = json.dumps(payload).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def next_error(self, path: str, permission: str) -> tuple[int, dict] | None:
        self.calls.append(path)
        assert path.startswith("/compute/compute/v1/projects/p/regions/us-central1/")
        if permission not in self.permissions:
            message = f"Required '{permission}' permission for 'projects/p'"
            return 403, {"error": {"code": 403, "message": message}}
        if not self.errors:
            return None
        status, message = self.errors.pop(0)
        return status, {"error": {"code": status, "message": message}}

    def get(self, path: str) -> tuple[int, dict]:
        if error := self.next_error(path, OPERATION if "/operations/" in path else LIST):
            return error
        if match := re.search(r"/operations/([^/?]+)$", path):
            responses = self.operations[match[1]]
            return 200, responses.pop(0) if len(responses) > 1 else responses[0]
        start = int(match[1]) if (match := re.search(r"pageToken=(\d+)", path)) else 0
        items = list(self.policies.values())
        response = {"items": items[start : start + PAGE]} if items else {}
        if start + PAGE < len(items):
            response["nextPageToken"] = str(start + PAGE)
        return 200, response

    def post(self, path: str, policy: dict) -> tuple[int, dict]:
        if error := self.next_error(path, CREATE):
            return error
        name = policy["name"]
        if name in self.policies:
            return 409, {"error": {"code": 409, "message": f"{name} already exists"}}
        operation = f"operation-{name}"
        done = {"name": operation, "status": "DONE"}
        if name in self.failing:
            done["error"] = {"errors": [{"code": "X", "message": self.failing[name]}]}
        else:
            self.policies[name] = policy
        self.operations[operation] = [{"name": operation, "status": "RUNNING"}, done]
        return 200, {"name": operation, "status": "PENDING"}


@pytest.fixture
def compute():
    server = FakeComputeEngine()
    yield server
    server.close()


def client(compute: FakeComputeEngine) -> workload_policies.ResourcePolicies:
    google = GoogleRest(compute.endpoint, "p")
    return workload_policies.ResourcePolicies(google, "p", "us-central1", sleep=lambda _: None)


def ensure(compute: FakeComputeEngine) -> workload_policies.CreatedPolicies:
    return workload_policies.create_missing(client(compute), sleep=lambda _: None)


def test_every_tpu7x_topology_gets_the_policy_that_its_pools_name(compute):
    result = ensure(compute)
    assert (len(result.created), result.failed) == (98, {})
    assert len(compute.policies) == 98
    policy = compute.policies["tpu-provisioner-4x4x8"]
    assert policy["workloadPolicy"] == {
        "type": "HIGH_THROUGHPUT",
        "acceleratorTopology": "4x4x8",
    }
    placement = pool_shapes.find_shape("tpu7x", "4x4x8", 4).placement
    assert placement == {"policyName": policy["name"]}


def test_only_missing_policies_are_created_across_pages_of_existing_ones(compute):
    ensure(compute)
    del compute.policies["tpu-provisioner-2x2x2"]
    compute.calls.clear()
    assert ensure(compute).created == ("tpu-provisioner-2x2x2",)
    assert len([call for call in compute.calls if call.endswith("/resourcePolicies")]) == 2
    assert len(compute.policies) == 98


def test_creating_an_existing_policy_succeeds(compute):
    policies = client(compute)
    assert policies.create("tpu-provisioner-4x4x4") is not None
    assert policies.create("tpu-provisioner-4x4x4") is None


def test_transient_errors_are_retried(compute):
    compute.errors = [(429, "slow down"), (503, "not now"), (429, "slow down")]
    assert len(ensure(compute).created) == 98


def test_a_failed_operation_is_reported_with_its_message(compute):
    compute.failing = {"tpu-provisioner-2x2x4": "quota of policies used up"}
    result = ensure(compute)
    assert result.failed == {"tpu-provisioner-2x2x4": "quota of policies used up"}
    assert len(result.created) == 97


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, PermissionMissing), (400, BadRequest), (503, ProviderUnavailable)],
    ids=["no permission", "bad request", "unavailable"],
)
def test_permanent_errors_are_translated(compute, status, error):
    compute.errors = [(status, "no")] * 10
    with pytest.raises(error, match="no"):
        ensure(compute)


@pytest.mark.parametrize("permission", [LIST, CREATE, OPERATION])
def test_the_missing_permission_is_named(compute, permission):
    compute.permissions.remove(permission)
    with pytest.raises(PermissionMissing, match=f"; grant {permission}$"):
        ensure(compute)


def test_the_role_of_the_provisioner_is_enough(compute):
    compute.permissions = set(cluster_config.PROVISIONER_PERMISSIONS)
    assert len(ensure(compute).created) == 98


def test_the_command(compute, capsys):
    environ = {"GCP_PROJECT_ID": "p"}
    assert workload_policies.run(environ, "us-central1", dry_run=True, root=compute.endpoint) == 0
    assert "would create 98 policies" in capsys.readouterr().out and not compute.policies
    compute.failing = {"tpu-provisioner-2x2x4": "no luck"}
    assert workload_policies.run(environ, "us-central1", root=compute.endpoint) == 1
    output = capsys.readouterr().out
    assert "97 policies created" in output and "1 failed" in output and "no luck" in output
    for bad in ({}, "us-central1"), (environ, "us-central1-a"):
        with pytest.raises(BadInput):
            workload_policies.run(*bad, root=compute.endpoint)
