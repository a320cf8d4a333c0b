"""Snapshots: the code of jobs, uploaded once for each content."""

from __future__ import annotations

from starlette.responses import Response

from tpufleet.model.api_types import Acknowledgement
from tpufleet.model.users import Role
from tpufleet.service.routing import ApiCall, MediaType, Router, TooLarge, declared_length

UNLIMITED = 2**50  # the handler has its own limit, with a more helpful message

router = Router()


@router.route(
    "HEAD",
    "/snapshots/{digest}",
    role=Role.MEMBER,
    summary="200 when the server has this snapshot, else 404",
    media_type=MediaType.ARCHIVE,
)
def head_snapshot(call: ApiCall) -> Response:
    exists = call.components.storage.snapshots.touch(call.path_param("digest"))
    return Response(status_code=200 if exists else 404)


@router.route(
    "PUT",
    "/snapshots/{digest}",
    role=Role.MEMBER,
    summary="Upload code as a tar.gz",
    body=bytes,
    response=Acknowledgement,
    limit=UNLIMITED,
    stream_body=True,
)
async def put_snapshot(call: ApiCall) -> Acknowledgement:
    snapshots = call.components.storage.snapshots
    if declared_length(call.request) > snapshots.limit:
        raise TooLarge(snapshots.too_large_message())
    await snapshots.put(call.path_param("digest"), call.chunks())
    return Acknowledgement()
