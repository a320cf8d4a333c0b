"""Bootstrap reports in guest attributes, which work while the server is out of reach."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.agent.test_metadata import describe, environ, server  # noqa: F401
from tests.polling import wait_until
from tpufleet.agent import bootstrap_report
from tpufleet.agent.bootstrap_report import MIN_INTERVAL_SECONDS, BootstrapReporter
from tpufleet.agent.metadata import MetadataClient
from tpufleet.errors import Unreachable
from tpufleet.model.fleet import bootstrap
from tpufleet.model.fleet.bootstrap import BootstrapStage


def written(metadata_server, node, host):
    text = metadata_server.guest_attributes(node, host).get(("tpufleet", "bootstrap"), "")
    return bootstrap.parse_report(text)


@pytest.fixture
def unreachable(server):  # noqa: F811
    describe(
        server, "a", ["a"], tpufleet_server="http://127.0.0.1:1", enable_guest_attributes="TRUE"
    )
    return server


def test_an_agent_that_cannot_reach_the_server_reports_the_error(unreachable, tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-m", "tpufleet", "agent"], env=environ(unreachable, "a", 2, tmp_path)
    )
    try:
        report = wait_until(lambda: written(unreachable, "a", 2))
    finally:
        process.kill()
        process.wait()
    assert (report.host, report.stage) == (2, BootstrapStage.CONNECTING) and not report.failed
    assert "refused" in report.message and "http://127.0.0.1:1" in report.message


def test_an_agent_with_bad_metadata_reports_a_final_failure(unreachable, tmp_path):
    describe(unreachable, "a", ["a"], tpufleet_tokens="{}", enable_guest_attributes="TRUE")
    env = environ(unreachable, "a", 0, tmp_path)
    subprocess.run([sys.executable, "-m", "tpufleet", "agent"], env=env, timeout=900)
    report = written(unreachable, "a", 0)
    assert report.failed and "no bootstrap token for slice a" in report.message


def test_messages_of_one_stage_are_written_within_the_limit_of_the_metadata_server(unreachable):
    now = [100.0]
    client = MetadataClient(f"{unreachable.url}/a/0")
    reporter = BootstrapReporter(client, 0, lambda: now[0])
    reporter.connecting(Unreachable("refused"))
    reporter.connecting(Unreachable("timed out"))
    assert written(unreachable, "a", 0).message == "refused"
    now[0] += MIN_INTERVAL_SECONDS
    reporter.connecting(Unreachable("timed out"))
    assert written(unreachable, "a", 0).message == "timed out"
    reporter.connected()
    assert written(unreachable, "a", 0).stage is BootstrapStage.CONNECTED, "a change: at once"


def test_disabled_guest_attributes_do_not_stop_an_agent(server, capfd):  # noqa: F811
    describe(server, "a", ["a"])
    reporter = BootstrapReporter(MetadataClient(f"{server.url}/a/0"), 0)
    reporter.connecting(Unreachable("refused"))
    assert "cannot write guest attributes" in capfd.readouterr().err
    bootstrap_report.from_environ({}).connecting(Unreachable("a host without a metadata server"))


@pytest.mark.parametrize(
    "text",
    ["", "{}", "null", "[1]", '{"host": 1, "stage": "x"}', '{"host": -1}', '{"host": "x"}', "\0"],
)
def test_what_other_processes_write_is_not_a_report(text):
    assert bootstrap.parse_report(text) is None
