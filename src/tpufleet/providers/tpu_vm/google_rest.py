"""REST calls to Google Cloud APIs without a client library here: IAM, quota, networks, buckets,
VMs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from tpufleet.errors import PermissionMissing, ProviderUnavailable

TIMEOUT = 10.0
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
HOSTS = {
    "projects": "https://cloudresourcemanager.googleapis.com",
    "services": "https://serviceusage.googleapis.com",
    "iam": "https://iam.googleapis.com",
    "quotas": "https://cloudquotas.googleapis.com",
    "compute": "https://compute.googleapis.com",
    "storage": "https://storage.googleapis.com",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else ""

    @property
    def missing(self) -> bool:
        return self.status == 404


class GoogleRest:
    """With `root`, the APIs of an emulator, without credentials."""

    def __init__(self, root: str = "") -> None:
        self._root = root
        self._session: Any = None
        self.principal = ""  # member of an IAM policy; known once connected

    def connect(self) -> None:
        """PermissionMissing without credentials."""
        if self._session is not None:
            return
        import requests
        from google.auth import default
        from google.auth import exceptions as auth
        from google.auth.transport.requests import AuthorizedSession, Request

        if self._root:
            self._session, self.principal = requests.Session(), "user:you@example.com"
            return
        try:
            credentials, _ = default(scopes=[SCOPE])
            credentials.refresh(Request())
        except auth.GoogleAuthError as error:
            raise PermissionMissing(str(error)) from error
        email = getattr(credentials, "service_account_email", "")
        # The credentials of a person do not name them; gcloud does.
        self.principal = f"serviceAccount:{email}" if email else "user:$(gcloud config get account)"
        self._session = AuthorizedSession(credentials)

    def get(self, api: str, path: str, **query: str) -> Answer:
        return self._call("GET", api, path, query, None)

    def post(self, api: str, path: str, body: dict[str, Any]) -> Answer:
        return self._call("POST", api, path, {}, body)

    def delete(self, api: str, path: str) -> Answer:
        return self._call("DELETE", api, path, {}, None)

    def _call(self, method: str, api: str, path: str, query: dict[str, Any], body: Any) -> Answer:
        import requests

        self.connect()
        base = f"{self._root}/{api}" if self._root else HOSTS[api]
        url = f"{base}/{quote(path, safe='/:%')}"
        try:
            response = self._session.request(
                method, url, params=query, timeout=TIMEOUT,
                data=None if body is None else json.dumps(body),
                headers={"Content-Type": "application/json"},
            )  # fmt: skip
        except requests.RequestException as error:
            raise ProviderUnavailable(f"{url}: {error}") from error
        try:
            content = response.json()
        except ValueError:
            content = {}
        found = content if isinstance(content, dict) else {}
        return Answer(status=response.status_code, body=found)
