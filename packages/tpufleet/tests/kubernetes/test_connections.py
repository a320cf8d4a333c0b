"""Decoders are built safely when several threads use them for the first time."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

# Eight threads decode their first responses of all kinds at the same time.
CONCURRENT_DECODING = """
import faulthandler, sys, threading
from lightkube.core import decoders
from tpufleet.kubernetes import connections

faulthandler.enable()
sys.setswitchinterval(1e-6)
kinds = [each for each in vars(connections).values() if isinstance(each, connections.ResourceKind)]
start = threading.Barrier(8)

def work(first):
    start.wait()
    for kind in kinds[first % 3 :] + kinds[: first % 3]:
        resource = connections._resource(kind)
        _, version, items = decoders.decode_list(
            b'{"items": [{"a": 1}], "metadata": {"resourceVersion": "4"}}', resource
        )
        assert version == "4" and items == [{"a": 1}]
        assert resource({"metadata": {"name": "a"}}).metadata.name == "a"  # read before each call
        assert decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}').type == "ADDED"
        assert decoders.decode_status(b'{"code": 404, "details": {"name": "a"}}').code == 404

threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("time", range(6))
def test_concurrent_first_use_of_decoders_does_not_crash(time):
    done = subprocess.run(
        [sys.executable, "-c", CONCURRENT_DECODING],
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert (done.returncode, done.stderr) == (0, "")
