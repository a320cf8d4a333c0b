"""No process of an attempt outlives it, whatever it does; for each mechanism of this host."""

from __future__ import annotations

import json
import os
import pwd
import signal
import subprocess
import sys
import tempfile
import uuid
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import psutil
import pytest

from tests.nested_folders import make_nested
from tests.polling import wait_until
from tpufleet import deep_folders
from tpufleet.agent.workload import containment
from tpufleet.agent.workload.containment import Mechanism
from tpufleet.linux import sandbox
from tpufleet.linux.cgroups import Cgroup
from tpufleet.model.job.end_reasons import EndReason

MECHANISMS = [
    Mechanism.CGROUP,
    Mechanism.NAMESPACE,
    pytest.param(Mechanism.MARKS, marks=pytest.mark.slow),
]
GUARANTEED = [Mechanism.CGROUP, Mechanism.NAMESPACE]
# Each writes a heartbeat, so that a survivor is found by what it does, and not by our own marks.
# They stop by themselves when the folder of the test is gone, or after minutes.
WRITER = "i=0; while [ $i -lt 1200 ] && date > {beat}; do i=$((i+1)); sleep 0.05; done"
LEAVING = {
    "empty environment": "setsid env -i sh -c '{writer}' >/dev/null 2>&1 &",
    "daemon": "(setsid env -i sh -c '{writer}' >/dev/null 2>&1 & ) & wait",
    "ignores SIGTERM": "setsid env -i sh -c 'trap \"\" TERM HUP; {writer}' >/dev/null 2>&1 &",
}
# Always four processes: each forks its successor, in a new session, and exits.
RELAY = """
import os, sys, time
os.environ.clear()
end = time.monotonic() + 300
for chain in range(4):
    if os.fork() == 0:
        while time.monotonic() < end:
            os.setsid() if os.getsid(0) != os.getpid() else None
            if os.fork():
                os._exit(0)
            open(sys.argv[1], "w").close()
"""
# Doubles until there are 64.
BOMB = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for generation in range(6):
    if os.fork() == 0:
        os.setsid()
for _ in range(6000):
    open(sys.argv[1], "w").close()
    time.sleep(0.05)
"""


def require(mechanism: Mechanism, work) -> None:
    if containment.detect(work, only=mechanism).mechanism is not mechanism:
        pytest.skip(f"this host does not offer {mechanism}")


def stop_now(harness) -> None:
    assignment = harness.control_plane.assignment
    harness.control_plane.assignment = replace(assignment, stop=EndReason.CANCELLED)


def wait_for_beat(beat) -> None:
    wait_until(beat.exists, describe="first write of the child")
    beat.unlink()
    wait_until(beat.exists, describe="second write of the child")


def assert_nothing_writes(beat) -> None:
    """A survivor writes every 50 ms; 20 times that is enough for a loaded machine."""
    beat.unlink(missing_ok=True)
    with pytest.raises(AssertionError, match="timed out"):
        wait_until(beat.exists, timeout=1.0)


@pytest.mark.parametrize("child", LEAVING.values(), ids=LEAVING)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_child_that_leaves_everything_ends_with_a_cancelled_attempt(
    harness, tmp_path, mechanism, child
):
    require(mechanism, harness.work)
    beat = tmp_path / "beat"
    script = child.format(writer=WRITER.format(beat=beat))
    harness.assign("sh", "-c", f"{script}\nsleep 60", grace=timedelta(seconds=0.5))
    harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    wait_for_beat(beat)
    stop_now(harness)
    assert harness.wait_for_exit().stopped_by_agent
    assert_nothing_writes(beat)


@pytest.mark.parametrize(
    "program",
    [pytest.param(RELAY, id="relay", marks=pytest.mark.slow), pytest.param(BOMB, id="fork bomb")],
)
@pytest.mark.parametrize("mechanism", GUARANTEED)
def test_processes_that_replicate_end_with_a_cancelled_attempt(
    harness, tmp_path, mechanism, program
):
    require(mechanism, harness.work)
    beat = tmp_path / "beat"
    harness.assign(
        "sh",
        "-c",
        f'{sys.executable} -c "$0" {beat} & sleep 300',
        program,
        grace=timedelta(seconds=0.5),
    )
    harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    wait_for_beat(beat)
    stop_now(harness)
    # They leave little of the machine to the agent, and would end by themselves after 300 s.
    assert harness.wait_for_exit(within=150).stopped_by_agent
    assert_nothing_writes(beat)


@pytest.mark.parametrize("mechanism", GUARANTEED)
def test_a_child_that_leaves_everything_ends_with_a_killed_agent(harness, tmp_path, mechanism):
    require(mechanism, harness.work)
    beat = tmp_path / "beat"
    child = LEAVING["ignores SIGTERM"].format(writer=WRITER.format(beat=beat))
    harness.assign("sh", "-c", f"{child}\nsleep 60")
    agent = harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    wait_for_beat(beat)
    family = psutil.Process(agent.pid).children(recursive=True)
    agent.send_signal(signal.SIGKILL)
    agent.wait()
    psutil.wait_procs(family, timeout=900)
    assert_nothing_writes(beat)


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize(
    ("command", "status", "number"),
    [("exit 7", 7, None), ("kill -SEGV $$", None, signal.SIGSEGV), ("exit 0", 0, None)],
    ids=["status", "signal", "success"],
)
def test_an_exit_is_reported_as_it_was(harness, mechanism, command, status, number):
    require(mechanism, harness.work)
    harness.assign("sh", "-c", command)
    harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    exit = harness.wait_for_exit()
    assert (exit.status, exit.signal) == (status, number)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_program_that_does_not_exist_is_named(harness, mechanism):
    require(mechanism, harness.work)
    harness.assign("no-such-program")
    harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    exit = harness.wait_for_exit()
    assert exit.status == 127
    assert exit.log_line == "cannot start no-such-program: No such file or directory"


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_background_process_of_setup_lives_as_long_as_the_command(harness, mechanism):
    require(mechanism, harness.work)
    harness.assign(
        "sh",
        "-c",
        "kill -0 $(cat ../run/helper) && echo served",
        setup=("sh", "-c", "sleep 60 & echo $! > ../run/helper"),
    )
    harness.start_process(TPUFLEET_CONTAINMENT=mechanism)
    assert harness.wait_for_exit().clean
    assert "served\n" in harness.log()


def test_nothing_is_left_of_the_control_groups(harness):
    require(Mechanism.CGROUP, harness.work)
    harness.assign("true")
    harness.start_process(TPUFLEET_CONTAINMENT=Mechanism.CGROUP)
    harness.wait_for_exit()
    contained = containment.detect(harness.work, only=Mechanism.CGROUP)
    wait_until(lambda: not list(contained.cgroup.path.glob(f"{contained._prefix}*")))


def test_limits_are_set_where_controllers_are_delegated(tmp_path):
    """The files of a delegated tree, since few test machines have one."""
    own = containment.Cgroup(tmp_path / "own").create()
    (own.path / "cgroup.controllers").write_text("cpu memory pids\n")
    (own.path / "cgroup.procs").touch()
    containment.make_room_for_limits(own)
    assert (own.path / "agent" / "cgroup.procs").read_text() == "0"
    assert (own.path / "cgroup.subtree_control").read_text() in ("+pids", "+memory")
    group = containment.Cgroup(tmp_path / "own" / uuid.uuid4().hex).create()
    (group.path / "pids.max").touch()
    assert group.limit({"pids.max": 100, "memory.max": 5}) == {"pids.max": 100}
    assert (group.path / "pids.max").read_text() == "100"


@pytest.mark.skipif(os.name != "posix", reason="needs POSIX")
def test_the_guarantee_is_in_the_log_of_the_agent(harness, capfd):
    harness.assign("true")
    harness.start_process(TPUFLEET_CONTAINMENT=Mechanism.MARKS)
    harness.wait_for_exit()
    assert "containment: marks: " in capfd.readouterr().err


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can run jobs as another user")
def test_a_job_of_root_runs_as_another_user(reachable_folder):
    base = reachable_folder
    state, attempt = base / "state", base / "state" / "local" / "work" / "job.0"
    attempt.mkdir(parents=True)
    (state / "token").write_text("admin")
    (attempt / "code").mkdir()
    checkpoint = state / "checkpoints" / "job"
    environ = {"TPUFLEET_HIDDEN": str(state), containment.JOB_USER_VARIABLE: "nobody"}
    try:
        found = containment.from_environ(environ, base / "state" / "local" / "work")
    except ValueError as error:
        pytest.skip(str(error))
    opened = found.open(attempt, str(checkpoint))
    script = (
        f"id -u > {attempt}/code/uid; id -G >> {attempt}/code/uid; touch {checkpoint}/step;"
        f"cat {state}/token > {attempt}/code/token; touch {base}/escaped; echo $HOME;"
        f"grep CapBnd /proc/self/status > {attempt}/code/caps"
    )
    reader, writer = os.pipe()
    try:
        with tempfile.TemporaryFile() as variables:
            variables.write(json.dumps({**os.environ, **opened.environment}).encode())
            variables.seek(0)
            command = opened.wrap(
                ["sh", "-c", script], attempt / "code",
                errors=writer, environment=variables.fileno(),
            )  # fmt: skip
            subprocess.run(command, pass_fds=(writer, variables.fileno()), env={}, check=False)
    finally:
        os.close(writer)
        os.close(reader)
        opened.close()
    nobody = pwd.getpwnam("nobody")
    written = (attempt / "code" / "uid").read_text().split()
    assert written == [str(nobody.pw_uid), str(nobody.pw_gid)]
    assert (checkpoint / "step").stat().st_uid == nobody.pw_uid
    assert (attempt / "code" / "token").read_text() == ""
    assert not (base / "escaped").exists()
    assert f"jobs run as user {nobody.pw_uid}" in found.description


# What jobs of one machine could pass to each other; each prints whether it was there before.
SHARING = """
import ctypes, os, platform, resource, socket, sys
libc = ctypes.CDLL(None, use_errno=True)
def file(path):
    there = os.path.exists(path)
    open(path, "w").close()
    return there
def system_v():
    there = libc.shmget(0x7F01, 64, 0o666) != -1
    assert libc.shmget(0x7F01, 64, 0o1666) != -1
    return there
def abstract_socket():
    try:
        socket.socket(socket.AF_UNIX).connect("\\0tpufleet-test-" + sys.argv[1])
        return True
    except OSError:
        pass
    listener.bind("\\0tpufleet-test-" + sys.argv[1]) if int(sys.argv[2]) else None
    listener.listen() if int(sys.argv[2]) else None
    return False
def keyring():
    add, find = {"x86_64": (248, 250), "aarch64": (217, 219)}[platform.machine()]
    there = libc.syscall(find, 10, -4, b"user", sys.argv[1].encode(), 0) != -1
    libc.syscall(add, b"user", sys.argv[1].encode(), b"x", ctypes.c_size_t(1), -4)
    return there
listener = socket.socket(socket.AF_UNIX)
ways = {folder: lambda folder=folder: file(folder + "/tpufleet-test-" + sys.argv[1])
    for folder in ("/tmp", "/var/tmp", "/dev/shm")}
ways |= {"System V": system_v, "abstract socket": abstract_socket, "keyring": keyring}
found = [name for name in sys.argv[3:] or ways if ways[name]()]
print(found, resource.getrlimit(resource.RLIMIT_NPROC)[0], flush=True)
sys.stdin.read()
"""


@contextmanager
def program_in(opened, folder, *argv):
    """It runs until the end of the block. Yields its first line."""
    reader, writer = os.pipe()
    with tempfile.TemporaryFile() as variables:
        variables.write(json.dumps({**os.environ, **opened.environment}).encode())
        variables.seek(0)
        command = opened.wrap(argv, folder, errors=writer, environment=variables.fileno())
        with subprocess.Popen(
            command,
            pass_fds=(writer, variables.fileno()),
            env={},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as process:
            try:
                yield process.stdout.readline().decode().strip()
            finally:
                process.kill()
                opened.close()
                os.close(writer)
                os.close(reader)


def test_jobs_of_members_share_nothing_with_other_jobs(reachable_folder):
    state = reachable_folder / "state"
    found = containment.detect(state, [state])
    if not found.isolated:
        pytest.skip(found.isolation_error)
    if os.geteuid() == 0:
        found = containment.with_users(found, "", "nobody")
    member = found.for_owner(admin=False)
    name = uuid.uuid4().hex
    assert_nothing_is_shared(
        member, state, name, *map(str, containment.SCRATCH), "System V", "keyring"
    )
    for folder in containment.SCRATCH:
        assert not (folder / f"tpufleet-test-{name}").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
def test_without_namespaces_jobs_of_members_still_have_limits_and_no_keyring(tmp_path):
    state = tmp_path / "state"
    found = containment.detect(state, [state], only=Mechanism.MARKS)
    member = found.for_owner(admin=False)
    assert "share /tmp and shared memory" in found.description
    assert_nothing_is_shared(member, state, uuid.uuid4().hex, "keyring")


@pytest.mark.parametrize("only", [None, Mechanism.MARKS])
def test_jobs_of_members_share_no_abstract_sockets(reachable_folder, only):
    if not sys.platform.startswith("linux") or not sandbox.confines_sockets():
        pytest.skip("needs Linux 6.12 with Landlock")
    state = reachable_folder / "state"
    member = containment.detect(state, [state], only=only).for_owner(admin=False)
    assert_nothing_is_shared(member, state, uuid.uuid4().hex, "abstract socket")


def test_that_jobs_share_abstract_sockets_is_named(tmp_path):
    found = replace(containment.detect(tmp_path, [tmp_path]), shares_sockets=True)
    assert found.weak and "jobs share abstract sockets" in found.description
    assert "sockets" not in replace(found, shares_sockets=False).description
    assert "sockets" not in replace(found, hidden=()).description, "no jobs of others are there"


def assert_nothing_is_shared(member, state, name, *ways):
    folders = [state / f"job-{each}.0" for each in range(2)]
    for folder in folders:
        folder.mkdir(parents=True, exist_ok=True)
    program = [sys.executable, "-c", SHARING, name]
    with (
        program_in(member.open(folders[0], ""), folders[0], *program, "1", *ways) as before,
        program_in(member.open(folders[1], ""), folders[1], *program, "0", *ways) as shown,
    ):
        assert before.startswith("[] "), before
        assert shown.startswith("[] "), shown
        assert 0 < int(shown.split()[-1]) <= containment.MAX_PROCESSES


def test_the_python_of_a_job_is_found_through_links_in_folders_that_it_does_not_share(
    reachable_folder, monkeypatch
):
    state, link = reachable_folder / "state", reachable_folder / "programs" / "python"
    state.mkdir()
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    monkeypatch.setattr(sys, "executable", str(link))
    found = containment.detect(state, [state])
    if not found.isolated:
        pytest.skip(found.isolation_error)
    if os.geteuid() == 0:
        found = containment.with_users(found, "", "nobody")
    opened = found.for_owner(admin=False).open(state, "")
    with program_in(opened, state, str(link), "-c", "print('runs')") as shown:
        assert shown == "runs"


def test_a_checkpoint_that_would_end_with_the_job_is_refused(tmp_path):
    found = containment.detect(tmp_path, [tmp_path / "state"])
    (tmp_path / "state").mkdir()
    member = replace(found, isolated=True).for_owner(admin=False)
    with pytest.raises(PermissionError, match="hidden from jobs"):
        member.open(tmp_path / "state", "/tmp/checkpoint")


def test_an_unknown_user_for_jobs_is_refused(tmp_path):
    environ = {"TPUFLEET_HIDDEN": str(tmp_path), containment.JOB_USER_VARIABLE: "no-such-user-x"}
    with pytest.raises(ValueError, match=r"no user named|cannot run as"):
        containment.from_environ(environ, tmp_path)


def test_processes_of_a_later_namespace_are_not_taken_for_its_own(tmp_path):
    """The kernel gives the number of a namespace that ended to the next one."""
    require(Mechanism.NAMESPACE, tmp_path)
    for _ in range(5):  # other tests create namespaces meanwhile
        earlier = containment.NamespaceInit(False, (), ())
        earlier.close()
        later = containment.NamespaceInit(False, (), ())
        try:
            assert later.pid not in earlier.pids()
        finally:
            later.close()


ORPHANS = """
import ctypes, json, os, subprocess, sys, time
from pathlib import Path
from tpufleet.agent.workload import containment
ctypes.CDLL(None).prctl(containment.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
work = Path(sys.argv[1])
found = containment.detect(work, [work / "hidden"], containment.Mechanism(sys.argv[2]))
if not found.isolated or found.mechanism != sys.argv[2]:
    sys.exit(77)
attempt = found.open(work / "attempt", "")
reader, errors = os.pipe()
variables = os.memfd_create("variables")
os.write(variables, json.dumps(dict(os.environ)).encode())
os.lseek(variables, 0, os.SEEK_SET)
command = attempt.wrap(["sleep", "60"], work, errors=errors, environment=variables)
step = subprocess.Popen(command, start_new_session=True, pass_fds=(errors, variables))
os.close(errors)
os.read(reader, 1)  # ends when the command runs
attempt.kill()
step.wait()
attempt.close()
try:
    print("orphan:", os.waitpid(-1, 0))
except ChildProcessError:
    print("none")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux")
@pytest.mark.parametrize("mechanism", GUARANTEED)
def test_a_killed_attempt_leaves_nothing_for_others_to_reap(tmp_path, mechanism):
    """The first process of a host, which may be a shell in a container, may reap late or never."""
    for name in ("hidden", "attempt"):
        (tmp_path / name).mkdir()
    script = [sys.executable, "-c", ORPHANS, str(tmp_path), mechanism]
    done = subprocess.run(script, capture_output=True, text=True, timeout=100, check=False)
    if done.returncode == 77:
        pytest.skip(f"this host does not offer {mechanism} with namespaces")
    assert done.stdout == "none\n", done.stdout + done.stderr


def test_only_the_assigned_checkpoint_folder_is_visible(tmp_path):
    state = tmp_path / "state"
    own, other = state / "checkpoints" / "own", state / "checkpoints" / "other"
    for folder in (own, other):
        folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(other)
    (tmp_path / "linked-state").symlink_to(state)
    (own / "link").symlink_to(other)

    def visible(checkpoint, hidden=state):
        return containment._visible_checkpoint(str(checkpoint), [hidden])

    assert visible(own) == visible(f"/{own}") == [own]
    assert visible(
        tmp_path / "linked-state" / "checkpoints" / "own", tmp_path / "linked-state"
    ) == [own]
    assert visible(own / "a" / "b") == [own / "a" / "b"] and (own / "a" / "b").is_dir()
    for path in (tmp_path / "link", f"/proc/self/root{other}", state / "token", "gs://b/x", ""):
        assert visible(path) == []
    for path in (own / "link", own / "link" / "new"):
        with pytest.raises(OSError, match=r"symbolic links|Not a directory"):
            visible(path)
    assert list(other.iterdir()) == []


def test_a_hidden_folder_is_not_mounted_as_a_checkpoint_folder(tmp_path):
    (tmp_path / "state").mkdir()
    found = containment.Containment(
        mechanism=Mechanism.MARKS, work_dir=tmp_path, hidden=(tmp_path / "state",)
    )
    found.require_visible(str(tmp_path / "state" / "checkpoints" / "own"))
    found.require_visible(str(tmp_path / "elsewhere"))
    for path in (tmp_path, tmp_path / "state", tmp_path / "state" / "secrets", "/proc/self/root"):
        with pytest.raises(PermissionError, match="hidden from jobs"):
            found.require_visible(str(path))


def test_ownership_is_given_at_any_depth(tmp_path):
    make_nested(tmp_path / "deep", 3000)
    containment._give_to((os.getuid(), os.getgid()), [tmp_path / "deep"])
    deep_folders.delete(tmp_path / "deep")


def test_ownership_is_not_given_through_a_link(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "other" / "x").mkdir()
    user = (os.getuid(), os.getgid())
    for path in (tmp_path / "link", tmp_path / "link" / "x"):
        with pytest.raises(OSError, match=r"is a link|symbolic links|Not a directory"):
            containment._give_to(user, [path])
    containment._give_to(user, [tmp_path / "other"])


@pytest.mark.parametrize(
    ("controllers", "said"),
    [
        ("pids memory io", ""),
        ("io pids", "not limited on this host: memory of jobs"),
        ("memory", "not limited on this host: processes of jobs"),
        ("", "not limited on this host: processes and memory of jobs"),
    ],
)
def test_it_is_said_which_limits_a_host_cannot_enforce(tmp_path, controllers, said):
    (tmp_path / "cgroup.controllers").write_text(controllers)
    group = Cgroup(tmp_path)
    found = containment.Containment(mechanism=Mechanism.CGROUP, work_dir=tmp_path, cgroup=group)
    assert said in found.description
    assert ("not limited" in found.description) == bool(said)
    without = containment.Containment(mechanism=Mechanism.MARKS, work_dir=tmp_path)
    assert "not limited on this host: processes and memory of jobs" in without.description
