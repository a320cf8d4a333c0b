"""The variables of a job reach the programs of the job, and none that runs before them with rights
that the job does not have."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest

from tests.polling import wait_until
from tpufleet.agent.workload import containment
from tpufleet.agent.workload.containment import Mechanism
from tpufleet.linux import launcher_environment

# In what the dynamic loader writes with LD_DEBUG, one file for each program.
_PROGRAM = re.compile(r"initialize program: (\S+)")
LIBRARY = """
#include <stdio.h>
#include <unistd.h>
__attribute__((constructor)) static void record(void) {
    char name[4096] = {0};
    FILE *out = fopen("%s", "a");
    readlink("/proc/self/exe", name, sizeof name - 1);
    if (out) { fprintf(out, "%%d %%s\\n", (int) getuid(), name); fclose(out); }
}
"""
# How jobs run: the mechanism, whether the server's state is hidden, whether members have a user.
SETTINGS = [
    pytest.param(
        mechanism,
        state,
        user,
        id=f"{mechanism}{'-isolated' * state}{'-user' * user}",
        marks=() if user else pytest.mark.slow,
    )
    for mechanism in Mechanism
    for state, user in ((False, False), (True, False), (True, True))
    if mechanism is not Mechanism.MARKS or not state  # marks hide nothing
]
MEMBERS_OF_ROOT = [each for each in SETTINGS if each.values[2]]


@pytest.fixture
def shared(harness) -> Path:
    """The checkpoint folder: its job writes there, and every program of the agent can."""
    folder = harness.folder / "state" / "checkpoints" / "job"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    return folder


def agent_settings(harness, mechanism: Mechanism, hidden: bool, user: bool) -> dict[str, str]:
    """The environment of the agent; skips where this host cannot do it."""
    state = harness.folder / "state"
    environ = {"TPUFLEET_CONTAINMENT": str(mechanism)}
    if hidden:
        environ["TPUFLEET_HIDDEN"] = str(state)
    if user:
        environ[containment.MEMBER_JOB_USER_VARIABLE] = "nobody"
    try:
        found = containment.from_environ(environ, harness.work)
    except ValueError as error:
        pytest.skip(str(error))
    if found.mechanism is not mechanism or found.isolated != hidden:
        pytest.skip(f"this host does not offer {mechanism}: {found.isolation_error}")
    return environ


def programs_with_loader_variables(folder: Path) -> dict[str, set[int]]:
    """The programs that got them, and the owners of what they wrote."""
    programs: dict[str, set[int]] = {}
    for file in folder.glob("loader.*"):
        match = _PROGRAM.search(file.read_text())
        programs.setdefault(match[1] if match else "?", set()).add(file.stat().st_uid)
    return programs


@pytest.mark.parametrize(("mechanism", "hidden", "user"), SETTINGS)
def test_loader_variables_reach_only_the_programs_of_the_job(
    harness, shared, mechanism, hidden, user
):
    environ = agent_settings(harness, mechanism, hidden, user)
    harness.assign(
        "/bin/true", setup=("/bin/sleep", "0"),
        env={"LD_DEBUG": "libs"}, secrets={"LD_DEBUG_OUTPUT": f"{shared}/loader"},
        checkpoint=str(shared),
    )  # fmt: skip
    harness.start_process(**environ)
    assert harness.wait_for_exit().clean, harness.log()
    programs = programs_with_loader_variables(shared)
    if not programs:
        pytest.skip("the loader of this host does not know LD_DEBUG_OUTPUT")
    assert set(programs) == {"/bin/true", "/bin/sleep"}
    job_uid = pwd.getpwnam("nobody").pw_uid if user else os.geteuid()
    assert set().union(*programs.values()) == {job_uid}


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize(("mechanism", "hidden", "user"), MEMBERS_OF_ROOT)
def test_a_library_of_the_job_runs_only_in_its_programs(harness, shared, mechanism, hidden, user):
    environ = agent_settings(harness, mechanism, hidden, user)
    record, library = shared / "record", shared / "library.so"
    record.touch()
    record.chmod(0o666)
    (shared / "library.c").write_text(LIBRARY % record)
    subprocess.run(
        ["cc", "-w", "-shared", "-fPIC", "-o", library, shared / "library.c"], check=True
    )
    harness.assign("/bin/sleep", "0", env={"LD_PRELOAD": str(library)}, checkpoint=str(shared))
    harness.start_process(**environ)
    assert harness.wait_for_exit().clean, harness.log()
    job_uid = pwd.getpwnam("nobody").pw_uid if user else os.geteuid()
    program = os.path.realpath("/bin/sleep")
    assert set(record.read_text().splitlines()) == {f"{job_uid} {program}"}


@pytest.mark.parametrize(("mechanism", "hidden", "user"), SETTINGS)
def test_no_process_of_the_agent_has_a_variable_of_the_job(
    harness, shared, mechanism, hidden, user
):
    environ = agent_settings(harness, mechanism, hidden, user)
    harness.assign(
        "sh", "-c", 'echo "ready $CANARY$SECRET_CANARY$PATH"; exec /bin/sleep 600',
        env={"CANARY": "one-", "PATH": "/canary:/usr/bin:/bin"},
        secrets={"SECRET_CANARY": "two-secrets"},
        checkpoint=str(shared),
    )  # fmt: skip
    agent = harness.start_process(**environ)
    harness.wait_for_log("ready one-***/canary:")
    seen = wait_until(lambda: environments(agent.pid, ready="/bin/sleep"))
    ours = [env for command, env in seen if command[0] != "/bin/sleep"]
    assert len(ours) >= 1, "the watchdog at least"
    for env in ours:
        assert not {"CANARY", "SECRET_CANARY"} & set(env)
        assert "canary" not in "".join(env.values())
    assert "CANARY" in next(env for command, env in seen if command[0] == "/bin/sleep")


def environments(agent: int, ready: str) -> list[tuple[list[str], dict[str, str]]]:
    """Of the agent and its descendants, once one of them runs `ready`."""
    family = [psutil.Process(agent), *psutil.Process(agent).children(recursive=True)]
    found = []
    for process in family:
        try:
            found.append((process.cmdline() or [""], process.environ()))
        except psutil.NoSuchProcess:
            continue
    return found if any(command[0] == ready for command, _ in found) else []


def test_launchers_do_not_inherit_what_the_agent_was_started_with(monkeypatch):
    monkeypatch.setenv("TPUFLEET_TOKEN", "t")
    monkeypatch.setenv("LOCAL_TPU_SLICE", "marker")
    environ = launcher_environment.launcher_environment()
    assert set(environ) <= {"PATH", "LC_ALL", "LD_LIBRARY_PATH", "LOCAL_TPU_SLICE"}
    assert environ["LOCAL_TPU_SLICE"] == "marker"
