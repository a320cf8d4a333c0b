"""The environment of a workload: derived from its assignment, with secrets that lie on the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from tpufleet.agent.settings import AgentSettings
from tpufleet.agent.workload import host_processes, untrusted_files
from tpufleet.agent.workload.attempt_folder import CERTIFICATES_FILE, TOKEN_FILE
from tpufleet.errors import BadInput, unreadable
from tpufleet.model.fleet.agent_protocol import Assignment

# Also identifies every process of an attempt, including those that left its session.
RUN_DIR_VARIABLE = "TPUFLEET_RUN_DIR"
SIMULATED_PLATFORM = "cpu"
SECRET_FILE_PREFIX = "file:"
MAX_SECRET_BYTES = 64 * 1024  # Linux limits a variable to 128 KiB


def for_workload(
    assignment: Assignment,
    settings: AgentSettings,
    *,
    base_env: Mapping[str, str],
    attempt_folder: Path,
    agent_bin_dir: str = "",
    local: int = 0,
) -> dict[str, str]:
    """Of the `local`-th process on this host. Later layers win: the host's variables, the job's,
    its secrets, the platform's."""
    on_host, assignment = assignment, host_processes.of_process(assignment, local)
    simulated = settings.platform == SIMULATED_PLATFORM
    unseen = simulated or settings.bare_endpoints or assignment.processes_per_host > 1
    return {
        "PYTHONUNBUFFERED": "1",  # so that `tpu logs -f` shows a line when it is written
        **_inherited(base_env, settings, agent_bin_dir),
        **assignment.env,
        **assignment.secrets,
        **_identity(assignment),
        **_folders(assignment, attempt_folder),
        **_api_access(assignment, settings, attempt_folder),
        **_multislice(assignment, settings),
        **(_simulated(assignment) if simulated else {}),
        **(_cluster_for_jax(assignment, local) if unseen else {}),
        **host_processes.variables(on_host, local, simulated=simulated),
    }


def for_host_tool(
    base_env: Mapping[str, str], settings: AgentSettings, attempt_folder: Path
) -> dict[str, str]:
    """Of a program of the host that works for an attempt, with the rights of the agent."""
    own = _inherited(base_env, settings, agent_bin_dir="")
    return {**own, RUN_DIR_VARIABLE: str(attempt_folder / "run")}


def _inherited(
    base_env: Mapping[str, str], settings: AgentSettings, agent_bin_dir: str
) -> dict[str, str]:
    """The host's environment without anything that belongs to the server."""
    inherited = {
        name: value
        for name, value in base_env.items()
        if not name.startswith(("TPUFLEET_", "KUBERNETES_")) and settings.token not in value
    }
    if agent_bin_dir and not settings.job_python:
        # On a simulated host `python` is the agent's own; in a pod the agent's is the fallback
        # where there is no other. A TPU VM makes an environment for each job.
        path = inherited.get("PATH", "")
        simulated = settings.platform == SIMULATED_PLATFORM
        folders = (agent_bin_dir, path) if simulated else (path, agent_bin_dir)
        inherited["PATH"] = ":".join(folder for folder in folders if folder)
    return inherited


def _identity(assignment: Assignment) -> dict[str, str]:
    return {
        "TPU_WORKER_ID": str(assignment.worker_id),
        "TPU_WORKER_HOSTNAMES": ",".join(assignment.hostnames),
        "TPUFLEET_COORDINATOR_ADDRESS": assignment.coordinator_address,
        "JAX_COORDINATOR_ADDRESS": assignment.coordinator_address,
        "TPUFLEET_PROCESS_ID": str(assignment.process_id),
        "TPUFLEET_NUM_PROCESSES": str(assignment.num_processes),
        "TPUFLEET_JOB_ID": assignment.job_id,
        "TPUFLEET_ATTEMPT": str(assignment.number),
        "TPUFLEET_MAX_SLICES": str(assignment.max_slices or assignment.num_slices),
        "TPUFLEET_ACCELERATOR": assignment.accelerator,
        "TPUFLEET_CHIPS": str(assignment.chips),
    }


def _folders(assignment: Assignment, attempt_folder: Path) -> dict[str, str]:
    return {
        "TPUFLEET_CHECKPOINT_DIR": assignment.checkpoint,
        "TPUFLEET_LOG_DIR": str(attempt_folder / "logs"),
        RUN_DIR_VARIABLE: str(attempt_folder / "run"),
    }


def _api_access(
    assignment: Assignment, settings: AgentSettings, attempt_folder: Path
) -> dict[str, str]:
    """What `tpu` and the Python client read. The token is that of the attempt."""
    variables = {
        "TPUFLEET_SERVER": settings.server,
        "TPUFLEET_TOKEN_FILE": str(attempt_folder / TOKEN_FILE),
    }
    if settings.certificates:
        variables["TPUFLEET_CA_FILE"] = str(attempt_folder / CERTIFICATES_FILE)
    return variables


def _multislice(assignment: Assignment, settings: AgentSettings) -> dict[str, str]:
    """Also for one slice of several: libtpu and JAX would find the others in the metadata of the
    host, and wait for them."""
    if assignment.num_slices <= 1 and not settings.multislice:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": assignment.megascale_coordinator,
        "MEGASCALE_NUM_SLICES": str(assignment.num_slices),
        "MEGASCALE_SLICE_ID": str(assignment.slice_index),
    }


def _simulated(assignment: Assignment) -> dict[str, str]:
    return {
        "JAX_PLATFORMS": SIMULATED_PLATFORM,
        "JAX_NUM_CPU_DEVICES": str(assignment.chips),
    }


def _cluster_for_jax(assignment: Assignment, local: int) -> dict[str, str]:
    """Lets `jax.distributed.initialize()` without arguments find the gang where JAX cannot: without
    libtpu, with several processes on a host, and, before 0.10, where the metadata names workers
    without addresses. These of Open MPI it reads first, and the fewest other libraries take them
    for something else."""
    return {
        "OMPI_MCA_orte_hnp_uri": f"0.0;tcp://{assignment.coordinator_address}",
        "OMPI_COMM_WORLD_SIZE": str(assignment.num_processes),
        "OMPI_COMM_WORLD_RANK": str(assignment.process_id),
        "OMPI_COMM_WORLD_LOCAL_RANK": str(local),
    }


def resolve_secrets(
    secrets: Mapping[str, str],
    token: str,
    *,
    hidden: Sequence[Path] = (),
    user: tuple[int, int] | None = None,
) -> dict[str, str]:
    """Replace `file:/path` references with the content of that file on this host. One that cannot
    be read, or that the job itself could not read, fails the attempt before anything runs."""

    def resolve(name: str, value: str) -> str:
        if not value.startswith(SECRET_FILE_PREFIX):
            return value
        path = Path(value.removeprefix(SECRET_FILE_PREFIX))
        content = _read_secret(name, path, hidden, user)
        if token in content:
            raise BadInput(
                f"secret {name}: {path} holds the credential of this host; use another file"
            )
        return content

    return {name: resolve(name, value) for name, value in secrets.items()}


def _read_secret(
    name: str, path: Path, hidden: Sequence[Path], user: tuple[int, int] | None
) -> str:
    try:
        content = untrusted_files.read_named_by_job(path, MAX_SECRET_BYTES, hidden, user)
        return content.decode().removesuffix("\n")
    except (OSError, ValueError) as error:
        raise unreadable(f"{path} on this host", error, f"secret {name}") from error
