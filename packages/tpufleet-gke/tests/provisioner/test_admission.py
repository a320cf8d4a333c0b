"""The admission webhook: the selectors it sets, and certificate reloading."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import ssl
import urllib.request
from urllib.error import HTTPError

import pytest

from tests.polling import wait_until
from tpufleet import web_server
from tpufleet_gke.provisioner.kube import admission
from tpufleet_gke.provisioner.kube.admission import AdmissionSettings
from tpufleet_gke.provisioner.kube.webhook_server import WebhookServer
from tpufleet_gke.provisioner.model import label_keys
from tpufleet_gke.provisioner.settings import from_variables
from tpufleet_testbed.kubernetes import certificates

KEY = {"job-key": hashlib.sha1(b"default/train-slice-0").hexdigest()}
BUSY = {
    label_keys.SPOT: "true",
    label_keys.RESERVATION: "r",
    label_keys.RESERVATION_PROJECT: "p",
    "abc": "xyz",
}


def review(node_selector=None, name="train-slice-0"):
    spec = {"nodeSelector": node_selector} if node_selector is not None else {}
    job = {
        "metadata": {"name": name} if name else {"generateName": "train-"},
        "spec": {"template": {"spec": spec}},
    }
    request = {"uid": "u1", "namespace": "default", "object": job}
    return {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}


def patched_selectors(review):
    (patch,) = json.loads(base64.b64decode(review["response"]["patch"]))
    assert (patch["op"], patch["path"]) == ("add", "/spec/template/spec/nodeSelector")
    return patch["value"]


CASES = [
    pytest.param(None, AdmissionSettings(), KEY, id="no selector yet"),
    pytest.param({"abc": "xyz"}, AdmissionSettings(), KEY | {"abc": "xyz"}, id="others stay"),
    pytest.param(BUSY, AdmissionSettings(), KEY | BUSY, id="spot and reservation stay"),
    pytest.param(
        BUSY, AdmissionSettings(force_on_demand=True), KEY | {"abc": "xyz"}, id="on-demand"
    ),
    pytest.param(
        {},
        AdmissionSettings(location_hint="cell"),
        KEY | {label_keys.LOCATION_HINT: "cell"},
        id="hint",
    ),
]


@pytest.mark.parametrize(("node_selector", "settings", "after"), CASES)
def test_a_job_gets_its_own_selector_and_loses_disallowed_ones(node_selector, settings, after):
    response = admission.review_response(review(node_selector), settings)
    assert response["response"]["uid"] == "u1" and response["response"]["allowed"] is True
    assert patched_selectors(response) == after


def test_a_job_with_its_key_is_not_patched():
    assert (
        "patch" not in admission.review_response(review(dict(KEY)), AdmissionSettings())["response"]
    )


def test_a_job_without_a_name_is_admitted_with_a_warning():
    response = admission.review_response(review({}, name=None), AdmissionSettings())["response"]
    assert response["allowed"] is True and "warnings" in response and "patch" not in response


def test_settings_use_upstreams_variable_names():
    environ = {"FORCE_ON_DEMAND": "true", "RESERVATION_LOCATION_HINT": "cell"}
    assert from_variables(AdmissionSettings, environ) == AdmissionSettings(
        force_on_demand=True, location_hint="cell"
    )
    assert from_variables(AdmissionSettings, {}) == AdmissionSettings()


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
    with opener.open(request, timeout=900) as answer:
        return json.loads(answer.read())


@needs_openssl
def test_new_certificates_are_used_without_a_restart(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(web_server, "CERTIFICATE_CHECK_SECONDS", 0.1)
    first = issue(tmp_path / "tls", "first")
    webhook = WebhookServer("127.0.0.1:0", tmp_path / "tls", AdmissionSettings()).start()
    try:
        body = json.dumps(review({})).encode()
        assert patched_selectors(post(webhook.port, first, body)) == KEY
        (tmp_path / "tls" / "tls.crt").write_text("half written")
        wait_until(lambda: "cannot read the renewed certificate" in caplog.text)
        assert patched_selectors(post(webhook.port, first, body)) == KEY
        second = issue(tmp_path / "tls", "second")
        renewed = (tmp_path / "tls" / "tls.crt").read_text()
        address = ("127.0.0.1", webhook.port)
        wait_until(lambda: ssl.get_server_certificate(address) == renewed)
        assert patched_selectors(post(webhook.port, second, body)) == KEY
    finally:
        webhook.close()


@needs_openssl
@pytest.mark.parametrize("body", [b"nonsense", b"{}", b"[]"])
def test_an_invalid_review_is_rejected_and_the_server_continues(tmp_path, body):
    trust = issue(tmp_path / "tls", "one")
    webhook = WebhookServer("127.0.0.1:0", tmp_path / "tls", AdmissionSettings()).start()
    try:
        with pytest.raises(HTTPError, match="400"):
            post(webhook.port, trust, body)
        assert post(webhook.port, trust, json.dumps(review({})).encode())["response"]["allowed"]
    finally:
        webhook.close()
