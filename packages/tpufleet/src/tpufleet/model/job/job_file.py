"""The job file: a mapping of the fields of `JobSpec`, which defines each of them once."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from tpufleet import schema
from tpufleet.errors import must_be
from tpufleet.model.job.jobs import JobSpec
from tpufleet.model.job.spec_types import SHELL
from tpufleet.model.values.names import label_from

FIELDS = tuple(schema.rows(JobSpec))
# Written even when they equal the default, because their default depends on other fields.
_ALWAYS_WRITTEN = ("name", "capacity")
_LAUNCHER = re.compile(
    r"(python|pypy)[0-9.]*|bash|sh|env|exec|uv|run|poetry|time|nice|torchrun|cd|set"
)


def parse_job(document: Any) -> JobSpec:
    """BadInput has one line for each error: `path: what is wrong; what to write`."""
    if not isinstance(document, dict):
        fields = "a mapping of fields, at least `command: …` and `accelerator: …`"
        raise must_be(fields, document, "job")
    spec = schema.parse(JobSpec, document)
    return spec if spec.name else msgspec.structs.replace(spec, name=_name_from(spec.command))


def to_document(spec: JobSpec) -> dict[str, Any]:
    """The job file that `parse_job` parses into this spec; defaults are left out."""
    return schema.to_document(spec, keep=_ALWAYS_WRITTEN)


def json_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of a job file, for editors. `parse_job` checks more."""
    return schema.json_schema(JobSpec, "tpufleet job file")


def _name_from(command: tuple[str, ...]) -> str:
    """`python -m lab.train lr=1` → train; `./run.sh` → run."""
    arguments = command[len(SHELL) :] if command[: len(SHELL)] == SHELL else command
    for word in [part for text in arguments for part in text.split()]:
        stem = word.rpartition("/")[2]
        if word.startswith("-") or "=" in word or _LAUNCHER.fullmatch(stem):
            continue
        parts = [part for part in stem.split(".") if part not in ("", "py", "sh")]
        if label := label_from(parts[-1] if parts else ""):
            return label
    return "job"
