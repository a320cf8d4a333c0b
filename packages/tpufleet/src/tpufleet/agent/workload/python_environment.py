"""The Python environment of a job, made with uv from a cache on the host, and kept there for the
next attempt. Of the agent's own environment it holds only the tpufleet package; what that imports
is found by `host_packages`."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpufleet.agent import own_wheel, threads, uv_tool
from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import attempt_folder, untrusted_files
from tpufleet.agent.workload.environment_variables import SIMULATED_PLATFORM
from tpufleet.agent.workload.exit_diagnosis import AGENT_LINE_PREFIX
from tpufleet.model.fleet.agent_protocol import Assignment
from tpufleet.model.job.attempts import EnvironmentReport

UV = "uv"  # value of `job_python`
# Read in this order; the first that exists declares the dependencies of the job.
LOCK_FILE, PROJECT_FILE, REQUIREMENTS_FILE = "uv.lock", "pyproject.toml", "requirements.txt"
# Of the agent's own Python, in the environment that jobs inherit. A job may set them in its `env`.
PYTHON_VARIABLES = frozenset({"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV"})
_COMPLETE = "complete"  # beside an environment, where the job cannot write
OUR_MINIMUM = (3, 11)  # for tpufleet in the job's environment
_COUNTS = re.compile(r"(Prepared|Installed|Audited|Checked) (\d+) package")
_ERROR_START = re.compile(r"error:|\s*×")
MAX_ERROR_LENGTH = 500


@dataclass(frozen=True, kw_only=True, slots=True)
class JobPython:
    """What to run to make the environment, and the variables of what runs in it."""

    folder: Path
    cache: Path
    source: str  # where the dependencies come from, for people
    steps: tuple[tuple[str, ...], ...]
    uv_variables: Mapping[str, str]
    kept: bool  # an earlier attempt of the job made it: the steps only check it

    def begin(self) -> None:
        """Before the steps. What is left of steps that did not end is not used again."""
        (self.folder.parent / _COMPLETE).unlink(missing_ok=True)
        if not self.kept:
            attempt_folder.delete_folders([self.folder])
        self.folder.mkdir(parents=True, exist_ok=True)
        others = [path for path in self.folder.parents[1].iterdir() if path != self.folder.parent]
        threads.start("cleanup", lambda: attempt_folder.delete_folders(others))

    def finish(self) -> None:
        (self.folder.parent / _COMPLETE).touch()

    def variables(self, environ: Mapping[str, str]) -> dict[str, str]:
        """For the command: its `python` and `pip` are those of the environment."""
        path = f"{self.folder / 'bin'}:{environ.get('PATH', '')}".rstrip(":")
        return {**self.uv_variables, "PATH": path, "VIRTUAL_ENV": str(self.folder)}


def plan(
    assignment: Assignment,
    settings: AgentSettings,
    code: Path,
    *,
    hard_links: bool = True,
) -> JobPython | None:
    """None if the job runs with the Python of the host. BadInput if uv is missing. `hard_links`:
    the attempt sees its folder and the cache on one file system."""
    declared = assignment.python is not None or assignment.dependencies is not None
    if assignment.image is not None or (not declared and settings.job_python != UV):
        return None
    uv = uv_tool.find_uv()
    # Also by owner: a job may be taken over.
    job = hashlib.sha256(f"{assignment.owner}/{assignment.job_id}".encode()).hexdigest()[:16]
    folder = settings.work_dir / "environments" / job / "python"
    kept = (folder.parent / _COMPLETE).exists()
    shared = shared_folder(settings.work_dir, assignment.owner)
    python = assignment.python or _agent_python()
    source, install = _install(uv, assignment, settings, code, folder)
    # Last, so that they are not removed again; pip, for a `setup` that calls it.
    own = ["pip"]
    if _supports_tpufleet(assignment.python):
        own.append(str(_own_wheel(settings.work_dir, shared)))
    steps = [
        (uv, "venv", "--allow-existing", "--python", python, str(folder)),
        *install,
        (uv, "pip", "install", "--no-deps", "--python", str(folder), *own),
    ]
    return JobPython(
        folder=folder,
        cache=shared,
        source=source,
        steps=tuple(steps),
        uv_variables={
            "UV_CACHE_DIR": str(shared / "cache"),
            "UV_PYTHON_INSTALL_DIR": str(shared / "pythons"),
            "UV_PROJECT_ENVIRONMENT": str(folder),
            "UV_NO_PROGRESS": "1",
            **({} if hard_links else {"UV_LINK_MODE": "copy"}),
        },
        kept=kept,
    )


def shared_folder(work_dir: Path, owner: str) -> Path:
    """The cache that the jobs of one user on this host share. A job can change what its cache has
    of a package, which must not be what a job of another user imports."""
    return work_dir / "uv" / hashlib.sha256(owner.encode()).hexdigest()[:16]


def _own_wheel(work_dir: Path, shared: Path) -> Path:
    """Earlier jobs on this host could change the shared folder, so nothing there is trusted. Every
    attempt gets it under one name, by which the cache knows it."""
    name = shared.relative_to(work_dir) / "wheels" / own_wheel.wheel_name()
    untrusted_files.write_below(work_dir, name, own_wheel.pack(for_jobs=True))
    return work_dir / name


def _install(
    uv: str, assignment: Assignment, settings: AgentSettings, code: Path, folder: Path
) -> tuple[str, list[tuple[str, ...]]]:
    pip = (uv, "pip", "install", "--python", str(folder))
    if assignment.dependencies is not None:
        arguments = [part for item in assignment.dependencies for part in _argument(item, code)]
        return "dependencies of the job", [(*pip, *arguments)] if arguments else []
    if (code / LOCK_FILE).is_file() and (code / PROJECT_FILE).is_file():
        return LOCK_FILE, [(uv, "sync", "--frozen", "--no-dev")]
    for name in (PROJECT_FILE, REQUIREMENTS_FILE):
        if (code / name).is_file():
            return name, [(*pip, "-r", name)]
    default = "jax" if settings.platform == SIMULATED_PLATFORM else "jax[tpu]"
    return f"{default}, the default", [(*pip, default)]


def _argument(item: str, code: Path) -> tuple[str, ...]:
    """A file of the working directory that lists requirements, or one requirement."""
    is_file = item.endswith((".txt", ".toml", ".in")) and (code / item).is_file()
    return ("-r", item) if is_file else (item,)


def _agent_python() -> str:
    """The interpreter that runs the agent, as the base of an environment without its packages."""
    name = f"python3.{sys.version_info.minor}"
    path = Path(os.path.realpath(sys.base_prefix), "bin", name)  # `current` may change
    return str(path) if os.access(path, os.X_OK) else sys.executable


def _supports_tpufleet(python: str | None) -> bool:
    return python is None or tuple(map(int, python.split(".")[:2])) >= OUR_MINIMUM


def report(source: str, seconds: float, log_lines: Sequence[str]) -> EnvironmentReport:
    """From what uv printed."""
    counts = dict.fromkeys(("Prepared", "Installed", "Audited", "Checked"), 0)
    for line in log_lines:
        if match := _COUNTS.match(line):
            counts[match[1]] += int(match[2])
    prepared = counts.pop("Prepared")
    return EnvironmentReport(
        source=source,
        seconds=round(seconds, 1),
        packages=sum(counts.values()),
        cached=max(0, sum(counts.values()) - prepared),
    )


def find_error(log_lines: Sequence[str]) -> str:
    """uv's own message about a failure, on one line; empty if it gave none."""
    lines = [line for line in log_lines if not line.startswith(AGENT_LINE_PREFIX)]
    for index, line in enumerate(lines):
        if _ERROR_START.match(line):
            message = " ".join(lines[index:]).replace("×", "").replace("╰─▶", "")
            return " ".join(message.split())[:MAX_ERROR_LENGTH]
    return ""


def runs_on_cpu(folder: Path) -> bool:
    """JAX is installed without the library for TPUs."""
    packages = {
        path.name.partition("-")[0] for path in folder.glob("lib/*/site-packages/*.dist-info")
    }
    return "jax" in packages and not {"libtpu", "libtpu_nightly"} & packages
