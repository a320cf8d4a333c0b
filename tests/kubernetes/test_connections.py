"""What a connection does before it has said a word to any server."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("lightkube", reason="needs the extra `k8s`: pip install 'tpufleet[k8s]'")

# Threads that get their first answers, of all kinds, at once.
TOGETHER = """
import faulthandler, sys, threading
from lightkube.core import decoders
from tpufleet.kubernetes import connections

faulthandler.enable()
sys.setswitchinterval(1e-6)
kinds = [each for each in vars(connections).values() if isinstance(each, connections.Kind)]
start = threading.Barrier(8)

def work(first):
    start.wait()
    for kind in kinds[first % 3 :] + kinds[: first % 3]:
        made = connections._resource(kind)
        _, version, items = decoders.decode_list(
            b'{"items": [{"a": 1}], "metadata": {"resourceVersion": "4"}}', made
        )
        assert version == "4" and items == [{"a": 1}]
        assert made({"metadata": {"name": "a"}}).metadata.name == "a"  # read before each call
        assert decoders.decode_watch_event(b'{"type": "ADDED", "object": {}}').type == "ADDED"
        assert decoders.decode_status(b'{"code": 404, "details": {"name": "a"}}').code == 404

threads = [threading.Thread(target=work, args=(first,)) for first in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("time", range(6))
def test_threads_that_get_their_first_answers_at_once_do_not_crash(time):
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
