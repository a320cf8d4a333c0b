"""Requests to Google Cloud APIs with the credentials of a person or of a service account, through
Google's own client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("google.auth", reason="pip install 'tpufleet[tpu-vm]'")

from tests.providers.tpu_vm.googleapis import GoogleApis
from tpufleet.errors import PermissionMissing
from tpufleet.providers.tpu_vm.google_rest import CLIENT_BASED, HOSTS, GoogleRest
from tpufleet.providers.tpu_vm.preflight import Preflight, PreflightInput
from tpufleet.providers.tpu_vm.settings import TpuVmSettings

PERSON = {
    "type": "authorized_user", "client_id": "c", "client_secret": "s", "refresh_token": "r",
}  # fmt: skip
QUOTA_HEADER = "x-goog-user-project"


@pytest.fixture
def apis(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleApis]:
    served = GoogleApis(tmp_path)
    for name, value in served.environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("GOOGLE_CLOUD_QUOTA_PROJECT", raising=False)
    yield served
    served.close()


@pytest.fixture
def log_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Application default credentials, as gcloud or a key file leaves them."""

    def write(**info: str) -> None:
        file = tmp_path / "credentials.json"
        file.write_text(json.dumps(info))
        monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(file))

    return write


def service_account(folder: Path) -> dict[str, str]:
    key = folder / "account.key"
    subprocess.run(["openssl", "genrsa", "-out", str(key), "2048"], check=True, capture_output=True)
    return {
        "type": "service_account", "client_email": "fleet@my-project.iam.gserviceaccount.com",
        "private_key": key.read_text(), "private_key_id": "1",
        "token_uri": "https://oauth2.googleapis.com/token",
    }  # fmt: skip


def quota_projects(apis: GoogleApis) -> dict[str, str]:
    """The project that pays for the requests to each API."""
    rest = GoogleRest(project="my-project")
    for api in HOSTS:
        rest.get(api, "v1/projects/my-project")
    return {each.api: each.headers.get(QUOTA_HEADER, "") for each in apis.requests}


def test_the_project_pays_for_a_person_whose_credentials_name_none(apis, log_in):
    log_in(**PERSON)
    expected = {api: "my-project" if api in CLIENT_BASED else "" for api in HOSTS}
    assert quota_projects(apis) == expected


def test_a_quota_project_in_the_credentials_is_kept(apis, log_in):
    log_in(**PERSON, quota_project_id="paying-project")
    assert set(quota_projects(apis).values()) == {"paying-project"}


def test_a_service_account_pays_by_its_own_project(apis, log_in, tmp_path):
    log_in(**service_account(tmp_path))
    assert set(quota_projects(apis).values()) == {""}


@pytest.mark.parametrize(
    ("info", "principal"),
    [
        (PERSON, "user:$(gcloud config get account)"),
        ({**PERSON, "account": "you@example.com"}, "user:you@example.com"),
    ],
    ids=["without a name", "with the name that gcloud writes"],
)
def test_the_principal_of_a_person(apis, log_in, info, principal):
    log_in(**info)
    rest = GoogleRest(project="my-project")
    rest.connect()
    assert rest.principal == principal


def test_expired_credentials_are_named_with_the_command_that_renews_them(apis, log_in):
    log_in(**PERSON)
    apis.token_error = "invalid_grant"
    with pytest.raises(PermissionMissing, match="invalid_grant"):
        GoogleRest(project="my-project").connect()
    settings = TpuVmSettings(project="my-project", zones=("us-central1-a",))
    rest = GoogleRest(project="my-project")
    [first, *_] = Preflight(PreflightInput(settings=settings), rest).run()
    assert (first.name, first.fix) == ("credentials", "gcloud auth application-default login")
    assert first.message == "invalid_grant: Bad Request"


def test_the_checks_of_a_project_with_the_credentials_of_a_person(apis, log_in):
    log_in(**PERSON)
    settings = TpuVmSettings(project="my-project", zones=("us-central1-a",))
    rest = GoogleRest(project="my-project")
    checks = {each.name: each for each in Preflight(PreflightInput(settings=settings), rest).run()}
    assert {checks[name].status for name in ("credentials", "project", "Cloud TPU API")} == {"ok"}
    assert not [each for each in checks.values() if "cannot be checked" in each.message]
