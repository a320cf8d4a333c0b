"""The file `result` of a program: at the control plane before the end of the program is told."""

from __future__ import annotations

import pytest

from tpufleet.model.hosts import Phase

HAND_OVER = "import os; open(os.environ['TPUFLEET_RUN_DIR'] + '/result', 'w').write('forty-two')"


def test_a_result_arrives_before_the_end_is_told(world):
    world.assign_python(HAND_OVER)
    world.start()
    assert world.exit().clean
    assert world.plane.results == {"j1.0": b"forty-two"}
    assert Phase.EXITED not in world.plane.phases_before_result


def test_a_result_that_is_refused_does_not_hold_up_the_end(world):
    world.plane.refuse["results"] = 409
    world.assign_python(HAND_OVER)
    world.start()
    assert world.exit().clean and world.plane.results == {}


@pytest.mark.parametrize("kind", ["symlink('/etc/passwd', path)", "mkfifo(path)", "mkdir(path)"])
def test_only_a_plain_file_is_a_result(world, kind):
    world.assign_python(f"import os; path = os.environ['TPUFLEET_RUN_DIR'] + '/result'; os.{kind}")
    world.start()
    assert world.exit().clean and world.plane.results == {}
