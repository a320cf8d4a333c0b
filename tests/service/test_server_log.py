"""The log of a server: text or JSON, without the values of secrets."""

from __future__ import annotations

import json
import logging
import os

from tests.server_process import Server
from tpufleet.compose import server_log
from tpufleet.linux import stderr_rotation
from tpufleet.service import redaction


def record(message: str, *args: object, error: Exception | None = None) -> logging.LogRecord:
    exc_info = (type(error), error, None) if error else None
    return logging.LogRecord("tpufleet", logging.WARNING, "f.py", 1, message, args, exc_info)


def test_values_of_secrets_are_removed():
    redaction.remember("wandb-4711-key")
    entry = record("cannot use %s", "wandb-4711-key", error=ValueError("bad wandb-4711-key"))
    assert redaction.RedactionFilter().filter(entry)
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
