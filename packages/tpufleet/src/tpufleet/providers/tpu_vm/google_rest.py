"""REST calls to Google Cloud APIs without a client library here: IAM, quota, networks, buckets,
VMs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import msgspec

from tpufleet.errors import PermissionMissing, ProviderError, ProviderUnavailable

TIMEOUT = 10.0
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
# APIs whose quota belongs to the caller's project, not to that of the resource
# (cloud.google.com/docs/quotas/quota-project).
CLIENT_BASED = frozenset({"projects", "services", "iam", "quotas"})
HOSTS = {
    "projects": "https://cloudresourcemanager.googleapis.com",
    "services": "https://serviceusage.googleapis.com",
    "iam": "https://iam.googleapis.com",
    "quotas": "https://cloudquotas.googleapis.com",
    "compute": "https://compute.googleapis.com",
    "container": "https://container.googleapis.com",
    "storage": "https://storage.googleapis.com",
    "tpu": "https://tpu.googleapis.com",
}


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        error = self.body.get("error")
        return str(error.get("message", "")) if isinstance(error, dict) else ""

    @property
    def disabled_service(self) -> str:
        """The API that is not enabled in the project, if that is the error. Google's message links
        to the page that enables it."""
        found = re.search(r"apis/api/([a-z.]+\.googleapis\.com)/", self.message)
        return found[1] if self.status == 403 and found else ""

    @property
    def missing(self) -> bool:
        return self.status == 404


class GoogleRest:
    """With `root`, the APIs of an emulator, without credentials. `project` pays for requests of a
    person whose credentials name no project."""

    def __init__(self, root: str = "", project: str = "") -> None:
        self._root = root
        self._project = project
        self._billed = ""  # for quota of APIs that need a project
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
            raise _of_credentials(error) from error
        email = getattr(credentials, "service_account_email", "")
        # Credentials that an older gcloud wrote do not name the person; gcloud itself does.
        person = getattr(credentials, "account", "") or "$(gcloud config get account)"
        self.principal = f"serviceAccount:{email}" if email else f"user:{person}"
        if not email and getattr(credentials, "quota_project_id", None) is None:
            self._billed = self._project
        self._session = AuthorizedSession(credentials)

    def get(self, api: str, path: str, **query: str) -> Answer:
        return self._call("GET", api, path, query, None)

    def post(self, api: str, path: str, body: dict[str, Any] | None = None, **query: str) -> Answer:
        """Without a body for methods that take none."""
        return self._call("POST", api, path, query, body)

    def patch(self, api: str, path: str, body: dict[str, Any]) -> Answer:
        return self._call("PATCH", api, path, {}, body)

    def pages(self, api: str, path: str, **query: str) -> Iterator[Answer]:
        """Of a listing; the last one may be an error."""
        token = ""
        while True:
            answer = self._call(
                "GET", api, path, {**query, "pageToken": token} if token else query, None
            )
            yield answer
            token = str(answer.body.get("nextPageToken", ""))
            if not token:
                return

    def delete(self, api: str, path: str, **query: str) -> Answer:
        return self._call("DELETE", api, path, query, None)

    def _headers(self, api: str) -> dict[str, str]:
        headers = {"Content-Type": "application/json"}
        if self._billed and api in CLIENT_BASED:
            headers["x-goog-user-project"] = self._billed
        return headers

    def _call(self, method: str, api: str, path: str, query: dict[str, Any], body: Any) -> Answer:
        import requests
        from google.auth import exceptions as auth

        self.connect()
        base = f"{self._root}/{api}" if self._root else HOSTS[api]
        url = f"{base}/{quote(path, safe='/:%')}"
        try:
            response = self._session.request(
                method, url, params=query, timeout=TIMEOUT,
                data=None if body is None else json.dumps(body),
                headers=self._headers(api),
            )  # fmt: skip
        except requests.RequestException as error:
            raise ProviderUnavailable(f"{url}: {error}") from error
        except auth.GoogleAuthError as error:  # when the token of the session is renewed
            raise _of_credentials(error) from error
        try:
            content = response.json()
        except ValueError:
            content = {}
        found = content if isinstance(content, dict) else {}
        return Answer(status=response.status_code, body=found)


def _of_credentials(error: Exception) -> ProviderError:
    message = str(error.args[0] if error.args else error)
    again = getattr(error, "retryable", False) or type(error).__name__ == "TransportError"
    return ProviderUnavailable(message) if again else PermissionMissing(message)
