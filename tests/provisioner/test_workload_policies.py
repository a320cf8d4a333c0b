"""Workload policies for tpu7x, against a server that speaks Compute Engine's API."""

from __future__ import annotations

import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

pytest.importorskip("google.auth", reason="needs the extra `gke`")

import requests

from tpufleet.errors import BadInput, BadRequest, PermissionMissing, ProviderUnavailable
from tpufleet.provisioner.gke_api import pool_shapes, workload_policies

PAGE = 40


class Compute:
    """The resource policies of one region, at the wire."""

    def __init__(self) -> None:
        self.policies: dict[str, dict] = {}
        self.operations: dict[str, list[dict]] = {}  # answers to come, the last for ever
        self.refusals: list[tuple[int, str]] = []  # for the next calls
        self.failing: dict[str, str] = {}  # policies whose operation fails
        self.calls: list[str] = []
        compute = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(*compute.get(self.path))

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self._answer(*compute.post(self.path, json.loads(body)))

            def _answer(self, status: int, said: dict) -> None:
                body = json.dumps(said).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}/compute/v1"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def refused(self, path: str) -> tuple[int, dict] | None:
        self.calls.append(path)
        assert path.startswith("/compute/v1/projects/p/regions/us-central1/")
        if not self.refusals:
            return None
        status, words = self.refusals.pop(0)
        return status, {"error": {"code": status, "message": words}}

    def get(self, path: str) -> tuple[int, dict]:
        if refused := self.refused(path):
            return refused
        if match := re.search(r"/operations/([^/?]+)$", path):
            answers = self.operations[match[1]]
            return 200, answers.pop(0) if len(answers) > 1 else answers[0]
        start = int(match[1]) if (match := re.search(r"pageToken=(\d+)", path)) else 0
        items = list(self.policies.values())
        said = {"items": items[start : start + PAGE]} if items else {}
        if start + PAGE < len(items):
            said["nextPageToken"] = str(start + PAGE)
        return 200, said

    def post(self, path: str, policy: dict) -> tuple[int, dict]:
        if refused := self.refused(path):
            return refused
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
    made = Compute()
    yield made
    made.close()


def ensured(compute: Compute) -> dict[str, str]:
    client = workload_policies.ResourcePolicies(
        requests.Session(), "p", "us-central1", compute.endpoint, sleep=lambda _: None
    )
    return workload_policies.ensure_policies(client, sleep=lambda _: None)


def test_every_topology_of_tpu7x_gets_a_policy_under_the_name_that_its_pools_ask_for(compute):
    assert set(ensured(compute).values()) == {"made"}
    assert len(compute.policies) == 98
    made = compute.policies["tpu-provisioner-4x4x8"]
    assert made["workloadPolicy"] == {
        "type": "HIGH_THROUGHPUT", "acceleratorTopology": "4x4x8",
    }  # fmt: skip
    asked = pool_shapes.find_shape("tpu7x", "4x4x8", 4).placement
    assert asked == {"policyName": made["name"]}


def test_making_them_again_makes_only_what_is_missing_on_whatever_page_the_others_are(compute):
    ensured(compute)
    del compute.policies["tpu-provisioner-2x2x2"]
    compute.calls.clear()
    outcome = ensured(compute)
    assert [name for name, said in outcome.items() if said == "made"] == ["tpu-provisioner-2x2x2"]
    assert len([call for call in compute.calls if call.endswith("/resourcePolicies")]) == 2
    assert len(compute.policies) == 98


def test_one_that_somebody_else_made_meanwhile_is_there(compute):
    policy = workload_policies.required_policies()["4x4x4"]
    client = workload_policies.ResourcePolicies(
        requests.Session(), "p", "us-central1", compute.endpoint
    )
    assert client.create(policy) is not None
    assert client.create(policy) is None


def test_what_passes_is_tried_again(compute):
    compute.refusals = [(429, "slow down"), (503, "not now"), (429, "slow down")]
    assert len(ensured(compute)) == 98


def test_an_operation_that_fails_is_told_with_its_words(compute):
    compute.failing = {"tpu-provisioner-2x2x4": "quota of policies used up"}
    outcome = ensured(compute)
    assert outcome["tpu-provisioner-2x2x4"] == "quota of policies used up"
    assert sum(said == "made" for said in outcome.values()) == 97


@pytest.mark.parametrize(
    ("status", "error"),
    [(403, PermissionMissing), (400, BadRequest), (503, ProviderUnavailable)],
    ids=["no permission", "bad request", "down for good"],
)
def test_what_does_not_pass_is_one_of_our_errors(compute, status, error):
    compute.refusals = [(status, "no")] * 10
    with pytest.raises(error, match="no"):
        ensured(compute)


def test_from_the_command_line(compute, capsys):
    environ = {"GCP_PROJECT_ID": "p"}
    assert (
        workload_policies.run(environ, "us-central1", dry_run=True, endpoint=compute.endpoint) == 0
    )
    assert "98 would be made" in capsys.readouterr().out and not compute.policies
    compute.failing = {"tpu-provisioner-2x2x4": "no luck"}
    assert workload_policies.run(environ, "us-central1", endpoint=compute.endpoint) == 1
    said = capsys.readouterr().out
    assert "97 policies made, 0 were there" in said and "no luck" in said
    for bad in ({}, "us-central1"), (environ, "us-central1-a"):
        with pytest.raises(BadInput):
            workload_policies.run(*bad, endpoint=compute.endpoint)
