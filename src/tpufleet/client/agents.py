"""The routes of an agent: enter, beat, logs, errands, result, snapshot. Foreign errors are
translated here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar
from urllib.parse import quote, urlsplit

import httpx
import msgspec

from tpufleet import errors
from tpufleet.model import encoding
from tpufleet.model.agent_protocol import (
    Heartbeat,
    HeartbeatReply,
    SliceTokenReply,
    SliceTokenRequest,
)
from tpufleet.model.attempts import AttemptId
from tpufleet.model.host_commands import HostCommandResult
from tpufleet.model.hosts import HostId

T = TypeVar("T")

MAX_LOG_CHUNK = 256 * 1024

# A beat that hangs longer than this is worth less than a new one.
HEARTBEAT_TIMEOUT = httpx.Timeout(10.0, connect=3.0)
LOG_TIMEOUT = httpx.Timeout(15.0, connect=3.0)
SNAPSHOT_TIMEOUT = httpx.Timeout(15.0, connect=3.0)  # between two pieces

_RETRYABLE = frozenset({408, 425, 429})
_PERMANENT: dict[int, type[errors.FleetError]] = {
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
}


class _LogSize(msgspec.Struct):
    size: int


class AgentClient:
    """Safe to use from several threads."""

    reachable = True  # False from a call that nobody answered until a beat is answered

    def __init__(self, server: str, token: str) -> None:
        self._http = httpx.Client(
            base_url=server.rstrip("/") + "/api/v1/agent",
            headers={"Authorization": f"Bearer {token}"},
            # Plain http needs no certificates, and loading them takes a while.
            verify=urlsplit(server).scheme == "https",
            trust_env=False,  # a proxy or netrc of the machine must never see the token
        )

    def close(self) -> None:
        self._http.close()

    def exchange_bootstrap_token(self, host: HostId, nonce: str) -> str:
        """The token of the slice, for the word that this client was made with."""
        with self._translated():
            response = self._http.post(
                "/enter",
                content=encoding.to_json(SliceTokenRequest(host_id=host, nonce=nonce)),
                headers={"Content-Type": "application/json"},
                timeout=HEARTBEAT_TIMEOUT,
            )
        _check(response)
        return _decoded(response, SliceTokenReply).token

    def send_heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        with self._translated():
            response = self._http.post(
                "/beat",
                content=encoding.to_json(beat),
                headers={"Content-Type": "application/json"},
                timeout=HEARTBEAT_TIMEOUT,
            )
        self.reachable = True
        _check(response)
        return _decoded(response, HeartbeatReply)

    def send_log(self, attempt: AttemptId, host: HostId, offset: int, data: bytes) -> int:
        """Offer bytes of the log that begin at `offset`; answers how many the server holds now."""
        with self._translated():
            response = self._http.post(
                "/logs",
                params={"attempt": attempt, "host": host, "offset": offset},
                content=data,
                headers={"Content-Type": "application/octet-stream"},
                timeout=LOG_TIMEOUT,
            )
        if response.status_code != 409:  # 409: there is a gap, and `size` says from where to go on
            _check(response)
        return _decoded(response, _LogSize).size

    def send_command_result(self, errand_id: str, result: HostCommandResult) -> None:
        with self._translated():
            response = self._http.post(
                f"/errands/{quote(errand_id, safe='')}",
                content=encoding.to_json(result),
                headers={"Content-Type": "application/json"},
                timeout=LOG_TIMEOUT,
            )
        _check(response)

    def send_result(self, attempt: AttemptId, host: HostId, data: bytes) -> None:
        """The job's result, unless it has one already."""
        with self._translated():
            response = self._http.post(
                "/results",
                params={"attempt": attempt, "host": host},
                content=data,
                headers={"Content-Type": "application/octet-stream"},
                timeout=LOG_TIMEOUT,
            )
        _check(response)

    def snapshot(self, digest: str) -> Iterator[bytes]:
        """The archive, piece by piece as it comes."""
        path = f"/snapshots/{quote(digest, safe='')}"
        with (
            self._translated(),
            self._http.stream("GET", path, timeout=SNAPSHOT_TIMEOUT) as response,
        ):
            if not response.is_success:
                response.read()
            _check(response)
            # As stored: a gzip file is what was asked for, not an encoding to be undone.
            yield from response.iter_raw()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (httpx.TransportError, httpx.DecodingError) as error:
            self.reachable = False
            raise errors.Unreachable(f"no answer from the control plane: {error!r}") from error


def _check(response: httpx.Response) -> None:
    status = response.status_code
    if response.is_success:
        return
    path = response.request.url.path
    words = f"the control plane answered {status} to {path}: {_said(response)}"
    if status >= 500 or status in _RETRYABLE:
        raise errors.Unreachable(words)
    raise _PERMANENT.get(status, errors.BadInput)(words)


def _said(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return response.text[:200]


def _decoded(response: httpx.Response, kind: type[T]) -> T:
    try:
        return encoding.from_json(response.content, kind)
    except errors.BadInput as error:
        # Not our server's words: a proxy or a half-started server. It may mend itself.
        raise errors.Unreachable(f"the answer makes no sense: {error}") from error
