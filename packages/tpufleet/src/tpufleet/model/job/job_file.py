"""The job file. `FIELDS` defines each field once: the parser, the options of `tpu run`, the JSON
schema and the table in the documentation are all generated from it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from enum import StrEnum
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.job import pod_fields
from tpufleet.model.job.jobs import JobSpec
from tpufleet.model.values import field_types as types
from tpufleet.model.values.field_types import FieldType, ParseErrors, label_error, zone_error

__all__ = ["FIELDS", "json_schema", "label_error", "parse_job", "to_document", "zone_error"]

MAX_SLICES = 4096

_LAUNCHER = re.compile(
    r"(python|pypy)[0-9.]*|bash|sh|env|exec|uv|run|poetry|time|nice|torchrun|cd|set"
)


class OptionStyle(StrEnum):
    """How `tpu run` takes a field on its command line."""

    ARGUMENT = "argument"  # positional
    VALUE = "value"  # --pool lab
    REPEATED = "repeated"  # --zone a --zone b
    PAIRS = "pairs"  # --env A=1 --env B=2
    FLAGS = "flags"  # one flag for each choice: --spot
    SWITCH = "switch"  # --require-reservation


@dataclass(frozen=True, slots=True, kw_only=True)
class JobField:
    name: str
    type: FieldType
    description: str  # the first sentence is the help text of the option
    example: str
    default_text: str  # for people; the value is the default of JobSpec
    # The default where it depends on fields that precede this one.
    default_from: Callable[[dict[str, Any]], Any] | None = None
    style: OptionStyle = OptionStyle.VALUE
    flag: str = ""  # where it is not the name of the field
    metavar: str = ""

    @property
    def required(self) -> bool:
        return self.name not in _DEFAULTS and self.default_from is None

    @property
    def option(self) -> str:
        return self.flag or f"--{self.name.replace('_', '-')}"

    @property
    def summary(self) -> str:
        """One line for `tpu submit --help`."""
        default = "" if self.required else f"default: {self.default_text}; "
        return f"{self.description} ({self.type.label}; {default}e.g. {self.example})"

    @property
    def option_help(self) -> str:
        sentence = re.split(r"\.(?:\s|$)", self.description)[0]
        if self.default_text in ("none", "empty"):
            return f"{sentence}."
        return f"{sentence} (default: {self.default_text})."


def _name_from_command(parsed: dict[str, Any]) -> str:
    """`python -m lab.train lr=1` → train; `./run.sh` → run."""
    command = parsed.get("command") or ()
    shell = types.SHELL
    arguments = command[len(shell) :] if command[: len(shell)] == shell else command
    for word in [part for text in arguments for part in text.split()]:
        stem = word.rpartition("/")[2]
        if word.startswith("-") or "=" in word or _LAUNCHER.fullmatch(stem):
            continue
        parts = [part for part in stem.split(".") if part not in ("", "py", "sh")]
        if label := types.label_from(parts[-1] if parts else ""):
            return label
    return "job"


_DEFAULTS: dict[str, Any] = {
    each.name: each.default_factory() if each.default_factory is not MISSING else each.default
    for each in fields(JobSpec)
    if each.default is not MISSING or each.default_factory is not MISSING
}

FIELDS: tuple[JobField, ...] = (
    JobField(
        name="command",
        type=types.ARGV,
        description="The command that every host runs. A list is an argument vector; text is a "
        "script for `bash -euo pipefail`.",
        example="[python, train.py, lr=0.01]",
        default_text="required",
        style=OptionStyle.ARGUMENT,
    ),
    JobField(
        name="accelerator",
        type=types.ACCELERATOR,
        description="Type and size of one slice, in any spelling that `tpu types` lists.",
        example="v5e-16",
        default_text="required",
        style=OptionStyle.ARGUMENT,
    ),
    JobField(
        name="name",
        type=types.LABEL,
        description="Name of the job. Lower-case letters, digits and dashes; at most 40.",
        example="tiny-lm",
        default_text="from the command, and four characters of the id",
        default_from=_name_from_command,
        metavar="NAME",
    ),
    JobField(
        name="setup",
        type=types.ARGV,
        description="Command that every host runs first, in each attempt.",
        example="pip install -r requirements.txt",
        default_text="none",
        metavar="SCRIPT",
    ),
    JobField(
        name="python",
        type=types.PYTHON,
        description="Python version of the job's environment, which uv makes on each host.",
        example="'3.12'",
        default_text="3.12 on TPU VMs; the server's Python on simulated slices; the image's on GKE",
        metavar="VERSION",
    ),
    JobField(
        name="dependencies",
        type=types.DEPENDENCIES,
        description="Packages of the job's environment: requirements, or files in the working "
        "directory that list them. `[]` is an environment without packages.",
        example='["jax[tpu]", optax, requirements.txt]',
        default_text="on TPU VMs uv.lock, pyproject.toml or requirements.txt in the working "
        "directory, else jax[tpu]",
        style=OptionStyle.REPEATED,
        flag="--dependency",
        metavar="REQUIREMENT",
    ),
    JobField(
        name="image",
        type=types.IMAGE,
        description="Container image that setup and command run in, instead of `python` and "
        "`dependencies`. TPU VMs need `tpu_vm.containers`, simulated slices `local_containers`; on "
        "GKE use `pod.image`.",
        example="us-docker.pkg.dev/my-project/lab/train:7",
        default_text="none",
        metavar="IMAGE",
    ),
    JobField(
        name="slices",
        type=types.integer(1, MAX_SLICES),
        description="Number of slices that run together (multislice).",
        example="2",
        default_text="1",
        metavar="N",
    ),
    JobField(
        name="capacity",
        type=types.CAPACITY,
        description="Capacity types in order of preference: spot, on-demand, reserved, queued.",
        example="[reserved, spot]",
        default_text="spot",
        style=OptionStyle.FLAGS,
    ),
    JobField(
        name="zones",
        type=types.ZONES,
        description="Zones in order of preference.",
        example="[us-central1-a, europe-west4-b]",
        default_text="the provider's zones",
        style=OptionStyle.REPEATED,
        flag="--zone",
        metavar="ZONE",
    ),
    JobField(
        name="providers",
        type=types.PROVIDERS,
        description="Providers in order of preference: local, tpu-vm, gke.",
        example="[tpu-vm, gke]",
        default_text="the server's providers",
        style=OptionStyle.REPEATED,
        flag="--provider",
        metavar="NAME",
    ),
    JobField(
        name="pool",
        type=types.LABEL,
        description="Run only on slices of this pool.",
        example="lab",
        default_text="none",
        metavar="NAME",
    ),
    JobField(
        name="env",
        type=types.ENV,
        description="Environment variables of the command.",
        example="{WANDB_MODE: offline}",
        default_text="empty",
        style=OptionStyle.PAIRS,
        metavar="NAME=VALUE",
    ),
    JobField(
        name="secrets",
        type=types.SECRETS,
        description="Environment variables with secret values. Each value is a name from "
        "`tpu secret set`, or file:/path/on/host.",
        example="{WANDB_API_KEY: wandb}",
        default_text="empty",
        style=OptionStyle.PAIRS,
        flag="--secret",
        metavar="NAME=REF",
    ),
    JobField(
        name="workdir",
        type=types.FOLDER,
        description="Folder that is copied to every host. The command starts in it.",
        example="..",
        default_text="the folder of the job file; for `tpu run`, the current folder",
        metavar="FOLDER",
    ),
    JobField(
        name="checkpoint",
        type=types.LOCATION,
        description="Where checkpoints are kept. An absolute path or a URL that every host can "
        "reach.",
        example="gs://bucket/tiny-lm",
        default_text="chosen by the server",
        metavar="LOCATION",
    ),
    JobField(
        name="mounts",
        type=types.MOUNTS,
        description="Cloud Storage buckets that the command sees as folders, through gcsfuse. "
        "`--mount BUCKET:PATH[:ro]` on the command line.",
        example="[{bucket: my-data, path: /data, read_only: true}]",
        default_text="none",
        style=OptionStyle.REPEATED,
        flag="--mount",
        metavar="BUCKET:PATH",
    ),
    JobField(
        name="timeout",
        type=types.duration(1),
        description="Maximum running time, summed over all attempts.",
        example="12h",
        default_text="none",
        metavar="DURATION",
    ),
    JobField(
        name="max_cost",
        type=types.positive_number("dollars", 1e9, "50"),
        description="Stop the job when it has cost this many dollars, over all attempts. Prices "
        "are those of `tpu cost --prices`.",
        example="50",
        default_text="none",
        metavar="USD",
    ),
    JobField(
        name="max_hours",
        type=types.positive_number("hours", 1e6, "12"),
        description="Stop the job when its slices have been billed for this many hours, over all "
        "attempts. Unlike `timeout`, booting and setup count.",
        example="12",
        default_text="none",
        metavar="HOURS",
    ),
    JobField(
        name="priority",
        type=types.integer(-types.MAX_COUNT, types.MAX_COUNT),
        description="Jobs of higher priority are placed first. From -100 to 100; beyond that it "
        "requires the admin role.",
        example="10",
        default_text="0",
        metavar="N",
    ),
    JobField(
        name="rule",
        type=types.RULE,
        description="Reaction to a preemption, a lost connection or a busy device: auto, pre, "
        "pass, reapply, rerun, resume. See `tpu config rules`.",
        example="resume",
        default_text="auto: retry them all",
        metavar="RULE",
    ),
    JobField(
        name="retries",
        type=types.RETRIES,
        description="Maximum retries for each kind of failure. Preemptions are not counted.",
        example="{failure: 2}",
        default_text="failure 0, setup 2, memory 1, hang 2, infrastructure 20",
        style=OptionStyle.PAIRS,
        metavar="KIND=N",
    ),
    JobField(
        name="crash_loop",
        type=types.integer(1, types.MAX_COUNT),
        description="Fail after this many consecutive failed attempts without a newer checkpoint.",
        example="5",
        default_text="3",
        metavar="N",
    ),
    JobField(
        name="grace",
        # A job that ignores SIGTERM would be paid for, and hold its slices, for so long.
        type=types.duration(0, optional=False, hours=1),
        description="Time between SIGTERM and SIGKILL, at most 1h.",
        example="2m",
        default_text="30s",
        metavar="DURATION",
    ),
    JobField(
        name="hung_after",
        type=types.duration(1),
        description="Restart an attempt that stops reporting progress for this long. Applies once "
        "it has reported progress; `none` disables it.",
        example="1h",
        default_text="30m",
        metavar="DURATION",
    ),
    JobField(
        name="pod",
        type=pod_fields.POD,
        description="Settings of the pods on GKE: image, cpu, memory, service_account, volumes, "
        "labels, tolerations. Other providers ignore them.",
        example="{cpu: 8, service_account: trainer}",
        default_text="as the server is configured",
        style=OptionStyle.PAIRS,
        metavar="NAME=VALUE",
    ),
    JobField(
        name="tags",
        type=types.TAGS,
        description="Tags to find the job by. `name=value` also becomes a label of its pods.",
        example="[sweep-3, baseline]",
        default_text="none",
        style=OptionStyle.REPEATED,
        flag="--tag",
        metavar="TAG",
    ),
    JobField(
        name="notes",
        type=types.TEXT,
        description="Free text.",
        example="the one with dropout",
        default_text="empty",
        flag="--note",
        metavar="TEXT",
    ),
    JobField(
        name="metrics",
        type=types.METRICS,
        description="Metrics to read from the output of a program that reports none. Each value is "
        "a regular expression whose first group is the number; `step` and `total` are progress.",
        example="{loss: 'loss: ([0-9.]+)', step: 'step ([0-9]+)'}",
        default_text="empty",
        style=OptionStyle.PAIRS,
        flag="--metric",
        metavar="NAME=REGEX",
    ),
    JobField(
        name="reuse",
        type=types.REUSE,
        description="Used slices of the pool that it may take: own-finished, others-finished, "
        "own-failed, others-failed. A slice that no job used is free for all.",
        example="[own-finished, own-failed]",
        default_text="all of them",
        style=OptionStyle.REPEATED,
        metavar="KIND",
    ),
    JobField(
        name="require_reservation",
        type=types.SWITCH,
        description="Start only while its owner has a reservation of the pool, see `tpu reserve`.",
        example="true",
        default_text="false",
        style=OptionStyle.SWITCH,
    ),
    JobField(
        name="notify",
        type=types.NOTIFY,
        description="Channels of `tpu notify` that get messages about this job. `team:end+failure` "
        "names the events: end, failure, recovery; `none` silences it.",
        example="[team, mail:failure]",
        default_text="as each channel says",
        style=OptionStyle.REPEATED,
        metavar="CHANNEL",
    ),
)

_NAMES = tuple(each.name for each in FIELDS)
# Written even when they equal the default, because their default depends on other fields.
_ALWAYS_WRITTEN = frozenset(each.name for each in FIELDS if each.required or each.default_from) | {
    "capacity"
}


def parse_job(document: Any) -> JobSpec:
    """BadInput has one line for each error: `path: what is wrong; what to write`."""
    if not isinstance(document, dict):
        raise BadInput(
            f"job: must be a mapping of fields, not {types.quote_value(document)}; "
            "write at least `command: …` and `accelerator: …`"
        )
    document = {key: value for key, value in document.items() if value is not None}
    errors = ParseErrors()
    errors.add_unknown(document, _NAMES, "")
    parsed: dict[str, Any] = {}
    for field in FIELDS:
        parsed[field.name] = _parse_field(field, document, parsed, errors)
    for name in parsed["secrets"]:
        if name in parsed["env"]:
            errors.add(f"secrets.{name}", "also in env; remove one")
    if parsed["pool"] is not None and parsed["pod"] != _DEFAULTS["pod"]:
        errors.add("pod", "not with pool: its slices have their pods already; remove one")
    for name in ("python", "dependencies"):
        if parsed["image"] is not None and parsed[name] is not None:
            errors.add(name, "the image has its own packages; remove this field or image")
    if errors.lines:
        raise BadInput("\n".join(errors.lines))
    return JobSpec(**parsed)


def _parse_field(
    field: JobField, document: dict[Any, Any], parsed: dict[str, Any], errors: ParseErrors
) -> Any:
    """The value, or the default after an error, so that the fields that follow can be checked."""
    if field.name in document:
        before = len(errors.lines)
        value = field.type.parse(errors, field.name, document[field.name])
        if len(errors.lines) == before:
            return value
    elif field.required:
        errors.add(field.name, f"missing; write `{field.name}: {field.example}`")
    if field.default_from is not None:
        return field.default_from(parsed)
    return _DEFAULTS.get(field.name)


def to_document(spec: JobSpec) -> dict[str, Any]:
    """The job file that `parse_job` parses into this spec; defaults are left out."""
    document: dict[str, Any] = {}
    for field in FIELDS:
        value = getattr(spec, field.name)
        if field.name in _ALWAYS_WRITTEN or value != _DEFAULTS[field.name]:
            # Only durations have a written form of None: the text `none`.
            document[field.name] = field.type.to_document(value)
    return document


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a job file, for editors. `parse_job` checks more."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tpufleet job file",
        "type": "object",
        "required": [field.name for field in FIELDS if field.required],
        "additionalProperties": False,
        "properties": {
            field.name: {**field.type.schema, "description": field.description} for field in FIELDS
        },
    }
