"""The copy of a program's output on the agent's standard output, for `kubectl logs`."""

from __future__ import annotations

import os

from tpufleet.agent.workload.output.logs import LogFile


def test_output_and_notes_are_copied(tmp_path):
    reader, writer = os.pipe()
    log = LogFile(tmp_path / "output", writer)
    log.append(b"step 1\n")
    log.note("exit status 0")
    log.close()
    os.close(writer)
    with os.fdopen(reader, "rb") as copy:
        assert copy.read() == (tmp_path / "output").read_bytes() != b""


def test_a_reader_that_does_not_keep_up_blocks_nothing(tmp_path):
    reader, writer = os.pipe()
    log = LogFile(tmp_path / "output", writer)
    for _ in range(8):
        log.append(b"x" * 64 * 1024)
    assert log.size == 8 * 64 * 1024
    os.close(reader)
    log.append(b"the reader is gone\n")
    assert log.size == 8 * 64 * 1024 + 19
    log.close()
    os.close(writer)


def test_pods_copy_their_output():
    from tests.providers.gke.test_manifests import SETTINGS, container, order
    from tpufleet.providers.gke import manifests

    variables = {
        each["name"]: each.get("value")
        for each in container(manifests.jobset(order(), SETTINGS))["env"]
    }
    assert variables["TPUFLEET_ECHO"] == "1"
