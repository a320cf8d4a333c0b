"""Secrets that lie on the host itself: `file:/path`. The control plane passes the reference on.

The environment of a workload, worked out from its assignment. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tpufleet.agent.settings import AgentSettings
from tpufleet.errors import BadInput
from tpufleet.model.agent_protocol import Assignment

PREFIX = "file:"


def resolve_secrets(secrets: Mapping[str, str], token: str) -> dict[str, str]:
    """Every secret by value. One that cannot be read fails the attempt before anything runs."""
    return {
        name: _read(name, value, token) if value.startswith(PREFIX) else value
        for name, value in secrets.items()
    }


def _read(name: str, reference: str, token: str) -> str:
    path = Path(reference.removeprefix(PREFIX))
    try:
        value = path.read_text().removesuffix("\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise BadInput(f"secret {name}: {path} cannot be read on this host: {reason}") from error
    if token in value:
        raise BadInput(f"secret {name}: {path} holds the credential of this host, not of a job")
    return value


RUN_DIR_VARIABLE = "TPUFLEET_RUN_DIR"  # also the mark by which every process of an attempt is found
SIMULATED_PLATFORM = "cpu"  # the platform of a simulated slice


def for_workload(
    assignment: Assignment,
    settings: AgentSettings,
    *,
    base_env: Mapping[str, str],
    attempt_folder: Path,
    agent_bin_dir: str = "",
) -> dict[str, str]:
    """Later layers win: the host's own, the job's, its secrets, and what the platform says."""
    return {
        "PYTHONUNBUFFERED": "1",  # so that `tpu logs -f` shows a line when it is written
        **_inherited(base_env, settings, agent_bin_dir),
        **assignment.env,
        **assignment.secrets,
        **_place(assignment),
        **_folders(assignment, attempt_folder),
        **_multislice(assignment),
        **_simulated(assignment, settings),
    }


def _inherited(base: Mapping[str, str], settings: AgentSettings, own_path: str) -> dict[str, str]:
    """The host's environment without anything that belongs to the control plane."""
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(("TPUFLEET_", "KUBERNETES_")) and settings.token not in value
    }
    if own_path:
        # On a simulated host `python` is the one that runs the fleet; on a real host the agent's
        # only serves where there is no other.
        first = settings.platform == SIMULATED_PLATFORM
        paths = (own_path, kept.get("PATH", "")) if first else (kept.get("PATH", ""), own_path)
        kept["PATH"] = ":".join(part for part in paths if part)
    return kept


def _place(assignment: Assignment) -> dict[str, str]:
    return {
        "TPU_WORKER_ID": str(assignment.worker_id),
        "TPU_WORKER_HOSTNAMES": ",".join(assignment.hostnames),
        "TPUFLEET_COORDINATOR_ADDRESS": assignment.coordinator_address,
        "JAX_COORDINATOR_ADDRESS": assignment.coordinator_address,
        "TPUFLEET_PROCESS_ID": str(assignment.process_id),
        "TPUFLEET_NUM_PROCESSES": str(assignment.num_processes),
        "TPUFLEET_JOB_ID": assignment.job_id,
        "TPUFLEET_ATTEMPT": str(assignment.number),
        "TPUFLEET_ACCELERATOR": assignment.accelerator,
        "TPUFLEET_CHIPS": str(assignment.chips),
    }


def _folders(assignment: Assignment, attempt_folder: Path) -> dict[str, str]:
    return {
        "TPUFLEET_CHECKPOINT_DIR": assignment.checkpoint,
        "TPUFLEET_LOG_DIR": str(attempt_folder / "logs"),
        RUN_DIR_VARIABLE: str(attempt_folder / "run"),
    }


def _multislice(assignment: Assignment) -> dict[str, str]:
    if assignment.num_slices <= 1:
        return {}
    return {
        "MEGASCALE_COORDINATOR_ADDRESS": assignment.megascale_coordinator,
        "MEGASCALE_NUM_SLICES": str(assignment.num_slices),
        "MEGASCALE_SLICE_ID": str(assignment.slice_index),
    }


def _simulated(assignment: Assignment, settings: AgentSettings) -> dict[str, str]:
    if settings.platform != SIMULATED_PLATFORM:
        return {}
    return {"JAX_PLATFORMS": SIMULATED_PLATFORM, "JAX_NUM_CPU_DEVICES": str(assignment.chips)}
