"""The log of an agent does not fill the disk of its host."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tpufleet.linux import stderr_rotation

LOG_MUCH = """
from tpufleet.agent import threads
for number in range(40_000):
    threads.log(f"{number:06d} " + "x" * 1000)
"""


def test_an_agent_that_logs_a_lot_keeps_the_newest_lines_in_two_files(tmp_path):
    path = tmp_path / "agent.log"
    with path.open("ab") as output:
        subprocess.run([sys.executable, "-c", LOG_MUCH], stderr=output, check=True)
    previous = tmp_path / "agent.log.1"
    assert path.stat().st_size <= stderr_rotation.MAX_BYTES + 2000
    assert previous.stat().st_size <= stderr_rotation.MAX_BYTES
    assert previous.stat().st_mode & 0o077 == 0
    lines = (previous.read_text() + path.read_text()).splitlines()
    numbers = [int(line.split()[2]) for line in lines[1:]]  # the first may be cut
    assert numbers == list(range(numbers[0], 40_000))


@pytest.mark.parametrize("flags", [0, os.O_APPEND], ids=["not appended to", "small"])
def test_other_files_are_left_alone(tmp_path, flags):
    path = tmp_path / "log"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | flags)
    os.write(handle, b"x" * 100)
    assert not stderr_rotation.rotate(handle, max_bytes=200 if flags else 10)
    os.close(handle)
    assert path.stat().st_size == 100


def test_a_deleted_file_is_truncated_without_bringing_it_back(tmp_path):
    path = tmp_path / "log"
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(handle, b"x" * 100)
    path.unlink()
    assert stderr_rotation.rotate(handle, max_bytes=10)
    assert os.fstat(handle).st_size == 0
    os.close(handle)
    assert list(tmp_path.iterdir()) == []
