"""Programs that one attempt compiled are there for the next one."""

from __future__ import annotations

import os

import pytest

PRINT_FOLDER = ("sh", "-c", 'echo "folder: $JAX_COMPILATION_CACHE_DIR"')
COMPILE = """
import jax, jax.monitoring
counts = {"cache_hits": 0, "cache_misses": 0}
def count(name, **_):
    event = name.rpartition("/")[2]
    if event in counts: counts[event] += 1
jax.monitoring.register_event_listener(count)
jax.jit(lambda x: x * 2 + 1)(3.0).block_until_ready()
print("programs:", counts, flush=True)
"""


@pytest.fixture
def base_env() -> dict[str, str]:
    """Without the cache of the tests."""
    return {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}


def line(harness, attempt: str, prefix: str) -> str:
    harness.wait_for_exit(attempt)
    return next(line for line in harness.log(attempt).splitlines() if line.startswith(prefix))


def test_a_second_attempt_compiles_nothing(harness, base_env):
    harness.assign_python(COMPILE)
    harness.start(base_env)
    assert "'cache_hits': 0" in line(harness, "j1.0", "programs: ")
    harness.assign_python(COMPILE, attempt_id="j1.1", number=1)
    assert "'cache_misses': 0" in line(harness, "j1.1", "programs: ")


def test_the_programs_of_jobs_and_users_are_apart(harness, base_env):
    place = str(harness.checkpoint)
    harness.assign(*PRINT_FOLDER, checkpoint=place)
    harness.start(base_env)
    first = line(harness, "j1.0", "folder: ")
    for attempt, changes, same in (
        ("j1.1", {"checkpoint": f"{place}/from-attempt-1"}, True),
        ("j2.0", {"checkpoint": f"{place}-2"}, False),
        ("j3.0", {"checkpoint": place, "owner": "ann"}, False),
    ):
        harness.assign(*PRINT_FOLDER, attempt_id=attempt, **changes)
        assert (line(harness, attempt, "folder: ") == first) is same


def test_a_gang_has_no_programs_of_process_0_alone(harness, base_env):
    harness.assign(*PRINT_FOLDER, num_processes=2)
    harness.start(base_env)
    assert line(harness, "j1.0", "folder: ") == "folder: "


def test_a_job_can_choose_its_own_folder(harness, base_env):
    harness.assign("sh", "-c", "env", env={"JAX_COMPILATION_CACHE_DIR": "/own"})
    harness.start(base_env)
    assert line(harness, "j1.0", "JAX_COMPILATION") == "JAX_COMPILATION_CACHE_DIR=/own"
    assert "JAX_PERSISTENT_CACHE" not in harness.log()


def test_a_host_keeps_the_programs_of_the_last_jobs(harness, base_env):
    harness.start(base_env)
    for number in range(10):
        harness.assign(*PRINT_FOLDER, attempt_id=f"j{number}.0", checkpoint=f"/run-{number}")
        newest = line(harness, f"j{number}.0", "folder: ").removeprefix("folder: ")
    kept = [path for path in (harness.work / "compiled").iterdir() if path.is_dir()]
    assert len(kept) == 8 and newest in map(str, kept)
