"""The client gets the server's error, with its next step, whatever the request."""

from __future__ import annotations

import pytest

from tpufleet.client.transport import error_from_response
from tpufleet.errors import (
    DatabaseFull,
    DatabaseUnreachable,
    PermissionMissing,
    StorageFull,
    StorageUnusable,
    Unreachable,
)
from tpufleet.model.api_types import ERROR_HEADER
from tpufleet.service.transport.app import error_response


def test_an_error_fits_into_a_header_because_head_has_no_body():
    from urllib.parse import unquote_to_bytes

    error = PermissionMissing("gs://b/snapshots: no credentials – run `gcloud auth login`")
    response = error_response(error)
    read = error_from_response(400, unquote_to_bytes(response.headers[ERROR_HEADER]))
    assert type(read) is PermissionMissing and str(read) == str(error)


def test_a_head_request_explains_its_error(service):
    with pytest.raises(Exception, match=r"snapshot|digest"):
        service.client("mel").has_snapshot("not-a-digest")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (StorageFull("database /srv/fleet.db: full"), "the server's disk is full"),
        (DatabaseFull("the disk of Postgres"), "the disk of the server's database is full"),
        (StorageUnusable("database /srv/fleet.db is read-only"), "cannot write its database"),
        (DatabaseUnreachable("db1: connection refused"), "the database does not respond; retry"),
        (Unreachable("Cloud KMS cannot be reached: db1"), "temporarily unavailable; retry"),
    ],
)
def test_a_database_that_takes_nothing_is_explained_without_its_location(error, message):
    response = error_response(error)
    body = response.body.decode()
    assert response.status_code == 503 and message in body
    assert int(response.headers["Retry-After"]) > 0
    assert "/srv" not in body and "db1" not in body


@pytest.mark.parametrize("path", ["/jobs", "/users"])
def test_an_invalid_body_is_not_named_by_an_internal_type(service, path):
    with service.http(service.tokens["ada"]) as http:
        answer = http.post(f"{service.url}/api/v1{path}", content=b"{")
    message = answer.json()["error"]["message"]
    assert answer.status_code == 400 and message.startswith("not a valid request body: ")
