"""Jobs in a container image, with a stand-in for the docker program."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tpufleet.agent.workload.container_image import JobContainer
from tpufleet.errors import BadInput
from tpufleet.model.job import job_file
from tpufleet.model.job.attempts import AttemptId
from tpufleet.model.job.end_reasons import EndReason
from tpufleet.model.job.mounts import Mount, mounted_command
from tpufleet.policy.recovery.verdicts import cause_of

# Runs the command on this host, with the variables that are passed on and nothing else.
DOCKER = r"""#!/bin/bash
printf '%q ' "$@" >>"$0.calls"; echo >>"$0.calls"
env >>"$0.environ"
[[ "$1" = run ]] || exit 0
shift
names=()
while [[ "$1" == --* ]]; do
  case "$1" in
    --env-file=*) mapfile -t names <"${1#--env-file=}" ;;
    --workdir=*) cd "${1#--workdir=}" ;;
    --entrypoint=*) program="${1#--entrypoint=}" ;;
  esac
  shift
done
shift
exec env -i PATH=/usr/bin:/bin "${names[@]}" "$program" "$@"
"""


@pytest.fixture
def docker(tmp_path: Path) -> Path:
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    program.write_text(DOCKER)
    program.chmod(0o755)
    return program


def calls(docker: Path) -> list[str]:
    return Path(f"{docker}.calls").read_text().splitlines()


def host_environ(docker: Path) -> dict[str, str]:
    return {"PATH": f"{docker.parent}:{os.environ['PATH']}", "HOST_ONLY": "1"}


def test_a_job_runs_in_its_image_with_its_own_variables_only(harness, docker):
    harness.assign(
        "sh", "-c", "pwd; echo host=$HOST_ONLY key=$KEY cache=$JAX_COMPILATION_CACHE_DIR",
        image="lab/train:7", env={"KEY": "s3cret", "DOCKER_HOST": "tcp://mallory"},
        setup=("touch", "prepared"),
    )  # fmt: skip
    harness.start(base_env=host_environ(docker))
    exit = harness.wait_for_exit()
    assert exit.clean, harness.log()
    (compiled,) = (each for each in (harness.work / "compiled").iterdir() if each.is_dir())
    assert f"host= key=s3cret cache={compiled}" in harness.log()
    assert str(harness.work / "j1.0" / "code") in harness.log()
    setup, command, *removed = calls(docker)
    assert "lab/train:7 prepared" in setup and "--network=host" in command
    assert "s3cret" not in command, "not in the arguments, which others can see"
    environ = Path(f"{docker}.environ").read_text()
    assert "HOST_ONLY=1" in environ and "DOCKER_HOST" not in environ and "s3cret" not in environ
    assert "--privileged" not in command, "a simulated host has no devices"
    assert f"--user={os.getuid()}:{os.getgid()} --cap-drop=ALL" in command
    mounts = [part for part in command.split() if part.startswith("--volume")]
    assert mounts == [
        f"--volume={path}:{path}" for path in (harness.work / "j1.0", compiled, harness.checkpoint)
    ]
    assert removed and all("rm --force tpufleet-" in call for call in removed)


def test_a_stopped_job_leaves_no_container(harness, docker):
    harness.assign("sleep", "600", image="lab/train:7")
    harness.start(base_env=host_environ(docker))
    harness.wait_for_log("command: sleep")
    harness.control_plane.assignment = None
    assert harness.wait_for_exit().stopped_by_agent
    assert "rm --force" in calls(docker)[-1] and harness.processes() == []


def test_containers_on_tpu_hosts_get_the_devices(docker):
    container = JobContainer("lab/train:7", AttemptId("j1.0"), str(docker.parent))
    argv = container.wrap(
        ("python", "train.py"), folders=[Path("/w")], workdir=Path("/w/c"), user=None
    )
    assert "--ulimit=memlock=-1" in argv, "VFIO locks memory, also for users other than root"
    assert "--privileged" in argv and argv[-2:] == ("lab/train:7", "train.py")
    assert [part for part in argv if part.startswith("--env")] == ["--env-file=/dev/stdin"]
    assert "--volume=/w:/w" in argv and "--workdir=/w/c" in argv


def test_images_are_refused_on_hosts_that_do_not_allow_them(harness, docker):
    harness.assign("true", image="lab/train:7")
    harness.start_process(PATH=host_environ(docker)["PATH"], TPUFLEET_IMAGES="refused")
    assert "local_containers: true" in harness.wait_for_exit().log_line
    assert not Path(f"{docker}.calls").exists()


def test_docker_on_the_server_mounts_no_folder_that_the_job_chose(harness, docker):
    hidden = harness.folder / "state"
    (hidden / "checkpoints").mkdir(parents=True)
    own = hidden / "checkpoints" / "j1"
    theirs = {"image": "lab/train:7", "owned_by_admin": True}
    harness.assign("true", checkpoint=str(harness.checkpoint), **theirs)
    harness.start_process(PATH=host_environ(docker)["PATH"], TPUFLEET_HIDDEN=str(hidden))
    assert "cannot be mounted into an image on `local`" in harness.wait_for_exit().log_line
    harness.assign("true", checkpoint=str(own), attempt_id="j1.1", **theirs)
    assert harness.wait_for_exit("j1.1").clean
    assert f"--volume={own}:{own}" in calls(docker)[0]


def test_a_host_without_docker_says_so(harness, tmp_path):
    harness.assign("true", image="lab/train:7")
    harness.start(base_env={"PATH": str(tmp_path)})
    assert "docker is not installed on this host" in harness.wait_for_exit().log_line


@pytest.mark.parametrize("fields", [{"image": "-x"}, {"image": "a:1", "python": "3.12"}])
def test_bad_images_are_rejected(fields):
    with pytest.raises(BadInput, match=r"is not an image|the image has its own packages"):
        job_file.parse_job({"command": "true", "accelerator": "v5e-4", **fields})


@pytest.mark.parametrize("value", ["a\nB=c", "a\rb", "x" * 70_000], ids=["lines", "return", "long"])
def test_variables_that_docker_would_misread_fail_the_attempt(harness, docker, value):
    harness.assign("true", image="lab/train:7", secrets={"KEY": value})
    harness.start(base_env=host_environ(docker))
    assert "image: KEY has" in harness.wait_for_exit().log_line
    assert not Path(f"{docker}.calls").exists()


def test_a_host_that_cannot_mount_fails_the_setup_and_not_the_program(harness):
    harness.assign(*mounted_command([Mount(bucket="b", path="/mnt/buckets/b")], ["true"]))
    harness.start(base_env={"PATH": "/usr/bin:/bin"})
    exit = harness.wait_for_exit()
    assert exit.during_setup and "gcsfuse is not installed on this host" in exit.log_line
    assert cause_of(exit) is EndReason.SETUP_FAILED


def test_a_failure_of_docker_itself_is_not_one_of_the_program(harness, docker):
    docker.write_text(
        "#!/bin/bash\n[[ $1 = run ]] || exit 0\n"
        "echo 'docker: Error response from daemon: pull access denied for lab/train.' >&2\n"
        "echo >&2\necho \"Run 'docker run --help' for more information\" >&2\nexit 125\n"
    )
    harness.assign("sh", "-c", "true", image="lab/train:7")
    harness.start(base_env=host_environ(docker))
    exit = harness.wait_for_exit()
    assert exit.during_setup and exit.status == 125
    assert exit.log_line.startswith("docker: Error response from daemon: pull access denied")
