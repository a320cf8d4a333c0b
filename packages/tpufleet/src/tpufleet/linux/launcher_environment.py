"""The environment of our own programs that run before a job does: those that create namespaces,
enter them and give up rights. It holds nothing of the job, whose variables (LD_PRELOAD, for
example) would act with rights that the job does not have. They travel as data, and are set when the
program of the job is executed."""

from __future__ import annotations

import os

# Marks the processes of a simulated host, see `providers.local.processes`.
HOST_MARKER_VARIABLE = "LOCAL_TPU_SLICE"
# Of the agent's own environment, which the operator made. Some builds of Python need the first.
INHERITED = ("LD_LIBRARY_PATH", HOST_MARKER_VARIABLE)


def launcher_environment() -> dict[str, str]:
    inherited = {name: os.environ[name] for name in INHERITED if name in os.environ}
    return {"PATH": os.defpath, "LC_ALL": "C.UTF-8", **inherited}
