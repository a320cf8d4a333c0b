"""What a user reads when the server cannot be reached."""

from __future__ import annotations

import socket

import pytest

from tpufleet.client.transport import Transport
from tpufleet.errors import Unreachable


def failure(url: str) -> str:
    transport = Transport(url, "token")
    try:
        with pytest.raises(Unreachable) as error, transport.stream("/me", timeout=0.2):
            pass
    finally:
        transport.close()
    return str(error.value)


def test_a_server_that_is_frozen_is_not_one_that_does_not_run():
    with socket.create_server(("127.0.0.1", 0)) as listener:  # connects, and never answers
        message = failure(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert "does not answer (timed out)" in message and "tpu serve --stop" in message


def test_a_server_that_does_not_run_can_be_started():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "start one with `tpu serve`" in failure(f"http://127.0.0.1:{port}")
