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
    HOST_HEADER,
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
    read_reply,
)
from tpufleet.model.fleet.host_commands import HostCommandResult
from tpufleet.model.fleet.hosts import HostId
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.values import encoding

T = TypeVar("T")

MAX_LOG_CHUNK = 256 * 1024

# After this a new heartbeat is worth more than the one that hangs.
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
LOG_TIMEOUT = httpx.Timeout(15.0, connect=3.0)
SNAPSHOT_TIMEOUT = httpx.Timeout(15.0, connect=3.0)  # between two chunks
# Kept from one heartbeat to the next, which saves both sides a TLS handshake. In a large fleet the
# interval is longer than httpx keeps connections by default.
CONNECTIONS = httpx.Limits(max_keepalive_connections=1, keepalive_expiry=300.0)

_RETRYABLE = frozenset({408, 425, 429})
_PERMANENT: dict[int, type[errors.FleetError]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
}


class UnreadableHeartbeat(errors.BadInput):
    """The control plane knows this host and counts it as alive, but cannot read its report."""


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

    def exchange_bootstrap_token(self, host: HostId, nonce: str) -> str:
        """The slice token, in exchange for the bootstrap token of this client."""
        with self._translate_errors():
            response = self._http.post(
                "/enter",
                content=encoding.to_json(SliceTokenRequest(host_id=host, nonce=nonce)),
                headers={"Content-Type": "application/json"},
                timeout=HEARTBEAT_TIMEOUT,
            )
        _check(response)
        return _decoded(response, SliceTokenReply).token

    def send_heartbeat(self, heartbeat: Heartbeat) -> HeartbeatReply:
        """Raises UnreadableHeartbeat when the server knows this host and cannot read the report."""
        with self._translate_errors():
            response = self._http.post(
                "/beat",
                content=encoding.to_json(heartbeat),
                headers={"Content-Type": "application/json", HOST_HEADER: heartbeat.host_id},
                timeout=HEARTBEAT_TIMEOUT,
            )
        self.reachable = response.status_code < 500 and not _is_foreign(response)
        if response.status_code == 400 and _error_kind(response) == "BadInput":
            raise UnreadableHeartbeat(_error_message(response))
        _check(response)
        try:
            return read_reply(response.content)
        except errors.BadInput as error:
            raise errors.Unreachable(f"invalid response from the control plane: {error}") from error

    def send_log(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Upload bytes of the log from `offset`; returns how many bytes the server has now."""
        with self._translate_errors():
            response = self._http.post(
                "/logs",
                params={"attempt": attempt, "host": host, "offset": offset},
                content=data,
                headers={"Content-Type": "application/octet-stream"},
                timeout=LOG_TIMEOUT,
            )
        if response.status_code != 409:  # 409: a gap; `size` is where to continue
            _check(response)
        return _decoded(response, _LogSize).size

    def send_command_result(self, command_id: str, result: HostCommandResult) -> None:
        with self._translate_errors():
            response = self._http.post(
                f"/errands/{quote(command_id, safe='')}",
                content=encoding.to_json(result),
                headers={"Content-Type": "application/json"},
                timeout=LOG_TIMEOUT,
            )
        _check(response)

    def send_command_file(self, command_id: str, host: HostId, offset: int, data: bytes) -> None:
        """Upload a part of the file that belongs to the result of a host command."""
        with self._translate_errors():
            response = self._http.post(
                f"/errands/{quote(command_id, safe='')}/file",
                params={"host": host, "offset": offset},
                content=data,
                headers={"Content-Type": "application/octet-stream"},
                timeout=LOG_TIMEOUT,
            )
        _check(response)

    def send_result(self, attempt: AttemptId, host: HostId, data: bytes) -> None:
        """Upload the job's result; the first one wins."""
        with self._translate_errors():
            response = self._http.post(
                "/results",
                params={"attempt": attempt, "host": host},
                content=data,
                headers={"Content-Type": "application/octet-stream"},
                timeout=LOG_TIMEOUT,
            )
        _check(response)

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
            raise kind(f"cannot reach the control plane at {self._server}: {cause}") from error


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if response.is_success:
        return
    path = response.request.url.path
    if _is_foreign(response):
        url = response.request.url
        answer = " ".join(response.text[:200].split())
        raise errors.Unreachable(
            f"{url.scheme}://{url.netloc.decode()} answered {status} for {path}, but no control "
            f"plane did: a proxy, a load balancer or another server; check `public_url`: {answer}"
        )
    message = f"the control plane returned {status} for {path}: {_error_message(response)}"
    if status >= 500 or status in _RETRYABLE:
        raise errors.Unreachable(message)
    raise _PERMANENT.get(status, errors.BadInput)(message)


def _is_foreign(response: httpx.Response) -> bool:
    """Whether an error is not from our server, whose errors all have a kind."""
    return not response.is_success and _error_kind(response) is None


def _error_kind(response: httpx.Response) -> str | None:
    try:
        return str(response.json()["error"]["kind"])
    except (ValueError, KeyError, TypeError):
        return None


def _error_message(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return encoding.from_json(response.content, kind)
    except errors.BadInput as error:
        # Not from our server: a proxy, or a server that is starting. Retry.
        raise errors.Unreachable(f"invalid response from the control plane: {error}") from error
