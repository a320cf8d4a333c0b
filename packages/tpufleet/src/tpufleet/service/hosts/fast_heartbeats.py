"""Answers heartbeats without the middleware and the routes, which cost more than the rest of the
work. Only valid ones: every other is answered by the route, which says what is wrong."""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable
from http import HTTPStatus

from starlette.responses import Response

from tpufleet.errors import BadInput, FleetError
from tpufleet.model.fleet.agent_protocol import Heartbeat, read_heartbeat
from tpufleet.model.fleet.slices import SliceId
from tpufleet.model.values.encoding import to_json
from tpufleet.policy.accounting import rate_limits
from tpufleet.service.api import agents
from tpufleet.service.transport import auth, identifiers
from tpufleet.service.transport.client_connections import HeartbeatRequest, HeartbeatResponse
from tpufleet.service.transport.rate_limiter import RateLimiter, TooManyRequests
from tpufleet.service.transport.routing import ServiceComponents

logger = logging.getLogger(__name__)

_OPERATION = agents.heartbeat.__name__
_JSON = b"content-type: application/json\r\n"


class FastHeartbeats:
    def __init__(
        self,
        components: ServiceComponents,
        limiter: RateLimiter,
        failure_response: Callable[[Exception], Response],
    ) -> None:
        self._components = components
        self._limiter = limiter
        self._failure_response = failure_response
        self._secret = components.deps.secret

    def admit(self, request: HeartbeatRequest) -> Awaitable[HeartbeatResponse] | None:
        """None when the token is not valid, the body cannot be read, or a limit is exceeded."""
        try:
            report = read_heartbeat(request.body)
            slice_id = SliceId(identifiers.parse_host_id(report.host_id)[0])
            if not auth.is_slice_token(request.token, self._secret, slice_id):
                return None
            token_hash = auth.token_hash(request.token)
            self._limiter.check_caller(f"slice:{token_hash}", rate_limits.PER_SLICE_TOKEN)
        except (BadInput, TooManyRequests):
            return None
        self._limiter.accept(token_hash)
        return self._respond(report, slice_id)

    async def _respond(self, report: Heartbeat, slice_id: SliceId) -> HeartbeatResponse:
        started = time.monotonic()
        try:
            now = self._components.deps.clock.now()
            reply = await agents.receive_heartbeat(self._components, report, slice_id, now)
            status, response = 200, HeartbeatResponse(b"200 OK", _JSON, to_json(reply))
        except Exception as error:
            if not isinstance(error, FleetError):
                logger.exception("cannot answer the heartbeat of %s", report.host_id)
            status, response = self._failure(error)
        self._components.metrics.count(_OPERATION, status, time.monotonic() - started)
        return response

    def _failure(self, error: Exception) -> tuple[int, HeartbeatResponse]:
        answer = self._failure_response(error)
        headers = b"".join(
            name + b": " + value + b"\r\n"
            for name, value in answer.raw_headers
            if name != b"content-length"
        )
        status = HTTPStatus(answer.status_code)
        line = f"{status.value} {status.phrase}".encode()
        return status.value, HeartbeatResponse(line, headers, bytes(answer.body))
