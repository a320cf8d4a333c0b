"""One keep-alive connection to the control plane: bearer token in, our own errors out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from tpufleet import errors
from tpufleet.errors import FleetError, Unreachable
from tpufleet.model.api_types import ErrorResponse
from tpufleet.model.encoding import from_json, to_json

if TYPE_CHECKING:  # httpx takes a tenth of a second to import; `tpu --help` does without
    import httpx

T = TypeVar("T")
PREFIX = "/api/v1"
CALL_SECONDS = 30.0
# A stream sends a comment every 15 s; three missed in a row mean that the server is gone.
STREAM_SECONDS = 45.0

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
    def __init__(self, url: str, token: str, *, timeout: float = CALL_SECONDS) -> None:
        import httpx

        self.url = url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.url + PREFIX,
            headers={"Authorization": f"Bearer {token}"},
            timeout=timeout,
            verify=self.url.startswith("https:"),  # reading certificates takes longer than a call
            trust_env=False,  # a proxy or netrc of the machine must never see the token
        )
        self._transport_error = httpx.TransportError

    def call(
        self,
        verb: str,
        path: str,
        answer: type[T] | None = None,
        *,
        body: Any = None,
        params: Mapping[str, Any] | None = None,
        content: Any = None,
        timeout: float | None = None,
    ) -> T:
        """One request and its answer, decoded as `answer`; None when that is None."""
        response = self.send(verb, path, body=body, params=params, content=content, timeout=timeout)
        return from_json(response.content, answer) if answer is not None else None  # type: ignore[return-value]

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
        options = {} if timeout is None else {"timeout": timeout}
        try:
            response = self._http.request(
                verb, path, params=without_none(params), content=content, headers=headers, **options
            )
        except self._transport_error as error:
            raise self.unreachable(error) from error
        if response.is_error:
            raise error_from_response(response.status_code, response.content)
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
        """A response whose body is read as it comes. Broken connections are Unreachable."""
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
        return Unreachable(
            f"no control plane answers at {self.url} ({error or type(error).__name__}); "
            "start one with `tpu serve`, or name the right one with --server"
        )

    @property
    def closed(self) -> bool:
        return self._http.is_closed

    def close(self) -> None:
        self._http.close()


def without_none(params: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Parameters that have a value."""
    if params is None:
        return None
    return {name: value for name, value in params.items() if value is not None}


# What a refusal means where the server can say nothing more (the answer to HEAD has no body).
_WITHOUT_WORDS = {
    401: "this token is not known there",
    403: "your role does not allow this; an admin changes roles with `tpu user`",
}


def error_from_response(status: int, body: bytes) -> FleetError:
    """The error class that the server raised, with the server's words."""
    try:
        fault = from_json(body, ErrorResponse).error
    except errors.BadInput:
        words = body[:200].decode(errors="replace").strip() or _WITHOUT_WORDS.get(status, "")
        kind = _BY_STATUS.get(status, Unreachable if status >= 500 else FleetError)
        return kind(f"the server answered {status}{': ' + words if words else ''}")
    return _KINDS.get(fault.kind, _BY_STATUS.get(status, FleetError))(fault.message)
