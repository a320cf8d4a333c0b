"""The admission webhook: what it changes, and that its certificates can be renewed."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import ssl
import urllib.request
from urllib.error import HTTPError

import pytest

from tpufleet.provisioner.kube import admission, label_keys
from tpufleet.provisioner.kube.admission import AdmissionSettings
from tpufleet.provisioner.kube.webhook_server import WebhookServer
from tpufleet.testbed.kubernetes import certificates

KEY = {"job-key": hashlib.sha1(b"default/train-slice-0").hexdigest()}
BUSY = {
    label_keys.SPOT: "true",
    label_keys.RESERVATION: "r",
    label_keys.RESERVATION_PROJECT: "p",
    "abc": "xyz",
}


def review(select=None, name="train-slice-0"):
    spec = {"nodeSelector": select} if select is not None else {}
    job = {"metadata": {"name": name} if name else {"generateName": "train-"},
           "spec": {"template": {"spec": spec}}}  # fmt: skip
    request = {"uid": "u1", "namespace": "default", "object": job}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def selectors(said):
    (patch,) = json.loads(base64.b64decode(said["response"]["patch"]))
    assert (patch["op"], patch["path"]) == ("add", "/spec/template/spec/nodeSelector")
    return patch["value"]


CASES = [
    pytest.param(None, AdmissionSettings(), KEY, id="no selector yet"),
    pytest.param({"abc": "xyz"}, AdmissionSettings(), KEY | {"abc": "xyz"}, id="others stay"),
    pytest.param(BUSY, AdmissionSettings(), KEY | BUSY, id="spot and reservation stay"),
    pytest.param(BUSY, AdmissionSettings(force_on_demand=True), KEY | {"abc": "xyz"}, id="on-demand"),
    pytest.param({}, AdmissionSettings(location_hint="cell"), KEY | {label_keys.LOCATION_HINT: "cell"},
                 id="hint"),
]  # fmt: skip


@pytest.mark.parametrize(("select", "given", "after"), CASES)
def test_a_job_gets_its_own_selector_and_loses_what_it_may_not_have(select, given, after):
    said = admission.review_response(review(select), given)
    assert said["response"]["uid"] == "u1" and said["response"]["allowed"] is True
    assert selectors(said) == after


def test_a_job_that_has_its_key_already_is_left_alone():
    assert (
        "patch" not in admission.review_response(review(dict(KEY)), AdmissionSettings())["response"]
    )


def test_a_job_whose_name_is_not_known_yet_is_admitted_with_a_warning():
    said = admission.review_response(review({}, name=None), AdmissionSettings())["response"]
    assert said["allowed"] is True and "warnings" in said and "patch" not in said


def test_settings_are_those_of_old():
    environ = {"FORCE_ON_DEMAND": "true", "RESERVATION_LOCATION_HINT": "cell"}
    assert admission.from_environ(environ) == AdmissionSettings(
        force_on_demand=True, location_hint="cell"
    )
    assert admission.from_environ({}) == AdmissionSettings()


needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="needs the program openssl; install it"
)


def issue(folder, name):
    folder.mkdir(exist_ok=True)
    certificates.create_authority(folder)
    certificates.issue_certificate(folder, "tls", f"/CN={name}", ["IP:127.0.0.1"])
    return ssl.create_default_context(cafile=str(folder / "ca.crt"))


def post(port, trust, body):
    request = urllib.request.Request(f"https://127.0.0.1:{port}/mutate", data=body)
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=trust)
    )
    with opener.open(request, timeout=10) as answer:
        return json.loads(answer.read())


@needs_openssl
def test_new_certificates_are_taken_without_a_restart(tmp_path):
    first = issue(tmp_path / "tls", "first")
    webhook = WebhookServer("127.0.0.1:0", tmp_path / "tls", AdmissionSettings()).start()
    try:
        body = json.dumps(review({})).encode()
        assert selectors(post(webhook.port, first, body)) == KEY
        assert webhook.reload() is False
        (tmp_path / "tls" / "tls.crt").write_text("half written")
        assert webhook.reload() is False
        assert selectors(post(webhook.port, first, body)) == KEY
        second = issue(tmp_path / "tls", "second")
        assert webhook.reload() is True
        assert selectors(post(webhook.port, second, body)) == KEY
    finally:
        webhook.close()


@needs_openssl
@pytest.mark.parametrize("body", [b"nonsense", b"{}", b"[]"])
def test_what_is_no_review_is_refused_and_the_server_goes_on(tmp_path, body):
    trust = issue(tmp_path / "tls", "one")
    webhook = WebhookServer("127.0.0.1:0", tmp_path / "tls", AdmissionSettings()).start()
    try:
        with pytest.raises(HTTPError, match="400"):
            post(webhook.port, trust, body)
        assert post(webhook.port, trust, json.dumps(review({})).encode())["response"]["allowed"]
    finally:
        webhook.close()
