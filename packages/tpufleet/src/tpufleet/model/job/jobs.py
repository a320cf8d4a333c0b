"""Jobs: what a user asked to be run to completion."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Annotated, ClassVar, NewType

import msgspec
from msgspec import Meta

from tpufleet.model.job.end_reasons import EndReason, RetryBudget
from tpufleet.model.job.mounts import Mount
from tpufleet.model.job.pod_settings import PodSettings
from tpufleet.model.job.spec_types import (
    Argv,
    Channel,
    Dependency,
    EnvName,
    Image,
    Location,
    MetricName,
    MetricPattern,
    PythonVersion,
    Reuse,
    SecretReference,
    SliceRange,
    Slices,
)
from tpufleet.model.tpu import type_lookup
from tpufleet.model.tpu.type_lookup import TypeName
from tpufleet.model.values import durations
from tpufleet.model.values.names import DISTINCT, Label, Provider, Tag, Zone
from tpufleet.schema import Text, about

JobId = NewType("JobId", str)


class JobState(StrEnum):
    QUEUED = "queued"  # behind others, over a limit, or backing off
    WAITING = "waiting"  # the provider has accepted slices; not all are ready yet
    STARTING = "starting"  # hosts run setup
    RUNNING = "running"  # every host runs the command
    RECOVERING = "recovering"  # an attempt ended; the next will follow
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


ENDED_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})
LIVE_STATES = frozenset(JobState) - ENDED_STATES
WAITING_STATES = frozenset({JobState.QUEUED, JobState.WAITING, JobState.RECOVERING})


class Capacity(StrEnum):
    SPOT = "spot"
    ON_DEMAND = "on-demand"
    RESERVED = "reserved"
    QUEUED = "queued"


class Rule(StrEnum):
    """The reaction to a preemption, a lost connection and a busy device. The table is in
    `policy.retry_rules`."""

    AUTO = "auto"  # the default: retry whatever the program is not to blame for
    PRE = "pre"
    PASS = "pass"
    REAPPLY = "reapply"
    RERUN = "rerun"
    RESUME = "resume"


# Whoever may talk to Docker on the server's machine has root there.
IMAGES_REFUSED = (
    "jobs on `local` run on the server's own machine and may not use its Docker; remove image, use "
    "another provider, or let an admin set `local_containers: true` in the config file"
)
TPU_VM_IMAGES_REFUSED = (
    "jobs on TPU VMs of this server may not use Docker, which would make them root on their hosts; "
    "remove image, or let an admin set `containers: true` in `tpu_vm` of the config file"
)


MAX_COUNT = 1_000_000
# Characters; Linux takes 2 MiB with all arguments by default.
MAX_ENVIRONMENT, MAX_ARGUMENTS = 256 * 1024, 1024 * 1024
_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """Maximum retries for each kind of failure. Preemptions are not counted."""

    ALIASES: ClassVar[Mapping[str, str]] = {"infra": "infrastructure", "oom": "memory"}

    failure: _Count = 0
    setup: _Count = 2
    memory: _Count = 1
    hang: _Count = 2
    infrastructure: _Count = 20

    def limit(self, budget: RetryBudget) -> int:
        return int(getattr(self, budget.value))


# Where a job does not say it. It then applies to programs that report progress only.
HUNG_AFTER = timedelta(minutes=30)


class JobSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The content of a job file. Immutable after submit.

    The first sentence of a description is the help text of the option of `tpu run`, whose `flag`,
    `metavar` and `style` are those of `about` where the type does not say them."""

    # Names from other tools, and the field that they mean here.
    ALIASES: ClassVar[Mapping[str, str]] = {
        "cmd": "command", "run": "command", "script": "command", "entrypoint": "command",
        "args": "command", "tpu": "accelerator", "type": "accelerator",
        "accelerators": "accelerator", "num_slices": "slices", "zone": "zones", "region": "zones",
        "provider": "providers", "environment": "env", "envs": "env", "secret": "secrets",
        "directory": "workdir", "working_directory": "workdir", "working_dir": "workdir",
        "dir": "workdir", "checkpoint_dir": "checkpoint", "time_limit": "timeout",
        "max_run_time": "timeout", "retry": "retries", "max_restarts": "retries",
        "grace_period": "grace", "tag": "tags", "note": "notes", "description": "notes",
        "spot": "capacity", "preemptible": "capacity", "python_version": "python",
        "requires_python": "python", "requirements": "dependencies", "packages": "dependencies",
        "pip": "dependencies",
    }  # fmt: skip

    command: Annotated[
        Argv,
        about(
            "The command that every host runs. A list is an argument vector; text is a script for "
            "`bash -euo pipefail`.",
            example="[python, train.py, lr=0.01]",
            style="argument",
        ),
    ]
    accelerator: Annotated[
        TypeName,  # canonical: v5litepod-16
        about(
            "Type and size of one slice, in any spelling that `tpu types` lists.",
            example="v5e-16",
            style="argument",
        ),
    ]
    name: Annotated[
        Label,  # empty only until `parse_job` has derived it from the command
        about(
            "Name of the job. Lower-case letters, digits and dashes; at most 40.",
            example="tiny-lm",
            default="from the command, and four characters of the id",
            metavar="NAME",
        ),
    ] = ""
    setup: Annotated[
        Argv,
        about(
            "Command that every host runs first, in each attempt.",
            example="pip install -r requirements.txt",
            default="none",
            metavar="SCRIPT",
            style="value",
        ),
    ] = ()
    python: Annotated[
        PythonVersion | None,
        about(
            "Python version of the job's environment, which uv makes on each host.",
            example="'3.12'",
            default="3.12 on TPU VMs; the server's Python on simulated slices; the image's on GKE",
        ),
    ] = None
    dependencies: Annotated[
        Annotated[tuple[Dependency, ...], DISTINCT] | None,
        about(
            "Packages of the job's environment: requirements, or files in the job's folder "
            "that list them. `[]` is an environment without packages.",
            example='["jax[tpu]", optax, requirements.txt]',
            default="on TPU VMs uv.lock, pyproject.toml or requirements.txt in the job's "
            "folder, else jax[tpu]",
            flag="--dependency",
            metavar="REQUIREMENT",
        ),
    ] = None
    image: Annotated[
        Image | None,
        about(
            "Container image that setup and command run in, instead of `python` and "
            "`dependencies`. TPU VMs need `tpu_vm.containers`, simulated slices "
            "`local_containers`; on GKE use `pod.image`.",
            example="us-docker.pkg.dev/my-project/lab/train:7",
        ),
    ] = None
    slices: Annotated[
        Slices,
        about(
            "Number of slices that run together (multislice). An elastic job names the fewest and "
            "the most, and runs on as many of them as there are; `2-4` on the command line.",
            example="{min: 2, max: 4}",
            metavar="N",
            style="value",
        ),
    ] = 1
    processes_per_host: Annotated[
        int,
        Meta(ge=1, le=8),
        about(
            "Processes that run the command on each host and share its chips: 2 for one on each "
            "NUMA node of TPU7x.",
            example="2",
            style="set",
        ),
    ] = 1
    capacity: Annotated[
        tuple[Capacity, ...],
        Meta(min_length=1, extra_json_schema={"uniqueItems": True}),
        about(
            "Capacity types in order of preference: spot, on-demand, reserved, queued.",
            example="[reserved, spot]",
            style="flags",
        ),
    ] = (Capacity.SPOT,)
    zones: Annotated[
        tuple[Zone, ...],
        DISTINCT,
        about(
            "Zones in order of preference.",
            example="[us-central1-a, europe-west4-b]",
            default="the provider's zones",
            flag="--zone",
            metavar="ZONE",
        ),
    ] = ()
    providers: Annotated[
        tuple[Provider, ...],
        DISTINCT,
        about(
            "Providers in order of preference: local, tpu-vm, compute, gke.",
            example="[compute, gke]",
            default="the server's providers",
            flag="--provider",
            metavar="NAME",
        ),
    ] = ()
    pool: Annotated[
        Label | None, about("Run only on slices of this pool.", example="lab", metavar="NAME")
    ] = None
    env: Annotated[
        dict[EnvName, Text],
        Meta(max_length=1000),
        about("Environment variables of the command.", example="{WANDB_MODE: offline}"),
    ] = {}
    secrets: Annotated[
        dict[EnvName, SecretReference],
        Meta(max_length=1000),
        about(
            "Environment variables with secret values. Each value is a name from `tpu secret set`, "
            "or file:/path/on/host.",
            example="{WANDB_API_KEY: wandb}",
            flag="--secret",
            metavar="NAME=REF",
        ),
    ] = {}
    workdir: Annotated[
        Text,
        about(
            "Folder that is copied to every host. The command starts in it.",
            example="..",
            default="the folder of the job file; for `tpu run`, the current folder",
            metavar="FOLDER",
        ),
    ] = "."
    checkpoint: Annotated[
        Location | None,
        about(
            "Where checkpoints are kept. An absolute path or a URL that every host can reach.",
            example="gs://bucket/tiny-lm",
            default="chosen by the server",
        ),
    ] = None
    mounts: Annotated[
        tuple[Mount, ...],
        Meta(max_length=100),
        about(
            "Cloud Storage buckets that the command sees as folders, through gcsfuse. "
            "`--mount BUCKET:PATH[:ro]` on the command line.",
            example="[{bucket: my-data, path: /data, read_only: true}]",
            flag="--mount",
            metavar="BUCKET:PATH",
        ),
    ] = ()
    timeout: Annotated[
        timedelta | None,
        durations.within(1),
        about("Maximum running time, summed over all attempts.", example="12h"),
    ] = None
    max_cost: Annotated[
        Annotated[float, Meta(gt=0, le=1e9)] | None,
        about(
            "Stop the job when it has cost this many dollars, over all attempts. Prices are those "
            "of `tpu cost --prices`.",
            example="50",
            metavar="USD",
        ),
    ] = None
    max_hours: Annotated[
        Annotated[float, Meta(gt=0, le=1e6)] | None,
        about(
            "Stop the job when its slices have been billed for this many hours, over all "
            "attempts. Unlike `timeout`, booting and setup count.",
            example="12",
            style="set",
        ),
    ] = None
    priority: Annotated[
        int,
        Meta(ge=-MAX_COUNT, le=MAX_COUNT),
        about(
            "Jobs of higher priority are placed first. From -100 to 100; beyond that it requires "
            "the admin role.",
            example="10",
        ),
    ] = 0
    rule: Annotated[
        Rule,
        about(
            "Reaction to a preemption, a lost connection or a busy device: auto, pre, pass, "
            "reapply, rerun, resume. See `tpu config rules`.",
            example="resume",
            default="auto: retry them all",
            metavar="RULE",
        ),
    ] = Rule.AUTO
    retries: Annotated[
        Retries,
        about(
            "Maximum retries for each kind of failure. Preemptions are not counted.",
            example="{failure: 2}",
            default="failure 0, setup 2, memory 1, hang 2, infrastructure 20",
            metavar="KIND=N",
        ),
    ] = Retries()
    crash_loop: Annotated[
        int,
        Meta(ge=1, le=MAX_COUNT),
        about(
            "Fail after this many consecutive failed attempts without a newer checkpoint.",
            example="5",
            style="set",
        ),
    ] = 3
    grace: Annotated[
        timedelta,
        # A job that ignores SIGTERM would be paid for, and hold its slices, for so long.
        durations.within(0, timedelta(hours=1)),
        about("Time between SIGTERM and SIGKILL, at most 1h.", example="2m", style="set"),
    ] = timedelta(seconds=30)
    hung_after: Annotated[
        timedelta | None,
        durations.within(1),
        about(
            "Restart an attempt that stops reporting progress for this long. Applies once it has "
            "reported progress; with a value that is not the default also to its output, if it "
            "never did. `none` disables it.",
            example="1h",
            style="set",
        ),
    ] = HUNG_AFTER
    pod: Annotated[
        PodSettings,
        about(
            "Settings of the pods on GKE: image, cpu, memory, service_account, volumes, labels, "
            "tolerations. Other providers ignore them.",
            example="{cpu: 8, service_account: trainer}",
            style="set",
            default="as the server is configured",
        ),
    ] = PodSettings()
    tags: Annotated[
        tuple[Tag, ...],
        DISTINCT,
        about(
            "Tags to find the job by. `name=value` also becomes a label of its pods.",
            example="[sweep-3, baseline]",
            flag="--tag",
            metavar="TAG",
        ),
    ] = ()
    notes: Annotated[
        Text, about("Free text.", example="the one with dropout", default="empty", flag="--note")
    ] = ""
    metrics: Annotated[
        dict[MetricName, MetricPattern],
        Meta(max_length=50),
        about(
            "Metrics to read from the output of a program that reports none. Each value is a "
            "regular expression whose first group is the number; `step` and `total` are progress.",
            example="{loss: 'loss: ([\\w.+-]+)', step: 'step ([0-9]+)'}",
            flag="--metric",
            metavar="NAME=REGEX",
        ),
    ] = {}
    reuse: Annotated[
        Reuse,
        about(
            "Used slices of the pool that it may take: own-finished, others-finished, own-failed, "
            "others-failed. A slice that no job used is free for all.",
            example="[own-finished, own-failed]",
            default="all of them",
            metavar="KIND",
        ),
    ] = ()
    require_reservation: Annotated[
        bool,
        about(
            "Start only while its owner has a reservation of the pool, see `tpu reserve`.",
            example="true",
        ),
    ] = False
    notify: Annotated[
        tuple[Channel, ...],
        DISTINCT,
        about(
            "Channels of `tpu notify` that get messages about this job. `team:end+failure` names "
            "the events: end, failure, recovery; `none` silences it.",
            example="[team, mail:failure]",
            default="as each channel says",
            metavar="CHANNEL",
        ),
    ] = ()

    def check(self) -> Iterator[tuple[str, str]]:
        for name in self.secrets:
            if name in self.env:
                yield f"secrets.{name}", "also in env; remove one"
        for name, texts, most in (
            ("command", self.command, MAX_ARGUMENTS),
            ("setup", self.setup, MAX_ARGUMENTS),
            ("env", (*self.env, *self.env.values()), MAX_ENVIRONMENT),
        ):
            if (size := sum(map(len, texts))) > most:
                yield name, f"{size} characters; at most {most}: put them in a file"
        if self.pool is not None and self.pod != PodSettings():
            yield "pod", "not with pool: its slices have their pods already; remove one"
        for name in ("python", "dependencies"):
            if self.image is not None and getattr(self, name) is not None:
                yield name, "the image has its own packages; remove this field or image"
        chips = type_lookup.find(self.accelerator).chips_per_host
        shared = self.processes_per_host > 1 and (self.image is not None or self.mounts)
        if chips % self.processes_per_host or shared:
            problem = f"must divide the {chips} chips of a host; not with image or mounts"
            yield "processes_per_host", problem
        paths = [mount.path for mount in self.mounts]
        for index, path in enumerate(paths):
            if path in paths[:index]:
                yield f"mounts[{index}].path", f"{path} is used twice"

    @property
    def min_slices(self) -> int:
        """Fewer cannot run it."""
        return self.slices.min if isinstance(self.slices, SliceRange) else self.slices

    @property
    def max_slices(self) -> int:
        """What it asks for."""
        return self.slices.max if isinstance(self.slices, SliceRange) else self.slices

    @property
    def labels(self) -> dict[str, str]:
        """Tags of the form name=value."""
        parts = (tag.partition("=") for tag in self.tags)
        return {name: value for name, equals, value in parts if name and equals}


ID_LETTERS, ID_LENGTH = "abcdefghijklmnopqrstuvwxyz234567", 12  # of the ids that clients generate
_GENERATED_ID = re.compile(f"(?:fs-)?(?:[{ID_LETTERS}]{{{ID_LENGTH}}}){{1,2}}")  # fs-: Firestore


def is_generated_id(text: str) -> bool:
    """By a client, at random; else a user chose it, and it may also be the name of a job."""
    return _GENERATED_ID.fullmatch(text) is not None and not text.isalpha()


def default_name(base: str, job_id: JobId) -> str:
    """A unique name for a job whose user chose none: `train-k3f9`."""
    return f"{base[:35]}-{job_id[:4]}"


class ParentRelation(StrEnum):
    """How a job was derived from its parent."""

    RESUME = "resume"
    RERUN = "rerun"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    id: JobId
    spec: JobSpec
    owner: str
    submitted_at: datetime
    state: JobState = JobState.QUEUED
    reason: str = "submitted"  # why it is in this state
    snapshot: str | None = None  # digest of the code it runs
    checkpoint: str = ""  # where its checkpoints live; a resumed job shares its parent's
    parent: JobId | None = None
    parent_relation: ParentRelation | None = None
    cancel_requested_by: str | None = None
    not_before: datetime | None = None  # backoff before the next attempt
    fresh_from: int = 0  # checkpoints of earlier attempts are not loaded (rule `rerun`)
    ended_at: datetime | None = None
    end_reason: EndReason | None = None
    advice: str = ""
    held_by: str | None = None  # a user who keeps it from being placed
    queued_at: datetime | None = None  # its place among jobs of one priority; None: submitted_at
    over_limit: str = ""  # the limit on cost or time that it has reached: it is being stopped

    @property
    def ended(self) -> bool:
        return self.state in ENDED_STATES
