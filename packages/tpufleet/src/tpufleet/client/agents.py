"""Client of the agent API: token exchange, heartbeats, logs, command results, snapshots.

Translates errors of httpx and of the server into ours.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote

import httpx
import msgspec

from tpufleet import errors
from tpufleet.client import tls
from tpufleet.model.fleet.agent_protocol import (
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.fleet.host_commands import HostCommandResult
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.values import encoding

T = TypeVar("T")

# After this a new heartbeat is worth more than the one that hangs.
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
LOG_TIMEOUT = httpx.Timeout(15.0, connect=3.0)
SNAPSHOT_TIMEOUT = httpx.Timeout(15.0, connect=3.0)  # between two chunks
# Kept from one heartbeat to the next, which saves both sides a TLS handshake; for less time than
# the server keeps it, so that no heartbeat is sent into a connection that is closing.
CONNECTIONS = httpx.Limits(max_keepalive_connections=1, keepalive_expiry=60.0)

_RETRYABLE = frozenset({408, 425, 429})
_PERMANENT: dict[int, type[errors.FleetError]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
}


class UnreadableHeartbeat(errors.BadInput):
    """The server knows this host and counts it as alive, but cannot read its report."""


class _LogSize(msgspec.Struct):
    size: int


class AgentClient:
    """Thread-safe."""

    # False after a call without response, or when the server cannot take heartbeats, until one is
    # answered.
    reachable = True

    def __init__(
        self,
        server: str,
        token: str,
        ca_file: Path | None = None,
        *,
        ca_certificates: str = "",
        proxy: str | None = None,
    ) -> None:
        self._server = server.rstrip("/")
        self._http = httpx.Client(
            base_url=server.rstrip("/") + "/api/v1/agent",
            headers={"Authorization": f"Bearer {token}"},
            verify=tls.verification(server, ca_file, ca_certificates),
            proxy=proxy,
            limits=CONNECTIONS,
            trust_env=False,  # a netrc of the machine must never replace the token
        )

    def close(self) -> None:
        self._http.close()

    def register(self, host: HostId, nonce: str) -> str:
        """The slice token, in exchange for the bootstrap token of this client."""
        request = encoding.to_json(SliceTokenRequest(host_id=host, nonce=nonce))
        response = self._post("/register", request, timeout=HEARTBEAT_TIMEOUT)
        _check(response)
        return _decoded(response, SliceTokenReply).token

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Raises UnreadableHeartbeat when the server knows this host and cannot read the report."""
        content = encoding.to_json(heartbeat)
        response = self._post("/heartbeat", content, timeout=HEARTBEAT_TIMEOUT)
        self.reachable = response.status_code < 500 and not _is_foreign(response)
        kind, message = _error(response)
        if response.status_code == 400 and kind == "BadInput":
            raise UnreadableHeartbeat(message)
        _check(response)
        return _decoded(response, HeartbeatReply)

    def send_log(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Upload bytes of the log from `offset`; returns how many bytes the server has now."""
        response = self._post("/logs", data, attempt=attempt, host=host, offset=offset)
        if response.status_code != 409:  # 409: a gap; `size` is where to continue
            _check(response)
        return _decoded(response, _LogSize).size

    def send_command_result(self, command_id: str, result: HostCommandResult) -> None:
        path = f"/commands/{quote(command_id, safe='')}"
        _check(self._post(path, encoding.to_json(result)))

    def send_command_file(self, command_id: str, host: HostId, offset: int, data: bytes) -> None:
        """Upload a part of the file that belongs to the result of a host command."""
        path = f"/commands/{quote(command_id, safe='')}/file"
        _check(self._post(path, data, host=host, offset=offset))

    def send_result(self, attempt: AttemptId, host: HostId, data: bytes) -> None:
        """Upload the job's result; the first one wins."""
        _check(self._post("/results", data, attempt=attempt, host=host))

    def _post(
        self,
        path: str,
        content: bytes,
        *,
        timeout: httpx.Timeout = LOG_TIMEOUT,
        **params: str | int,
    ) -> httpx.Response:
        with self._translate_errors():
            return self._http.post(path, params=params, content=content, timeout=timeout)

    def snapshot(self, digest: str) -> Iterator[bytes]:
        """Download the archive in chunks."""
        path = f"/snapshots/{quote(digest, safe='')}"
        with (
            self._translate_errors(),
            self._http.stream("GET", path, timeout=SNAPSHOT_TIMEOUT) as response,
        ):
            if not response.is_success:
                response.read()
            _check(response)
            # Raw: gzip is the format of the file here, not a content encoding.
            yield from response.iter_raw()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.DecodingError) as error:
            self.reachable = False
            cause = str(error) or type(error).__name__
            kind = errors.UntrustedCertificate if tls.is_untrusted(error) else errors.Unreachable
            raise kind(f"cannot reach the server at {self._server}: {cause}") from error


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if response.is_success:
        return
    path = response.request.url.path
    if _is_foreign(response):
        url = response.request.url
        answer = " ".join(response.text[:200].split())
        raise errors.Unreachable(
            f"{url.scheme}://{url.netloc.decode()} answered {status} for {path}, but is not a "
            f"tpufleet server: a proxy, a load balancer or another program; check `public_url`: "
            f"{answer}"
        )
    message = f"the server returned {status} for {path}: {_error(response)[1]}"
    if status >= 500 or status in _RETRYABLE:
        raise errors.Unreachable(message)
    raise _PERMANENT.get(status, errors.BadInput)(message)


def _is_foreign(response: httpx.Response) -> bool:
    """Whether an error is not from our server, whose errors all have a kind."""
    return not response.is_success and _error(response)[0] is None


def _error(response: httpx.Response) -> tuple[str | None, str]:
    """The kind and the message of an error of our server."""
    if response.is_success:
        return None, ""
    try:
        error = response.json()["error"]
        return str(error["kind"]), str(error["message"])
    except (ValueError, KeyError, TypeError):
        return None, response.text[:200]


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return encoding.from_json(response.content, kind)
    except errors.BadInput as error:
        # Not from our server: a proxy, or a server that is starting. Retry.
        raise errors.Unreachable(f"invalid response from the server: {error}") from error
