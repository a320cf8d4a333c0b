"""The client gets the server's error, with its next step, whatever the request."""

from __future__ import annotations

import pytest

from tpufleet.client.transport import error_from_response
from tpufleet.errors import PermissionMissing
from tpufleet.model.api_types import ERROR_HEADER
from tpufleet.service.app import error_response


def test_an_error_fits_into_a_header_because_head_has_no_body():
    from urllib.parse import unquote_to_bytes

    error = PermissionMissing("gs://b/snapshots: no credentials – run `gcloud auth login`")
    response = error_response(error)
    read = error_from_response(400, unquote_to_bytes(response.headers[ERROR_HEADER]))
    assert type(read) is PermissionMissing and str(read) == str(error)


def test_a_head_request_explains_its_error(service):
    with pytest.raises(Exception, match=r"snapshot|digest"):
        service.client("mel").has_snapshot("not-a-digest")
