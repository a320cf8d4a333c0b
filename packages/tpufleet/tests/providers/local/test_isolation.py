"""Jobs on simulated slices, with a real server: they see nothing of it and leave nothing behind."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.polling import wait_until
from tests.server_process import Server
from tpufleet import config
from tpufleet.agent.workload import containment
from tpufleet.client.fleet import FleetClient, new_job_id
from tpufleet.compose import providers
from tpufleet.model.api_types import NewJob
from tpufleet.model.people.users import Role

# Prints what it can read. The names are told to it; it also looks at every process it can see.
SPY = """
import os, pathlib, sys
state = pathlib.Path(sys.argv[1])
for name in ("token", "secret", "server.json"):
    try:
        path = state / name
        print("READ", path, path.read_bytes()[:20])
    except OSError as error:
        print("refused", path, error.strerror)
for path in state.rglob("*"):
    if path.is_file() and "checkpoints" not in path.parts and "work" not in path.parts:
        print("READ", path)
for process in pathlib.Path("/proc").glob("[0-9]*"):
    try:
        command = (process / "cmdline").read_bytes()
        (process / "environ").read_bytes()
    except OSError:
        continue
    if b"tpufleet\\0serve" in command or b"tpufleet\\0agent" in command:
        print("READ environ", process, command)
for escape in (["umount", str(state)], ["mount", "-t", "proc", "proc", "/mnt"],
               ["nsenter", "-t", "1", "-m", "true"]):
    import subprocess
    try:
        if subprocess.run(escape, capture_output=True).returncode == 0:
            print("READ by", escape)
    except FileNotFoundError:
        pass
checkpoint = pathlib.Path(os.environ["TPUFLEET_CHECKPOINT_DIR"])
checkpoint.mkdir(parents=True, exist_ok=True)
(checkpoint / "step_3").write_text("kept")
print("done", os.getpid())
"""


# Seconds in which a server and all its slices stop, on a busy machine too.
STOPPED_WITHIN = 120


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "home")
    umask = os.umask(0o077)  # hardened servers keep new files of root private
    try:
        server.start()
    finally:
        os.umask(umask)
    yield server
    stop_all(server)
    server.cleanup()


def stop_all(server: Server) -> None:
    subprocess.run(
        [sys.executable, "-m", "tpufleet", "serve", "--stop", "--all"],
        env={"TPUFLEET_HOME": str(server.home), "PATH": "/usr/bin:/bin"},
        check=True,
        timeout=STOPPED_WITHIN,
    )


def submit(client: FleetClient, *command: str) -> str:
    job_id = new_job_id()
    spec = {"name": "spy", "command": list(command), "accelerator": "v5e-4", "grace": "1s"}
    client.submit([NewJob(id=job_id, spec=spec)])
    return job_id


def log_of(server: Server, job: str) -> str:
    return "".join(server.client.logs(job))


def test_a_job_reads_neither_the_state_folder_nor_the_environment_of_the_server(server):
    if not containment.detect(server.home, hidden=(server.home,)).isolated:
        pytest.skip("this host offers no namespaces")
    job = submit(server.client, sys.executable, "-c", SPY, str(server.home))
    wait_until(
        lambda: server.client.job(job).job.state.value == "succeeded",
        describe=lambda: log_of(server, job),
    )
    lines = log_of(server, job).splitlines()
    assert [line for line in lines if line.startswith("[0] READ")] == []
    assert [line for line in lines if line.startswith("[0] done")]
    assert (server.home / "checkpoints" / job / "step_3").read_text() == "kept"


def test_a_job_reads_no_credential_of_the_server_outside_its_state_folder(tmp_path):
    secret = tmp_path / "keys" / "secret"
    secret.parent.mkdir()
    secret.write_text("5" * 64)
    secret.chmod(0o600)
    server = Server(tmp_path / "home", TPUFLEET_SECRET_FILE=str(secret))
    if not containment.detect(server.home, hidden=(server.home,)).isolated:
        pytest.skip("this host offers no namespaces")
    server.start()
    try:
        job = submit(server.client, "sh", "-c", f"cat {secret}; echo looked")
        wait_until(
            lambda: server.client.job(job).job.state.value == "succeeded",
            describe=lambda: log_of(server, job),
        )
        log = log_of(server, job)
        assert "looked" in log and "555" not in log
    finally:
        stop_all(server)
        server.cleanup()


def test_every_credential_of_a_server_is_hidden_from_jobs(tmp_path):
    names = ("token_file", "secret_file", "admin_token_file", "tls_key")
    files = {name: tmp_path / name for name in names}
    variables = {f"TPUFLEET_{name.upper()}": str(file) for name, file in files.items()}
    settings = config.load({**variables, "TPUFLEET_TLS_CERT": str(tmp_path / "cert")}, tmp_path)
    hidden = providers._private_paths(settings)
    assert {*files.values(), settings.home, settings.data, settings.config_file} <= {*hidden}


# Uses `tpu` on its own job, and on another one.
OWN_TOKEN = """
import os, pathlib, subprocess, sys
own, other = os.environ["TPUFLEET_JOB_ID"], sys.argv[1]
def tpu(*arguments):
    command = [sys.executable, "-m", "tpufleet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    print(arguments[0], "->", done.returncode, (done.stdout + done.stderr).replace("\\n", " "))
tpu("show", own)
tpu("tag", own, "converged")
tpu("cancel", other)
print("token", pathlib.Path(os.environ["TPUFLEET_TOKEN_FILE"]).read_text())
"""


def test_a_program_acts_on_its_own_job_with_the_token_of_its_attempt(server):
    """As a member, whose jobs run as another user where the server is root's."""
    with member(server, "mel") as client:
        other = submit(client, "sleep", "600")
        job = submit(client, sys.executable, "-c", OWN_TOKEN, other)
        wait_until(
            lambda: server.client.job(job).job.state.value == "succeeded",
            describe=lambda: log_of(server, job),
        )
        log = log_of(server, job)
        assert "[0] show -> 0" in log and "[0] tag -> 0" in log, log
        assert "[0] cancel -> 0" not in log and f"limited to job {job}" in log
        assert "[0] token ***" in log and "tpj_" not in log
        assert client.job(job).row.tags == ("converged",)
        client.cancel(other)


# Of a member: as whom it runs, what it can change, and whether Python works there.
INTRUDER = """
import os, pathlib, subprocess, sys, json, tpufleet.runtime
print("user", os.getuid())
for path in map(pathlib.Path, sys.argv[1:]):
    for action in (lambda: path.read_text(), lambda: path.write_text("changed")):
        try:
            action()
            print("REACHED", path)
        except OSError as error:
            print("refused", path, error.strerror)
pathlib.Path(os.environ["TPUFLEET_CHECKPOINT_DIR"], "own").write_text("own")
pathlib.Path("own").write_text("own")
print("done")
"""


def member(server: Server, name: str) -> FleetClient:
    server.client.put_user(name, Role.MEMBER)
    return FleetClient(server.url, server.client.create_token(user=name).token, timeout=900)


def test_the_job_of_a_member_runs_as_another_user_if_the_server_runs_as_root(server, tmp_path):
    """At default settings. Python may lie where only root may enter, as in /root."""
    if not containment.detect(server.home, hidden=(server.home,)).isolated:
        pytest.skip("this host offers no namespaces")
    private = tmp_path / "private"
    private.write_text("of the server's user")
    private.chmod(0o600)
    with member(server, "mel") as client:
        job = submit(
            client, sys.executable, "-c", INTRUDER, str(private), str(server.home / "token")
        )
    wait_until(
        lambda: server.client.job(job).job.state.value == "succeeded",
        describe=lambda: log_of(server, job),
    )
    log = log_of(server, job)
    if os.geteuid() == 0:
        assert f"[0] user {pwd.getpwnam('nobody').pw_uid}" in log
        assert "[0] REACHED" not in log and private.read_text() == "of the server's user"
        assert "jobs of members run as user" in server.log_tail()
    else:
        assert f"[0] user {os.geteuid()}" in log and f"[0] REACHED {server.home}" not in log
    assert (server.home / "checkpoints" / job / "own").read_text() == "own"


@pytest.mark.slow
def test_on_a_shared_server_of_root_the_job_of_an_admin_runs_as_another_user(tmp_path):
    """An admin of the fleet is not the owner of the machine."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to run jobs as another user")
    server = Server(
        tmp_path / "home",
        TPUFLEET_LISTEN="0.0.0.0:0",
        TPUFLEET_PROVIDERS="local",
        TPUFLEET_INSECURE_HTTP="true",
    )
    if not containment.detect(server.home, hidden=(server.home,)).isolated:
        pytest.skip("this host offers no namespaces")
    private = tmp_path / "private"
    private.write_text("of the server's user")
    private.chmod(0o600)
    server.start()
    try:
        job = submit(server.client, sys.executable, "-c", INTRUDER, str(private))
        wait_until(
            lambda: server.client.job(job).job.state.value == "succeeded",
            describe=lambda: log_of(server, job),
        )
        log = log_of(server, job)
        assert f"[0] user {pwd.getpwnam('nobody').pw_uid}" in log and "[0] REACHED" not in log
        jobs = server.client.status().local_jobs
        assert jobs is not None and jobs.isolated and "(nobody)" in jobs.description
        assert jobs.description in server.log_tail()
        assert server.url.startswith("http://127.0.0.1:")  # where commands on this machine find it
    finally:
        stop_all(server)
        server.cleanup()


def test_the_job_of_a_member_does_not_see_the_files_of_other_jobs(server):
    if not containment.detect(server.home, hidden=(server.home,)).isolated:
        pytest.skip("this host offers no namespaces")
    script = "echo secret > $TPUFLEET_CHECKPOINT_DIR/mine; echo secret > mine; sleep 600"
    first = submit(server.client, "sh", "-c", script)
    # `rglob` fails on folders that are deleted meanwhile.
    found = lambda: [
        Path(folder, "mine") for folder, _, names in os.walk(server.home) if "mine" in names
    ]
    wait_until(lambda: len(found()) == 2, describe=lambda: log_of(server, first))
    with member(server, "mel") as client:
        paths = map(str, found())
        job = submit(client, sys.executable, "-c", INTRUDER, *paths)
    wait_until(
        lambda: server.client.job(job).job.state.value == "succeeded",
        describe=lambda: log_of(server, job),
    )
    assert "[0] REACHED" not in log_of(server, job)
    assert {path.read_text() for path in found()} == {"secret\n"}


@pytest.mark.parametrize(
    "end",
    [
        "cancel",
        pytest.param("stop --all", marks=pytest.mark.slow),
        pytest.param("release", marks=pytest.mark.slow),
    ],
)
def test_nothing_of_a_job_is_left(server, tmp_path, end):
    beat = tmp_path / "beat"
    writer = f"i=0; while [ $i -lt 1200 ] && date > {beat}; do i=$((i+1)); sleep 0.05; done"
    script = f"setsid env -i sh -c 'trap \"\" TERM HUP; {writer}' >/dev/null 2>&1 & sleep 60"
    job = submit(server.client, "sh", "-c", script)
    wait_until(beat.exists)
    if end == "cancel":
        server.client.cancel(job)
        wait_until(lambda: server.client.job(job).job.state.value == "cancelled")
    elif end == "release":
        [tpu_slice] = server.client.slices()
        server.client.inject_fault(tpu_slice.id, "preempt")
        wait_until(lambda: not any(s.id == tpu_slice.id for s in server.client.slices()))
        server.client.cancel(job)
        wait_until(lambda: server.client.job(job).job.state.value == "cancelled")
    else:
        stop_all(server)
    beat.unlink(missing_ok=True)
    with pytest.raises(AssertionError, match="timed out"):
        wait_until(beat.exists, timeout=1.0)
