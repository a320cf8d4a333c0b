"""Snapshots: the code of jobs, uploaded once for each content."""

from __future__ import annotations

from starlette.responses import Response

from tpufleet.model.api_types import StoredSnapshot
from tpufleet.model.people.users import Role
from tpufleet.service.files.snapshots import SnapshotFiles, Upload
from tpufleet.service.transport.routing import ApiCall, MediaType, Router, TooLarge, declared_length

UNLIMITED = 2**50  # the handler has its own limit, with a more helpful message

router = Router()


@router.route("HEAD", "/snapshots/{digest}", Role.MEMBER, media_type=MediaType.ARCHIVE)
async def head_snapshot(call: ApiCall, snapshots: SnapshotFiles) -> Response:
    """200 when the server has this snapshot, else 404."""
    exists = await snapshots.touch(call.path_param("digest"))
    return Response(status_code=200 if exists else 404)


@router.put("/snapshots/{digest}", Role.MEMBER, body=bytes, limit=UNLIMITED, stream_body=True)
async def put_snapshot(call: ApiCall, snapshots: SnapshotFiles) -> None:
    """Upload code as a tar.gz."""
    _check_length(call, snapshots)
    await snapshots.put(call.path_param("digest"), _upload(call))


@router.post("/snapshots", Role.MEMBER, body=bytes, limit=UNLIMITED, stream_body=True)
async def post_snapshot(call: ApiCall, snapshots: SnapshotFiles) -> StoredSnapshot:
    """Upload code as a tar.gz; the server computes its digest."""
    _check_length(call, snapshots)
    return StoredSnapshot(digest=await snapshots.add(_upload(call)))


def _check_length(call: ApiCall, snapshots: SnapshotFiles) -> None:
    if declared_length(call.request) > snapshots.limit:
        raise TooLarge(snapshots.too_large_message())


def _upload(call: ApiCall) -> Upload:
    return Upload(
        chunks=call.chunks(),
        user=call.user.name,
        is_disconnected=call.request.is_disconnected,
    )
