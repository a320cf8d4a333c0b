"""Value types of job file fields: how each is parsed, written back and described by JSON schema."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tpufleet.errors import BadInput
from tpufleet.model.job.jobs import Capacity, Retries, Rule, UsedSlice
from tpufleet.model.job.mounts import BUCKET, PATH, Mount
from tpufleet.model.people.notifications import JOB_RULE, job_rule_error
from tpufleet.model.tpu import topology
from tpufleet.model.values import durations

SHELL = ("bash", "-euo", "pipefail", "-c")  # runs a command that is given as text
KNOWN_PROVIDERS = ("local", "tpu-vm", "gke")
MAX_TEXT_LENGTH = 100_000  # Linux rejects a single argument of more than 128 KiB
MAX_COUNT = 1_000_000
MAX_VARIABLES = 1_000  # of the environment of a job
MAX_ENVIRONMENT = 256 * 1024  # characters; Linux takes 2 MiB with all arguments by default

# Names from other tools, and the field or budget that they mean here.
COMMON_ALIASES: dict[str, str] = {
    "cmd": "command", "run": "command", "script": "command", "entrypoint": "command",
    "args": "command", "tpu": "accelerator", "type": "accelerator", "accelerators": "accelerator",
    "num_slices": "slices", "zone": "zones", "region": "zones", "provider": "providers",
    "environment": "env", "envs": "env", "secret": "secrets", "directory": "workdir",
    "working_directory": "workdir", "working_dir": "workdir", "dir": "workdir",
    "checkpoint_dir": "checkpoint", "time_limit": "timeout", "max_run_time": "timeout",
    "retry": "retries", "max_restarts": "retries", "grace_period": "grace", "tag": "tags",
    "note": "notes", "description": "notes", "spot": "capacity", "preemptible": "capacity",
    "python_version": "python", "requires_python": "python", "requirements": "dependencies",
    "packages": "dependencies", "pip": "dependencies", "infra": "infrastructure",
    "failures": "failure", "oom": "memory",
}  # fmt: skip

_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}-(?:[a-z]|ai[0-9][a-z])")
_REGION = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=:/-]{0,62}")
_METRIC = re.compile(r"[A-Za-z_][\w./-]{0,99}", re.ASCII)
_MAX_METRICS, _MAX_PATTERN = 50, 500
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}|file:/[^\0\n]+")
# In a pattern: `re` takes 35 ms to compile each, and a job may have thousands of them.
_WIDE_RANGE = re.compile(r"-(?:[^\0-\x7f]|\\[uUN])")
_PYTHON = re.compile(r"3\.(?:[89]|[1-9][0-9])(?:\.[0-9]{1,3})?")
_IMAGE = re.compile(r"[a-z0-9](?:[a-zA-Z0-9._:/@-]{0,250}[a-zA-Z0-9])?")
_DEPENDENCY = re.compile(r"[^\s\0-][^\0\n]{0,500}")
_LOCATION = re.compile(r"/|[a-z][a-z0-9+]*://[^/]")
_UNENCODABLE = re.compile("[\0\ud800-\udfff]")  # neither a program argument nor UTF-8
_RESERVED_ENV = re.compile(
    "TPUFLEET_.*|TPU_WORKER_(ID|HOSTNAMES)|JAX_COORDINATOR_ADDRESS"
    "|MEGASCALE_(COORDINATOR_ADDRESS|NUM_SLICES|SLICE_ID)"
)


class ParseErrors:
    """Collects every error of one document, so that all of them are reported at once."""

    __slots__ = ("lines",)

    def __init__(self) -> None:
        self.lines: list[str] = []

    def add(self, path: str, message: str) -> Any:
        """Returns None, so that a parser can return it in place of the value."""
        self.lines.append(f"{path}: {message}")

    def add_unknown(self, document: Mapping[Any, Any], known: Iterable[str], prefix: str) -> None:
        known = list(known)
        for key in document:
            if not isinstance(key, str):
                self.add(prefix + quote_value(key), "field names must be text")
            elif key not in known:
                name = key if re.fullmatch(r"[\w.-]{1,60}", key) else quote_value(key)
                self.add(prefix + name, "unknown field" + suggest(key, known))


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldType:
    """`parse` returns the value for a JobSpec, or adds an error and returns None."""

    label: str  # in the documentation
    parse: Callable[[ParseErrors, str, Any], Any]
    schema: dict[str, Any] = field(default_factory=dict)
    to_document: Callable[[Any], Any] = lambda value: value
    from_option: Callable[[str], Any] = str  # a command line value, as in a document


def quote_value(value: Any) -> str:
    """A value in an error message: short and on one line, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    if value is None or isinstance(value, (bool, float)):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "a number of more than 64 bits"
    kinds: dict[type, str] = {list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def suggest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?`, or the list of valid names."""
    known = list(known)
    close = [alias for alias in (COMMON_ALIASES.get(name.lower()),) if alias in known]
    close += difflib.get_close_matches(name[:60].lower(), known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else f"; write one of {', '.join(known)}"


def label_error(value: Any) -> str | None:
    """Why this cannot name a job or pool, with a valid name; None when it can."""
    if isinstance(value, str) and _LABEL.fullmatch(value):
        return None
    valid = label_from(value) if isinstance(value, str) else ""
    return (
        f"{quote_value(value)} is not a valid name (lower-case letters, digits and dashes, "
        f"starting with a letter, at most 40 characters); for example {valid or 'train-1'}"
    )


def label_from(text: str) -> str:
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[0-9-]+", "", cleaned)[:40].strip("-")


def zone_error(item: str) -> str | None:
    if _ZONE.fullmatch(item):
        return None
    if _REGION.fullmatch(item):
        return f"{item!r} is not a zone; for example {item}-a"
    guess = item.strip().lower()
    example = guess if _ZONE.fullmatch(guess) else "us-central1-a"
    return f"{quote_value(item)} is not a zone; for example {example}"


def provider_error(item: str) -> str | None:
    if item in KNOWN_PROVIDERS or (
        _LABEL.fullmatch(item)
        and not difflib.get_close_matches(item, KNOWN_PROVIDERS, n=1, cutoff=0.75)
    ):
        return None
    return f"unknown provider {quote_value(item)}{suggest(item, KNOWN_PROVIDERS)}"


def tag_error(item: str) -> str | None:
    if _TAG.fullmatch(item):
        return None
    valid = re.sub(r"[^A-Za-z0-9_.=:/-]+", "-", item).strip("-")[:63] or "baseline"
    return (
        f"{quote_value(item)} is not a valid tag (letters, digits and _.=:/-, "
        f"at most 63 characters); for example {valid}"
    )


def dependency_error(item: str) -> str | None:
    if _DEPENDENCY.fullmatch(item):
        return None
    return f"{quote_value(item)} is not a requirement; for example optax==0.2.4"


def _parse_python(errors: ParseErrors, path: str, value: Any) -> str | None:
    text = str(value) if isinstance(value, str | float) else ""
    if _PYTHON.fullmatch(text):
        return text
    # YAML reads 3.10 without quotes as the number 3.1.
    example = "'3.10'" if text == "3.1" else "'3.12'"
    return errors.add(path, f"{quote_value(value)} is not a Python version; write {example}")


def _parse_image(errors: ParseErrors, path: str, value: Any) -> str | None:
    if isinstance(value, str) and _IMAGE.fullmatch(value):
        return value
    return errors.add(path, f"{quote_value(value)} is not an image; write registry/name:tag")


def _parse_text(errors: ParseErrors, path: str, value: Any) -> str | None:
    if type(value) is float or (type(value) is int and value.bit_length() <= 64):
        return str(value)
    if not isinstance(value, str):
        errors.add(path, f"must be text, not {quote_value(value)}; put it in quotes")
    elif _UNENCODABLE.search(value):
        errors.add(path, "contains a NUL or an unpaired surrogate; remove it")
    elif len(value) > MAX_TEXT_LENGTH:
        errors.add(path, f"longer than {MAX_TEXT_LENGTH} characters; put it in a file")
    else:
        return value
    return None


def _parse_argv(errors: ParseErrors, path: str, value: Any) -> tuple[str, ...] | None:
    if isinstance(value, str):
        if not value.strip():
            return errors.add(path, "empty; write the command to run")
        text = _parse_text(errors, path, value)
        return None if text is None else (*SHELL, text)
    if not isinstance(value, (list, tuple)):
        return errors.add(path, f"must be a list or text, not {quote_value(value)}")
    arguments = [
        _parse_text(errors, f"{path}[{index}]", argument) for index, argument in enumerate(value)
    ]
    if not arguments or arguments[0] == "":
        return errors.add(path, "empty; write the command to run, such as [python, train.py]")
    valid = tuple(argument for argument in arguments if argument is not None)
    return valid if len(valid) == len(arguments) else None


def _parse_label(errors: ParseErrors, path: str, value: Any) -> str | None:
    error = label_error(value)
    return errors.add(path, error) if error else value


def _parse_accelerator(errors: ParseErrors, path: str, value: Any) -> str | None:
    if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,40}", value):
        return errors.add(path, f"unknown TPU type {quote_value(value)}; for example v5e-16")
    try:
        return topology.find(value).name
    except BadInput as error:
        return errors.add(path, str(error))


def _parse_location(errors: ParseErrors, path: str, value: Any) -> str | None:
    text = _parse_text(errors, path, value)
    if text is not None and not _LOCATION.match(text):
        return errors.add(
            path,
            f"{quote_value(text)} is not an absolute path or URL; "
            "for example gs://bucket/folder or /mnt/checkpoints",
        )
    return text


def _parse_env(errors: ParseErrors, path: str, value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict):
        message = f"must be a mapping, not {quote_value(value)}; write {{NAME: value}}"
        return errors.add(path, message)
    before = len(errors.lines)
    parsed: dict[str, str] = {}
    for name, item in value.items():
        if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
            message = "is not a valid environment variable name; use letters, digits and _"
            errors.add(path, f"{quote_value(name)} {message}")
        elif _RESERVED_ENV.fullmatch(name):
            errors.add(f"{path}.{name}", "reserved: tpufleet sets this variable; remove it")
        elif (text := _parse_text(errors, f"{path}.{name}", item)) is not None:
            parsed[name] = text
    size = sum(len(name) + len(text) for name, text in parsed.items())
    if len(value) > MAX_VARIABLES:
        errors.add(path, f"{len(value)} variables; at most {MAX_VARIABLES}: put them in a file")
    elif size > MAX_ENVIRONMENT:
        errors.add(path, f"{size} characters; at most {MAX_ENVIRONMENT}: put them in a file")
    return parsed if len(errors.lines) == before else None


def _parse_secrets(errors: ParseErrors, path: str, value: Any) -> dict[str, str] | None:
    before = len(errors.lines)
    parsed = _parse_env(errors, path, value) or {}
    for name, reference in parsed.items():
        if not _SECRET.fullmatch(reference):  # not echoed: it may be the secret itself
            errors.add(
                f"{path}.{name}",
                "not a secret reference; write a name from `tpu secret set`, or file:/path/on/host",
            )
    return parsed if len(errors.lines) == before else None


def _parse_metrics(errors: ParseErrors, path: str, value: Any) -> dict[str, str] | None:
    if not isinstance(value, dict):
        message = f"must be a mapping, not {quote_value(value)}; write {{loss: 'loss: ([0-9.]+)'}}"
        return errors.add(path, message)
    before = len(errors.lines)
    if len(value) > _MAX_METRICS:
        errors.add(path, f"has {len(value)} metrics; at most {_MAX_METRICS}")
    for name, pattern in value.items():
        if not isinstance(name, str) or not _METRIC.fullmatch(name):
            errors.add(path, f"{quote_value(name)} is not a name; use letters, digits, _ . / and -")
        elif not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN or "\0" in pattern:
            errors.add(f"{path}.{name}", f"must be text of at most {_MAX_PATTERN} characters")
        elif problem := _pattern_error(pattern):
            errors.add(f"{path}.{name}", problem)
    return dict(value) if len(errors.lines) == before else None


def _pattern_error(pattern: str) -> str:
    if _WIDE_RANGE.search(pattern):
        return r"has a range of characters beyond ASCII; list the characters, or write \w or \S"
    try:
        groups = re.compile(pattern).groups
    except (re.error, RecursionError, OverflowError) as error:
        return f"not a regular expression: {error}"
    return "" if groups else "has no group; put the number in parentheses: loss: ([0-9.]+)"


def _parse_capacity(errors: ParseErrors, path: str, value: Any) -> tuple[Capacity, ...] | None:
    kinds = [kind.value for kind in Capacity]
    if isinstance(value, (list, tuple)):
        value = [_normalize(item) for item in value]
    parsed = _parse_items(
        errors,
        path,
        _normalize(value),
        lambda item: (
            None if item in kinds else f"unknown capacity {quote_value(item)}{suggest(item, kinds)}"
        ),
    )
    if parsed == ():
        return errors.add(path, f"empty; write one of {', '.join(kinds)}")
    return None if parsed is None else tuple(Capacity(kind) for kind in parsed)


def _normalize(value: Any) -> Any:
    return value.strip().lower().replace("_", "-") if isinstance(value, str) else value


def _parse_rule(errors: ParseErrors, path: str, value: Any) -> Rule | None:
    names = [rule.value for rule in Rule]
    if isinstance(value, str) and value.strip().lower() in names:
        return Rule(value.strip().lower())
    hint = suggest(value if isinstance(value, str) else "", names)
    return errors.add(path, f"unknown rule {quote_value(value)}{hint}")


def _parse_reuse(errors: ParseErrors, path: str, value: Any) -> tuple[UsedSlice, ...] | None:
    """Also the two digits of the former queue: for failed and for finished jobs, 1 means own and 2
    means others' slices, 3 both."""
    items = value if isinstance(value, list) else [value]
    text = items[0] if len(items) == 1 and isinstance(items[0], str) else ""
    if bits := re.fullmatch(r"([0-3])([0-3])", text):
        kinds = (
            (bits[1], 1, UsedSlice.OWN_FAILED), (bits[1], 2, UsedSlice.OTHERS_FAILED),
            (bits[2], 1, UsedSlice.OWN_FINISHED), (bits[2], 2, UsedSlice.OTHERS_FINISHED),
        )  # fmt: skip
        return tuple(kind for digit, bit, kind in kinds if int(digit) & bit)
    names = [each.value for each in UsedSlice]
    for index, item in enumerate(items):
        if item not in names:
            hint = suggest(item if isinstance(item, str) else "", names)
            errors.add(f"{path}[{index}]", f"unknown kind of slice {quote_value(item)}{hint}")
            return None
    return tuple(dict.fromkeys(UsedSlice(item) for item in items))


def _parse_switch(errors: ParseErrors, path: str, value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return errors.add(path, f"must be true or false, not {quote_value(value)}")


def _parse_retries(errors: ParseErrors, path: str, value: Any) -> Retries | None:
    if not isinstance(value, dict):
        example = int(value) if isinstance(value, int) and 0 <= value <= 1000 else 2
        message = f"must be a mapping of budgets, not {quote_value(value)}"
        return errors.add(path, f"{message}; write {{failure: {example}}}")
    document = {key: amount for key, amount in value.items() if amount is not None}
    names = [budget.name for budget in fields(Retries)]
    before = len(errors.lines)
    errors.add_unknown(document, names, f"{path}.")
    count = integer(0, MAX_COUNT)
    parsed = {
        name: count.parse(errors, f"{path}.{name}", document[name])
        for name in names
        if name in document
    }
    return Retries(**parsed) if len(errors.lines) == before else None


def _parse_mounts(errors: ParseErrors, path: str, value: Any) -> tuple[Mount, ...] | None:
    example = "[{bucket: my-data, path: /data, read_only: true}]"
    if not isinstance(value, list):
        return errors.add(path, f"must be a list, not {quote_value(value)}; write {example}")
    before = len(errors.lines)
    mounts: list[Mount] = []
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        if isinstance(item, str):
            item = _mount_from_text(item)
        if not isinstance(item, dict):
            errors.add(where, f"must be a mapping, not {quote_value(item)}; write {example}")
            continue
        errors.add_unknown(item, ("bucket", "path", "read_only"), f"{where}.")
        bucket = str(item.get("bucket", "")).removeprefix("gs://").rstrip("/")
        folder, read_only = str(item.get("path", "")), item.get("read_only", False)
        if not BUCKET.fullmatch(bucket):
            errors.add(f"{where}.bucket", f"{quote_value(bucket)} is not the name of a bucket")
        if not PATH.fullmatch(folder) or "/.." in folder:
            errors.add(f"{where}.path", "must be an absolute path, such as /data")
        if not isinstance(read_only, bool):
            errors.add(f"{where}.read_only", "must be true or false")
        if folder in [mount.path for mount in mounts]:
            errors.add(f"{where}.path", f"{folder} is used twice")
        mounts.append(Mount(bucket=bucket, path=folder, read_only=bool(read_only)))
    return tuple(mounts) if len(errors.lines) == before else None


def _mount_documents(mounts: tuple[Mount, ...]) -> list[dict[str, Any]]:
    return [
        {"bucket": mount.bucket, "path": mount.path}
        | ({"read_only": True} if mount.read_only else {})
        for mount in mounts
    ]


def _mount_from_text(text: str) -> dict[str, Any]:
    """`my-data:/data` or `my-data:/data:ro`."""
    bucket, _, rest = text.removeprefix("gs://").partition(":")
    folder = rest.removesuffix(":ro")
    return {"bucket": bucket, "path": folder, "read_only": folder != rest}


MAX_ITEMS = 100  # of a list, such as the tags of a job


def _parse_items(
    errors: ParseErrors, path: str, value: Any, check: Callable[[str], str | None]
) -> tuple[str, ...] | None:
    """One text or a list of distinct ones."""
    several = isinstance(value, (list, tuple))
    items = value if several else [value]
    before = len(errors.lines)
    if len(items) > MAX_ITEMS:
        return errors.add(path, f"{len(items)} items; at most {MAX_ITEMS}")
    for index, item in enumerate(items):
        item_path = f"{path}[{index}]" if several else path
        if not isinstance(item, str):
            errors.add(item_path, f"must be text, not {quote_value(item)}")
        elif error := check(item):
            errors.add(item_path, error)
        elif item in items[:index]:
            errors.add(item_path, f"duplicate {item}; remove one")
    return tuple(items) if len(errors.lines) == before else None


def _integer_option(text: str) -> int | str:
    """An integer where it is one; otherwise the text, for the parser to reject."""
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text


def _one_or_list(item: dict[str, Any], **constraints: Any) -> dict[str, Any]:
    return {"anyOf": [item, {"type": "array", "items": item, "uniqueItems": True, **constraints}]}


_STRING = {"type": "string"}
_TEXT = {"type": ["string", "number"]}
_ENV_NAMES = {"pattern": f"^{_ENV_NAME.pattern}$"}


def integer(minimum: int, maximum: int) -> FieldType:
    def parse(errors: ParseErrors, path: str, value: Any) -> int | None:
        if isinstance(value, int) and not isinstance(value, bool) and minimum <= value <= maximum:
            return value
        nearest = minimum if minimum >= 0 else 0
        if isinstance(value, (int, float)) and value == value:
            nearest = int(min(max(value, minimum), maximum))
        return errors.add(
            path,
            f"must be an integer from {minimum} to {maximum}, not {quote_value(value)}; "
            f"for example {nearest}",
        )

    return FieldType(
        label="integer",
        parse=parse,
        schema={"type": "integer", "minimum": minimum, "maximum": maximum},
        from_option=_integer_option,
    )


def positive_number(label: str, maximum: float, example: str) -> FieldType:
    """A number above 0; optional."""

    def parse(errors: ParseErrors, path: str, value: Any) -> float | None:
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if number and 0 < value <= maximum:
            return float(value)
        return errors.add(
            path, f"must be a number above 0, not {quote_value(value)}; for example {example}"
        )

    return FieldType(
        label=label,
        parse=parse,
        schema={"type": "number", "exclusiveMinimum": 0, "maximum": maximum},
        from_option=_number_option,
    )


def _number_option(text: str) -> float | str:
    try:
        return float(text.removeprefix("$"))
    except ValueError:
        return text


def duration(minimum: int, *, optional: bool = True, hours: int | None = None) -> FieldType:
    """`optional`: `none` is allowed, and means no limit. `hours`: at most so many."""

    def parse(errors: ParseErrors, path: str, value: Any) -> Any:
        try:
            span = durations.parse(value)
        except BadInput as error:
            return errors.add(path, str(error))
        if span is None and not optional:
            return errors.add(path, "cannot be none; for example 30s")
        if span is not None and span.total_seconds() < minimum:
            return errors.add(path, f"shorter than {minimum}s; write {minimum}s or none")
        if span is not None and hours is not None and span.total_seconds() > hours * 3600:
            return errors.add(path, f"longer than {hours}h; write {hours}h or less")
        return span

    return FieldType(
        label="duration",
        parse=parse,
        schema={"type": ["string", "number"], "minimum": minimum},
        to_document=durations.to_builtin,
    )


def names(check: Callable[[str], str | None], pattern: re.Pattern[str]) -> FieldType:
    return FieldType(
        label="one or a list",
        parse=lambda errors, path, value: _parse_items(errors, path, value, check),
        schema=_one_or_list(
            {"type": "string", "pattern": f"^(?:{pattern.pattern})$"}, maxItems=MAX_ITEMS
        ),
        to_document=list,
    )


TEXT = FieldType(label="text", parse=_parse_text, schema=_TEXT)
FOLDER = FieldType(label="folder", parse=_parse_text, schema=_TEXT)
LABEL = FieldType(
    label="label", parse=_parse_label, schema={"type": "string", "pattern": f"^{_LABEL.pattern}$"}
)
ARGV = FieldType(
    label="list or text",
    parse=_parse_argv,
    schema={"anyOf": [_STRING, {"type": "array", "items": _TEXT, "minItems": 1}]},
    to_document=list,
)
ACCELERATOR = FieldType(label="TPU type", parse=_parse_accelerator, schema=_STRING)
ZONES = names(zone_error, _ZONE)
PROVIDERS = names(provider_error, _LABEL)
TAGS = names(tag_error, _TAG)
NOTIFY = names(job_rule_error, JOB_RULE)
PYTHON = FieldType(
    label="version",
    parse=_parse_python,
    schema={"type": ["string", "number"]},
)
IMAGE = FieldType(
    label="image",
    parse=_parse_image,
    schema={"type": "string", "pattern": f"^(?:{_IMAGE.pattern})$"},
)
DEPENDENCIES = names(dependency_error, _DEPENDENCY)
CAPACITY = FieldType(
    label="one or a list",
    parse=_parse_capacity,
    schema=_one_or_list({"enum": [kind.value for kind in Capacity]}, minItems=1),
    to_document=lambda kinds: [kind.value for kind in kinds],
)
ENV = FieldType(
    label="mapping",
    parse=_parse_env,
    schema={"type": "object", "propertyNames": _ENV_NAMES, "additionalProperties": _TEXT},
    to_document=dict,
)
METRICS = FieldType(
    label="mapping",
    parse=_parse_metrics,
    schema={"type": "object", "additionalProperties": _STRING},
    to_document=dict,
)
SECRETS = FieldType(
    label="mapping",
    parse=_parse_secrets,
    schema={
        "type": "object",
        "propertyNames": _ENV_NAMES,
        "additionalProperties": {"type": "string", "pattern": f"^(?:{_SECRET.pattern})$"},
    },
    to_document=dict,
)
LOCATION = FieldType(
    label="location",
    parse=_parse_location,
    schema={"type": "string", "pattern": f"^(?:{_LOCATION.pattern})"},
)
RULE = FieldType(
    label="name",
    parse=_parse_rule,
    schema={"enum": [rule.value for rule in Rule]},
    to_document=lambda rule: rule.value,
)
REUSE = FieldType(
    label="one or a list",
    parse=_parse_reuse,
    schema=_one_or_list({"enum": [each.value for each in UsedSlice]}, maxItems=len(UsedSlice)),
    to_document=lambda kinds: [kind.value for kind in kinds],
)
SWITCH = FieldType(label="true or false", parse=_parse_switch, schema={"type": "boolean"})
RETRIES = FieldType(
    label="mapping",
    parse=_parse_retries,
    schema={
        "type": "object",
        "properties": {budget.name: integer(0, MAX_COUNT).schema for budget in fields(Retries)},
        "additionalProperties": False,
    },
    to_document=lambda retries: {
        budget.name: getattr(retries, budget.name) for budget in fields(Retries)
    },
    from_option=_integer_option,
)
MOUNTS = FieldType(
    label="list",
    parse=_parse_mounts,
    schema={
        "type": "array",
        "items": {
            "type": ["object", "string"],
            "required": ["bucket", "path"],
            "additionalProperties": False,
            "properties": {
                "bucket": {"type": "string"},
                "path": {"type": "string", "pattern": "^/"},
                "read_only": {"type": "boolean"},
            },
        },
    },
    to_document=_mount_documents,
)
