"""HTTP connection to the server: authentication, decoding, and translation of errors."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload
from urllib.parse import unquote_to_bytes

from tpufleet import errors
from tpufleet.client import tls
from tpufleet.errors import (
    FleetError,
    NoAnswer,
    NoConnection,
    Unreachable,
    UntrustedCertificate,
)
from tpufleet.model.api_types import ERROR_HEADER, ErrorResponse
from tpufleet.model.values.encoding import from_json, to_json

if TYPE_CHECKING:  # httpx takes 0.1 s to import; `tpu --help` does not need it
    import httpx

T = TypeVar("T")
PREFIX = "/api/v1"
CALL_SECONDS = 30.0
# The server sends a comment every 15 s; after three missed ones it is considered gone.
STREAM_SECONDS = 45.0
# A refusal for too many requests is waited for, when it is no longer than this in all.
LONGEST_WAIT_SECONDS = 20.0

_KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, FleetError)
}
_BY_STATUS = {
    400: errors.BadInput,
    401: errors.Unauthorized,
    403: errors.Forbidden,
    404: errors.NotFound,
    409: errors.Conflict,
    413: errors.BadInput,
}


class Transport:
    def __init__(
        self,
        url: str,
        token: str,
        *,
        timeout: float = CALL_SECONDS,
        ca_file: str | PathLike[str] | None = None,
        certificate: Path | None = None,
    ) -> None:
        import httpx

        self.url = url.rstrip("/")
        self._timeout = timeout
        self._http = httpx.Client(
            base_url=self.url + PREFIX,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout,
            verify=tls.verification(self.url, ca_file, certificate=certificate),
            proxy=None if certificate is not None else tls.proxy_for(self.url, os.environ),
            trust_env=False,  # a netrc of the machine must never replace the token
        )
        self._transport_error = httpx.TransportError
        self._no_answer = (httpx.ReadTimeout, httpx.WriteTimeout)  # although it was connected

    @overload
    def call(self, verb: str, path: str, answer: type[T], **request: Any) -> T: ...

    @overload
    def call(self, verb: str, path: str, answer: None = None, **request: Any) -> None: ...

    def call(self, verb: str, path: str, answer: type[T] | None = None, **request: Any) -> T | None:
        """One request, with the keywords of `send`, and its response decoded as `answer`."""
        response = self.send(verb, path, **request)
        return from_json(response.content, answer) if answer is not None else None

    def send(
        self,
        verb: str,
        path: str,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        content: Any = None,
        timeout: float | None = None,
    ) -> httpx.Response:
        headers = {}
        if body is not None:
            content, headers = to_json(body), {"Content-Type": "application/json"}
        options: dict[str, Any] = (
            {} if timeout is None else {"timeout": max(timeout, self._timeout)}
        )
        is_file = hasattr(content, "seek")
        waited, repeatable = 0.0, content is None or isinstance(content, bytes) or is_file
        while True:
            try:
                response = self._http.request(
                    verb,
                    path,
                    params=without_none(params),
                    content=content,
                    headers=headers,
                    **options,
                )
            except self._transport_error as error:
                raise self.unreachable(error) from error
            wait = _retry_after(response)
            if wait is None or not repeatable or waited + wait > LONGEST_WAIT_SECONDS:
                break
            time.sleep(wait)
            waited += wait
            if is_file:
                content.seek(0)
        if response.is_error:
            body = response.content or unquote_to_bytes(response.headers.get(ERROR_HEADER, ""))
            raise error_from_response(response.status_code, body)
        return response

    @contextmanager
    def stream(
        self,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = STREAM_SECONDS,
    ) -> Iterator[httpx.Response]:
        """A response whose body is read incrementally. A broken connection raises Unreachable."""
        try:
            with self._http.stream(
                "GET", path, params=without_none(params), headers=headers, timeout=timeout
            ) as response:
                if response.is_error:
                    raise error_from_response(response.status_code, response.read())
                yield response
        except self._transport_error as error:
            raise self.unreachable(error) from error
        except RuntimeError as error:
            if not self.closed:
                raise
            raise self.unreachable(error) from error

    def unreachable(self, error: Exception) -> Unreachable:
        if isinstance(error, self._no_answer):
            return NoAnswer(
                f"the server at {self.url} does not answer ({error or 'timed out'}): it is "
                "frozen or overloaded, or so is its database\n"
                "  next: retry, or look at its log; `tpu serve --stop` and `tpu serve` restart it "
                "without losing a job"
            )
        if tls.is_untrusted(error):
            return UntrustedCertificate(
                f"cannot reach the server at {self.url} ({error})\n"
                "  next: for a private CA, set `ca_file` in the config file, or TPUFLEET_CA_FILE, "
                "to its certificate; for another name, use that as the address"
            )
        return NoConnection(
            f"cannot reach the server at {self.url} ({error or type(error).__name__}); "
            "start one with `tpu serve`, or pass its address with --server"
        )

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    def close(self) -> None:
        self._http.close()


def _retry_after(response: httpx.Response) -> float | None:
    """Seconds, of a request that the server refused before it did anything."""
    seconds = response.headers.get("Retry-After", "")
    return float(seconds) if response.status_code == 429 and seconds.isdecimal() else None


def without_none(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The parameters that have a value."""
    if params is None:
        return None
    return {name: value for name, value in params.items() if value is not None}


# For responses without a body, such as those to HEAD.
_DEFAULT_MESSAGES = {
    401: "invalid token",
    403: "your role does not permit this; an admin can change it with `tpu user`",
}


def error_from_response(status: int, body: bytes) -> FleetError:
    """The error class that the server raised, with its message."""
    try:
        detail = from_json(body, ErrorResponse).error
    except errors.BadInput:
        message = body[:200].decode(errors="replace").strip() or _DEFAULT_MESSAGES.get(status, "")
        kind = _BY_STATUS.get(status, Unreachable if status >= 500 else FleetError)
        return kind(f"the server returned {status}{': ' + message if message else ''}")
    return _KINDS.get(detail.kind, _BY_STATUS.get(status, FleetError))(detail.message)
