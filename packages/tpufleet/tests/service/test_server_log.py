"""The log of a server: text or JSON, without the values of secrets."""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys

from tests.server_process import Server
from tpufleet.compose import server_log
from tpufleet.linux import stderr_rotation
from tpufleet.service.operations import log_redaction

UPGRADE = (
    b"GET /api/v1/me HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: eA==\r\n\r\n"
)


def record(
    message: str, *args: object, error: Exception | None = None, level: int = logging.WARNING
) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord("tpufleet", level, "f.py", 1, message, args, exc_info)


class Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def test_values_of_secrets_are_removed():
    log_redaction.remember("ada", "secret/wandb", "wandb-4711-key")
    entry = record("cannot use %s", "wandb-4711-key", error=ValueError("bad wandb-4711-key"))
    assert log_redaction.RedactionFilter().filter(entry)
    for formatter in (logging.Formatter(), server_log.JsonFormatter()):
        line = formatter.format(entry)
        assert "4711" not in line and "cannot use ***" in line and "bad ***" in line


def test_json_has_one_object_per_line():
    line = server_log.JsonFormatter().format(record("two\nlines of %s", "text"))
    assert "\n" not in line
    entry = json.loads(line)
    assert entry["severity"] == "WARNING" and entry["message"] == "two\nlines of text"
    assert entry["time"].endswith("+00:00")


def test_a_server_logs_json_and_starts_a_new_file_when_the_log_is_large(tmp_path):
    server = Server(tmp_path / "home", TPUFLEET_LOG_FORMAT="json")
    log = server.home / "server.log"
    log.write_bytes(b"old line\n" * 2_000_000)
    os.chmod(log, 0o600)
    try:
        server.start()
        server.stop()
    finally:
        server.cleanup()
    assert log.stat().st_size < 1_000_000
    assert (server.home / "server.log.1").stat().st_size == stderr_rotation.MAX_BYTES
    lines = [line for line in log.read_text().splitlines() if line.startswith("{")]
    assert any("Application shutdown" in json.loads(line)["message"] for line in lines)


def test_a_message_that_repeats_is_limited_and_the_rest_is_counted():
    """Whatever a client puts into it. Others are not affected."""
    moment = 0.0
    limited = server_log.RepeatFilter(now=lambda: moment)
    passed = sum(limited.filter(record("bad request from %s", n)) for n in range(10_000))
    assert passed == server_log.MAX_PER_MESSAGE
    assert limited.filter(record("the database is back"))
    moment += server_log.WINDOW_SECONDS
    entry = record("bad request from %s", "10.0.0.1")
    assert limited.filter(entry)
    assert entry.getMessage() == "bad request from 10.0.0.1 (9940 more like this were left out)"


def test_messages_of_a_format_of_their_own_each_are_limited_together():
    limited = server_log.RepeatFilter(now=lambda: 0.0)
    passed = sum(limited.filter(record(f"bad request {number}")) for number in range(50_000))
    assert passed <= server_log.MAX_MESSAGES + server_log.MAX_PER_MESSAGE


def test_invalid_requests_and_upgrades_add_a_line_per_minute_each(service):
    """Of clients without a token."""
    logger, logged = logging.getLogger(server_log.UVICORN_LOGGER), Collector()
    limit = server_log.ClientErrorFilter(now=lambda: 0.0)
    logger.addFilter(limit)
    logger.addHandler(logged)
    try:
        for _ in range(10):
            for request in (b"junk\r\n\r\n", UPGRADE):
                with socket.create_connection(("127.0.0.1", service.port)) as connection:
                    connection.sendall(request)
                    assert connection.makefile("rb").readline().startswith(b"HTTP/1.1 4")
    finally:
        logger.removeHandler(logged)
        logger.removeFilter(limit)
    assert sorted(logged.messages) == [
        "Invalid HTTP request received.",
        "Unsupported upgrade request.",
    ]


def test_only_warnings_of_the_web_server_are_limited_to_one_per_minute():
    moment = 0.0
    limited = server_log.ClientErrorFilter(now=lambda: moment)
    for level, expected in ((logging.INFO, 5), (logging.WARNING, 1), (logging.ERROR, 5)):
        assert sum(limited.filter(record("text", level=level)) for _ in range(5)) == expected
    moment += server_log.WINDOW_SECONDS
    entry = record("text", level=logging.WARNING)
    assert limited.filter(entry)
    assert entry.getMessage() == "text (4 more like this were left out)"


def test_the_number_of_messages_left_out_does_not_make_another_message():
    """Else one message could fill the list of recent errors."""
    moment, formats = 0.0, set()
    limited = server_log.ClientErrorFilter(now=lambda: moment)
    for repeats in range(2, 9):
        for _ in range(repeats):
            entry = record("100% invalid")
            if limited.filter(entry):
                assert entry.getMessage().startswith("100% invalid")
                formats.add(entry.msg)
        moment += server_log.WINDOW_SECONDS
    assert len(formats) == 2, "with and without a number"


LOG = """
import logging
from datetime import UTC, datetime
from tpufleet.compose import server_log
from tpufleet.service.operations import log_redaction

recent = server_log.set_up("text")
log_redaction.remember("mel", "wandb", "wandb-4711-key")
for number in range(5):
    logging.getLogger(server_log.UVICORN_LOGGER).warning("invalid request")
    logging.getLogger("tpufleet").warning("failed with %s: %s", number, "wandb-4711-key")
for entry in recent.list(datetime.now(UTC)):
    print(entry.count, entry.message)
"""


def test_the_log_and_the_recent_errors_of_a_server_are_limited():
    done = subprocess.run(
        [sys.executable, "-c", LOG], capture_output=True, text=True, check=True, timeout=900
    )
    assert done.stderr.count("invalid request") == 1
    assert done.stdout.splitlines() == ["5 failed with 4: ***", "1 invalid request"]
    assert "4711" not in done.stderr
