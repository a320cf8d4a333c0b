"""The fields of a job file, for people: meaning, type, default, example. `specs` reads them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JobField:
    name: str
    type_name: str
    default: str  # in words; "required" where there is none
    meaning: str
    example: str

    @property
    def summary(self) -> str:
        """All of it in a line, for `--help` and the documentation."""
        default = "" if self.default == "required" else f"default: {self.default}; "
        return f"{self.meaning} ({self.type_name}; {default}e.g. {self.example})"


FIELDS: tuple[JobField, ...] = (
    JobField(
        "name", "label", "from the command",
        "What the job is called: lower-case letters, digits, dashes; at most 40.", "tiny-lm",
    ),
    JobField(
        "command", "list or text", "required",
        "What every host runs. A list is run as it stands; text is run by `bash -euo pipefail`.",
        "[python, train.py, lr=0.01]",
    ),
    JobField(
        "setup", "list or text", "nothing",
        "What every host runs before the command, in each attempt.",
        "pip install -r requirements.txt",
    ),
    JobField(
        "accelerator", "TPU type", "required",
        "Type and size of one slice, in any spelling that `tpu types` lists.", "v5e-16",
    ),
    JobField("slices", "whole number", "1", "Slices that run together (multislice).", "2"),
    JobField(
        "capacity", "one or a list", "spot",
        "Kinds of capacity in order of preference: spot, on-demand, reserved, queued.",
        "[reserved, spot]",
    ),
    JobField(
        "zones", "one or a list", "the provider's own", "Zones in order of preference.",
        "[us-central1-a, europe-west4-b]",
    ),
    JobField(
        "providers", "one or a list", "the server's own",
        "Sources of slices in order of preference: local, tpu-vm, gke.", "[tpu-vm, gke]",
    ),
    JobField("pool", "label", "none", "Run on slices of this pool only.", "lab"),
    JobField(
        "env", "mapping", "empty", "Environment variables of the command.", "{WANDB_MODE: offline}"
    ),
    JobField(
        "secrets", "mapping", "empty",
        "Environment name → where its value is: a name given to `tpu secret set`, or "
        "file:/path/on/host.",
        "{WANDB_API_KEY: wandb}",
    ),
    JobField(
        "workdir", "folder", "the folder of the job file",
        "What is copied to every host at submit; the command starts in it.", "..",
    ),
    JobField(
        "checkpoint", "location", "a folder that the server chooses",
        "Where checkpoints are kept: a full path or a URL that every host can reach.",
        "gs://bucket/tiny-lm",
    ),
    JobField(
        "timeout", "duration", "none", "Most time spent running, all attempts together.", "12h"
    ),
    JobField("priority", "whole number", "0", "Larger goes first.", "10"),
    JobField(
        "rule", "name", "pre when the first capacity is spot, else pass",
        "What follows a preemption, a lost connection or a busy device: pre, pass, reapply, "
        "rerun, resume. `tpu rules` explains them.",
        "resume",
    ),
    JobField(
        "retries", "mapping", "failure 0, setup 2, memory 1, hang 2, infrastructure 20",
        "How often each kind of failure is tried again. Preemptions are free.", "{failure: 2}",
    ),
    JobField(
        "crash_loop", "whole number", "3",
        "Stop after this many failed attempts in a row without a newer checkpoint.", "5",
    ),
    JobField(
        "grace", "duration", "30s",
        "Time between the request to stop (SIGTERM) and the end (SIGKILL).", "2m",
    ),
    JobField(
        "hung_after", "duration", "30m",
        "An attempt that reported progress, then none for this long, is stopped and tried again; "
        "none: never.",
        "1h",
    ),
    JobField(
        "tags",
        "one or a list",
        "none",
        "Words to find the job by; `name=value` is also a label of its pods.",
        "[sweep-3, baseline]",
    ),
    JobField("notes", "text", "empty", "Anything that you want to remember.", "the one with dropout"),
)

# What people write from habit, and what to write here.
COMMON_ALIASES: dict[str, str] = {
    "cmd": "command", "run": "command", "script": "command", "entrypoint": "command",
    "args": "command", "tpu": "accelerator", "type": "accelerator", "accelerators": "accelerator",
    "num_slices": "slices", "zone": "zones", "region": "zones", "provider": "providers",
    "environment": "env", "envs": "env", "secret": "secrets", "directory": "workdir",
    "working_directory": "workdir", "working_dir": "workdir", "dir": "workdir",
    "checkpoint_dir": "checkpoint", "time_limit": "timeout", "max_run_time": "timeout",
    "retry": "retries", "max_restarts": "retries", "grace_period": "grace", "tag": "tags",
    "note": "notes", "description": "notes", "spot": "capacity", "preemptible": "capacity",
    "infra": "infrastructure", "failures": "failure", "oom": "memory",
}  # fmt: skip
