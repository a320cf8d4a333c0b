"""The Python environment of a job: made with uv, apart from the agent's."""

from __future__ import annotations

import ensurepip
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from tests.agent.test_environment_variables import ASSIGNMENT, SETTINGS
from tests.agent.test_running import archive
from tests.polling import wait_until
from tpufleet.agent import own_wheel, uv_tool
from tpufleet.agent.workload import python_environment
from tpufleet.errors import BadInput
from tpufleet.model.fleet.hosts import Phase
from tpufleet.model.job import job_file


def planned(folder: Path, *files: str, job_python_setting: str = "uv", **changes):
    code = folder / "code"
    code.mkdir(exist_ok=True)
    for name in files:
        (code / name).touch()
    settings = replace(SETTINGS, work_dir=folder, job_python=job_python_setting, platform="")
    return python_environment.plan(replace(ASSIGNMENT, **changes), settings, code)


@pytest.fixture(autouse=True)
def uv():
    try:
        return uv_tool.find_uv()
    except BadInput as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("files", "source", "installed"),
    [
        ((), "jax[tpu], the default", ["jax[tpu]"]),
        (("requirements.txt",), "requirements.txt", ["-r", "requirements.txt"]),
        (("requirements.txt", "pyproject.toml"), "pyproject.toml", ["-r", "pyproject.toml"]),
        (("pyproject.toml", "uv.lock"), "uv.lock", ["sync", "--frozen", "--no-dev"]),
        (("uv.lock",), "jax[tpu], the default", ["jax[tpu]"]),
    ],
)
def test_on_a_tpu_vm_the_working_directory_declares_the_dependencies(
    tmp_path, files, source, installed
):
    plan = planned(tmp_path, *files)
    assert plan.source == source
    venv, install, own = plan.steps
    assert list(install[-len(installed) :]) == installed
    assert venv[1] == "venv" and own[-2] == "pip" and own[-1].endswith("-py3-none-any.whl")


def test_without_a_field_other_hosts_keep_their_python(tmp_path):
    assert planned(tmp_path, "requirements.txt", job_python_setting="") is None
    assert planned(tmp_path, job_python_setting="", python="3.12") is not None
    assert planned(tmp_path, job_python_setting="", dependencies=()) is not None


def test_dependencies_of_the_job_are_requirements_and_files(tmp_path):
    plan = planned(tmp_path, "dev.txt", dependencies=("optax>=0.2", "dev.txt", "missing.txt"))
    assert plan.steps[1][-4:] == ("optax>=0.2", "-r", "dev.txt", "missing.txt")


def test_tpufleet_is_left_out_of_a_python_that_it_does_not_support(tmp_path):
    assert planned(tmp_path, python="3.10", dependencies=()).steps[-1][-1] == "pip"


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("python", 3.1, "for example '3.10'"),
        ("python", "2.7", "is not a Python version"),
        ("dependencies", ["--index-url=http://evil"], "is not a requirement"),
        ("dependencies", ["jax", "jax"], "duplicate"),
    ],
)
def test_bad_fields_are_rejected(field, value, message):
    document = {"command": "true", "accelerator": "v5e-4", field: value}
    with pytest.raises(BadInput, match=message):
        job_file.parse_job(document)


def test_fields_survive_a_round_trip():
    document = {"command": ["true"], "accelerator": "v5litepod-4", "python": "3.12",
                "dependencies": ["jax[tpu]==0.7.0", "requirements.txt"]}  # fmt: skip
    spec = job_file.parse_job(document)
    assert job_file.parse_job(job_file.to_document(spec)) == spec
    assert (spec.python, spec.dependencies) == ("3.12", ("jax[tpu]==0.7.0", "requirements.txt"))


@pytest.fixture
def index(tmp_path) -> Path:
    """A folder of wheels in place of an index: pip, and a package `greeting`."""
    folder = tmp_path / "index"
    folder.mkdir()
    bundled = [
        *Path(ensurepip.__file__).parent.glob("_bundled/*.whl"),
        *Path("/usr/share/python-wheels").glob("pip-*.whl"),  # of Debian's Python
    ]
    if not bundled:
        pytest.skip("this Python comes without a wheel of pip")
    for wheel in bundled:
        shutil.copy(wheel, folder)
    info = "greeting-1.0.dist-info"
    with zipfile.ZipFile(folder / "greeting-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("greeting.py", "text = 'hello'\n")
        metadata = "Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n"
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    return folder


def offline(index: Path) -> dict[str, str]:
    return {"UV_FIND_LINKS": str(index), "UV_NO_INDEX": "1", "UV_OFFLINE": "1"}


PROGRAM = """
import os, sys, greeting
print(greeting.text, sys.prefix == os.environ["VIRTUAL_ENV"], "agent" in os.environ["PATH"])
print("leaks", [name for name in ("PYTHONPATH", "PYTHONHOME") if name in os.environ])
try:
    import msgspec
except ImportError:
    print("nothing of the agent")
import tpufleet.runtime; tpufleet.jobs
try:
    import pytest
except ImportError:
    print("only what tpufleet imports")
"""


def test_a_job_runs_in_its_own_environment_and_the_second_attempt_keeps_it(
    harness, index, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", "/agent")
    monkeypatch.setenv("VIRTUAL_ENV", "/agent")
    harness.control_plane.snapshots["d1"] = archive(train_py=PROGRAM)
    job = {"snapshot": "d1", "dependencies": ("greeting",), "env": offline(index)}
    harness.assign("python", "train.py", setup=("pip", "--version"), **job)
    harness.start()
    exit = harness.wait_for_exit()
    log = harness.log()
    assert exit.clean, log
    assert "hello True False" in log and "leaks []" in log and "nothing of the agent" in log
    assert "only what tpufleet imports" in log
    assert "environment: from dependencies " in log
    assert "3 packages, 0 from the cache" in log
    assert "pip" in log and "/python/lib/" in log, "pip is that of the environment"
    harness.assign("python", "train.py", attempt_id="j1.1", **job)
    assert harness.wait_for_exit("j1.1").clean
    assert "3 packages, 3 from the cache, in " in harness.log("j1.1")
    assert "Prepared" not in harness.log("j1.1") and "Installed" not in harness.log("j1.1")
    reported = harness.wait_for_phase(Phase.EXITED, "j1.1").environment
    assert (reported.packages, reported.cached) == (3, 3)
    assert reported.source == "dependencies of the job" and reported.seconds > 0


def test_an_environment_that_was_not_completed_is_made_again(harness, index):
    """Files of a package are missing, as after SIGKILL."""
    harness.start()
    job = {"dependencies": ("greeting",), "env": offline(index)}
    damage = "import greeting, os; os.remove(greeting.__file__)"
    harness.assign("python", "-c", damage, **job)
    assert harness.wait_for_exit().clean
    harness.assign("python", "-c", "import greeting", attempt_id="j1.1", **job)
    assert harness.wait_for_exit("j1.1").status == 1
    next(harness.work.glob("environments/*/complete")).unlink()
    harness.assign("python", "-c", "import greeting", attempt_id="j1.2", **job)
    assert harness.wait_for_exit("j1.2").clean


def test_a_host_keeps_the_environment_of_the_last_job_only(harness, index):
    harness.start()
    for job in ("j1", "j2"):
        more = {"job_id": job, "dependencies": ("greeting",), "env": offline(index)}
        harness.assign("true", attempt_id=f"{job}.0", **more)
        assert harness.wait_for_exit(f"{job}.0").clean
    wait_until(lambda: len(list((harness.work / "environments").iterdir())) == 1)


POISON = """
import os, pathlib
for path in pathlib.Path(os.environ["UV_CACHE_DIR"]).rglob("greeting.py"):
    path.chmod(0o644)
    path.write_text("print('POISONED')\\n" + path.read_text())
    print("poisoned", path)
"""


@pytest.mark.slow
def test_a_job_cannot_change_what_a_job_of_another_user_installs(harness, index):
    """From the cache, on a slice of a pool that runs jobs of several users."""
    job = {"dependencies": ("greeting",), "env": offline(index)}
    harness.assign("python", "-c", POISON, owner="mel", **job)
    harness.start()
    assert harness.wait_for_exit().clean
    assert "\npoisoned /" in harness.log()
    harness.assign("python", "-c", "import greeting", attempt_id="j1.1", owner="ada", **job)
    assert harness.wait_for_exit("j1.1").clean
    assert "\nPOISONED" not in harness.log("j1.1")


@pytest.mark.slow
@pytest.mark.parametrize("planted", ["folder", "folder above", "file", "hard link", "directory"])
def test_the_wheel_is_not_written_through_links_of_an_earlier_job(tmp_path, planted):
    work, outside = tmp_path / "work", tmp_path / "outside"
    work.mkdir()
    outside.mkdir()
    (outside / "kept").write_text("kept")
    wheels = python_environment.shared_folder(work, ASSIGNMENT.owner) / "wheels"
    name = own_wheel.wheel_name()
    if planted == "folder above":
        (work / "uv").symlink_to(outside)
    else:
        wheels.parent.mkdir(parents=True)
        if planted == "folder":
            wheels.symlink_to(outside)
        else:
            wheels.mkdir()
    if planted == "file":
        (wheels / name).symlink_to(outside / "kept")
    elif planted == "hard link":
        (wheels / name).hardlink_to(outside / "kept")
    elif planted == "directory":
        (wheels / name).mkdir()
    plan = planned(work, dependencies=())
    assert plan.steps[-1][-1] == str(wheels / name)
    assert (wheels / name).read_bytes() == own_wheel.pack(for_jobs=True)
    assert [path.name for path in outside.iterdir()] == ["kept"]
    assert (outside / "kept").read_text() == "kept"


def test_the_wheel_that_is_there_is_not_touched(tmp_path):
    wheel = Path(planned(tmp_path, dependencies=()).steps[-1][-1])
    before = wheel.stat()
    planned(tmp_path, dependencies=())
    assert wheel.stat().st_mtime_ns == before.st_mtime_ns


def test_a_package_that_does_not_exist_fails_the_setup_in_the_words_of_uv(harness, index):
    harness.assign("echo", "never", dependencies=("no-such-package",), env=offline(index))
    harness.start()
    exit = harness.wait_for_exit()
    assert exit.during_setup and exit.status not in (0, None)
    assert "no-such-package was not found" in exit.log_line, exit.log_line
    assert "never" not in harness.log()


def test_a_job_without_the_fields_runs_with_the_python_of_a_simulated_host(harness):
    harness.assign("python", "-c", "import sys; print(sys.executable)")
    harness.start()
    harness.wait_for_exit()
    assert sys.executable in harness.log() and "environment:" not in harness.log()
