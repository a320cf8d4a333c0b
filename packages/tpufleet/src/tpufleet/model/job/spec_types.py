"""Types of the fields of a job that have a form of their own."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated, Any

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, InvalidSettings, invalid, quote, too_long, unknown
from tpufleet.model.people.notifications import JOB_RULE, job_rule_error

SHELL = ("bash", "-euo", "pipefail", "-c")  # runs a command that is given as text
_RESERVED_ENV = (
    "TPUFLEET_.*|TPU_WORKER_(ID|HOSTNAMES)|JAX_COORDINATOR_ADDRESS"
    "|MEGASCALE_(COORDINATOR_ADDRESS|NUM_SLICES|SLICE_ID)"
)
_SECRET = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}|file:/[^\0\n]+"
_PYTHON = re.compile(r"3\.(?:[89]|[1-9][0-9])(?:\.[0-9]{1,3})?")
_LOCATION = r"/|[a-z][a-z0-9+]*://[^/]"
_NO_COMMAND = "empty; write the command to run, such as [python, train.py]"
_MAX_PATTERN = 500
MAX_SLICES = 4096
# In a pattern: `re` takes 35 ms to compile each, and a job may have thousands of them.
_WIDE_RANGE = re.compile(r"-(?:[^\0-\x7f]|\\[uUN])")


class SliceRange(msgspec.Struct, frozen=True, kw_only=True):
    """Of an elastic job: it runs on as many slices as there are."""

    min: int
    max: int

    def __str__(self) -> str:
        return f"{self.min} to {self.max}"


class UsedSlice(StrEnum):
    """A free slice of a pool, by the job that used it last. One that no job used is always free."""

    OWN_FINISHED = "own-finished"  # also cancelled
    OTHERS_FINISHED = "others-finished"
    OWN_FAILED = "own-failed"
    OTHERS_FAILED = "others-failed"


def _parse_argv(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        if not value.strip():
            raise BadInput(_NO_COMMAND)
        return (*SHELL, schema.parse_text(value))
    if not isinstance(value, list | tuple):
        raise BadInput(f"must be a list or text, not {quote(value)}")
    arguments, errors = [], []
    for index, argument in enumerate(value):
        try:
            arguments.append(schema.parse_text(argument))
        except BadInput as error:
            errors.append((f"[{index}]", str(error)))
    if errors:
        raise InvalidSettings(errors)
    if not arguments or arguments[0] == "":
        raise BadInput(_NO_COMMAND)
    return tuple(arguments)


def _parse_slices(value: Any) -> int | SliceRange:
    """`2`, `{min: 2, max: 4}`, or `2-4`, as on the command line."""
    bounds = value
    if isinstance(value, str) and (numbers := re.fullmatch(r"(\d{1,9})-(\d{1,9})", value)):
        bounds = {"min": int(numbers[1]), "max": int(numbers[2])}
    elif isinstance(value, str) and re.fullmatch(r"\d{1,9}", value):
        bounds = int(value)
    ends = bounds if isinstance(bounds, dict) else {"min": bounds, "max": bounds}
    least, most = ends.get("min"), ends.get("max")
    if len(ends) == 2 and type(least) is type(most) is int and 1 <= least <= most <= MAX_SLICES:
        return least if least == most else SliceRange(min=least, max=most)
    raise BadInput(
        f"must be an integer from 1 to {MAX_SLICES}, not {quote(value)}; for example 2, or "
        "{min: 2, max: 4}"
    )


def _write_slices(value: int | SliceRange) -> int | dict[str, int]:
    return value if isinstance(value, int) else {"min": value.min, "max": value.max}


def _parse_python(value: Any) -> str:
    text = str(value) if isinstance(value, str | float) else ""
    if _PYTHON.fullmatch(text):
        return text
    # YAML reads 3.10 without quotes as the number 3.1.
    example = "'3.10'" if text == "3.1" else "'3.12'"
    raise invalid(value, "a Python version", example)


def _parse_location(value: Any) -> str:
    text = schema.parse_text(value)
    if not re.match(_LOCATION, text):
        raise invalid(text, "an absolute path or URL", "gs://bucket/folder or /mnt/checkpoints")
    return text


def _parse_secret(value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(_SECRET, value):
        # Not echoed: it may be the secret itself.
        raise BadInput("not a secret; write a name from `tpu secret set`, or file:/path/on/host")
    return value


def _parse_pattern(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_PATTERN or "\0" in value:
        raise too_long(_MAX_PATTERN)
    if _WIDE_RANGE.search(value):
        raise BadInput(
            r"has a range of characters beyond ASCII; list the characters, or write \w or \S"
        )
    try:
        groups = re.compile(value).groups
    except (re.error, RecursionError, OverflowError) as error:
        raise BadInput(f"not a regular expression: {error}") from error
    if not groups:
        raise BadInput(r"has no group; put the number in parentheses: loss: ([\w.+-]+)")
    return value


def _parse_reuse(value: Any) -> tuple[UsedSlice, ...]:
    """Also the two digits of the former queue: for failed and for finished jobs, 1 means own and 2
    means others' slices, 3 both."""
    items = value if isinstance(value, list | tuple) else [value]
    text = items[0] if len(items) == 1 and isinstance(items[0], str) else ""
    if bits := re.fullmatch(r"([0-3])([0-3])", text):
        kinds = (
            (bits[1], 1, UsedSlice.OWN_FAILED), (bits[1], 2, UsedSlice.OTHERS_FAILED),
            (bits[2], 1, UsedSlice.OWN_FINISHED), (bits[2], 2, UsedSlice.OTHERS_FINISHED),
        )  # fmt: skip
        return tuple(kind for digit, bit, kind in kinds if int(digit) & bit)
    names = [each.value for each in UsedSlice]
    for item in items:
        if item not in names:
            raise unknown("kind of slice", item, names)
    return tuple(dict.fromkeys(UsedSlice(item) for item in items))


def _parse_channel(value: Any) -> str:
    text = schema.parse_text(value)
    if error := job_rule_error(text):
        raise BadInput(error)
    return text


def _string(pattern: str, end: str = "$") -> dict[str, str]:
    return {"type": "string", "pattern": f"^(?:{pattern}){end}"}


_ARGUMENTS = {"type": "array", "items": {"type": ["string", "number"]}, "minItems": 1}
_KINDS = {"enum": [each.value for each in UsedSlice]}
Argv = Annotated[
    tuple[str, ...],
    schema.custom(
        "list or text", _parse_argv, {"anyOf": [{"type": "string"}, _ARGUMENTS]}, write=list
    ),
]
_NUMBER = {"type": "integer", "minimum": 1, "maximum": MAX_SLICES}
Slices = Annotated[
    int | SliceRange,
    schema.custom(
        "integer or range",
        _parse_slices,
        {
            "anyOf": [
                _NUMBER,
                {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"},
                {
                    "type": "object",
                    "properties": {"min": _NUMBER, "max": _NUMBER},
                    "required": ["min", "max"],
                    "additionalProperties": False,
                },
            ]
        },
        write=_write_slices,
    ),
]
PythonVersion = Annotated[
    str, schema.custom("version", _parse_python, {"type": ["string", "number"]})
]
Image = Annotated[
    str,
    schema.text(
        "image",
        r"[a-z0-9](?:[a-zA-Z0-9._:/@-]{0,250}[a-zA-Z0-9])?",
        example="registry/name:tag",
    ),
]
Dependency = Annotated[
    str, schema.text("requirement", r"[^\s\0-][^\0\n]{0,500}", example="optax==0.2.4")
]
Location = Annotated[str, schema.custom("location", _parse_location, _string(_LOCATION, ""))]
EnvName = Annotated[
    str,
    schema.text(
        "variable", r"[A-Za-z_][A-Za-z0-9_]{0,127}", example="LR",
        rule="letters, digits and _", reserved=_RESERVED_ENV,
    ),
]  # fmt: skip
SecretReference = Annotated[str, schema.custom("secret", _parse_secret, _string(_SECRET))]
MetricName = Annotated[
    str,
    schema.text(
        "metric", r"[A-Za-z_][A-Za-z0-9_./-]{0,99}", example="loss",
        rule="letters, digits, _ . / and -",
    ),
]  # fmt: skip
MetricPattern = Annotated[
    str, schema.custom("regular expression", _parse_pattern, {"type": "string"})
]
Reuse = Annotated[
    tuple[UsedSlice, ...],
    schema.custom(
        "one or a list",
        _parse_reuse,
        {"anyOf": [_KINDS, {"type": "array", "items": _KINDS, "uniqueItems": True}]},
        write=lambda kinds: [kind.value for kind in kinds],
    ),
]
Channel = Annotated[str, schema.custom("channel", _parse_channel, _string(JOB_RULE.pattern))]
