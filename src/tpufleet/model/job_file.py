"""The fields of a job file, for people: meaning, type, default, example. `specs` reads them.

Names in a job file: which are valid, and what to write instead of one that is not.

The job file: plain data in, a JobSpec out, or every fault in it with its cure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, TypeVar

from tpufleet.errors import BadInput
from tpufleet.model import durations, topology
from tpufleet.model.jobs import Capacity, JobSpec, Retries, Rule


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
        "name",
        "label",
        "from the command",
        "What the job is called: lower-case letters, digits, dashes; at most 40.",
        "tiny-lm",
    ),
    JobField(
        "command",
        "list or text",
        "required",
        "What every host runs. A list is run as it stands; text is run by `bash -euo pipefail`.",
        "[python, train.py, lr=0.01]",
    ),
    JobField(
        "setup",
        "list or text",
        "nothing",
        "What every host runs before the command, in each attempt.",
        "pip install -r requirements.txt",
    ),
    JobField(
        "accelerator",
        "TPU type",
        "required",
        "Type and size of one slice, in any spelling that `tpu types` lists.",
        "v5e-16",
    ),
    JobField("slices", "whole number", "1", "Slices that run together (multislice).", "2"),
    JobField(
        "capacity",
        "one or a list",
        "spot",
        "Kinds of capacity in order of preference: spot, on-demand, reserved, queued.",
        "[reserved, spot]",
    ),
    JobField(
        "zones",
        "one or a list",
        "the provider's own",
        "Zones in order of preference.",
        "[us-central1-a, europe-west4-b]",
    ),
    JobField(
        "providers",
        "one or a list",
        "the server's own",
        "Sources of slices in order of preference: local, tpu-vm, gke.",
        "[tpu-vm, gke]",
    ),
    JobField("pool", "label", "none", "Run on slices of this pool only.", "lab"),
    JobField(
        "env", "mapping", "empty", "Environment variables of the command.", "{WANDB_MODE: offline}"
    ),
    JobField(
        "secrets",
        "mapping",
        "empty",
        "Environment name → where its value is: a name given to `tpu secret set`, or "
        "file:/path/on/host.",
        "{WANDB_API_KEY: wandb}",
    ),
    JobField(
        "workdir",
        "folder",
        "the folder of the job file",
        "What is copied to every host at submit; the command starts in it.",
        "..",
    ),
    JobField(
        "checkpoint",
        "location",
        "a folder that the server chooses",
        "Where checkpoints are kept: a full path or a URL that every host can reach.",
        "gs://bucket/tiny-lm",
    ),
    JobField(
        "timeout", "duration", "none", "Most time spent running, all attempts together.", "12h"
    ),
    JobField("priority", "whole number", "0", "Larger goes first.", "10"),
    JobField(
        "rule",
        "name",
        "pre when the first capacity is spot, else pass",
        "What follows a preemption, a lost connection or a busy device: pre, pass, reapply, "
        "rerun, resume. `tpu rules` explains them.",
        "resume",
    ),
    JobField(
        "retries",
        "mapping",
        "failure 0, setup 2, memory 1, hang 2, infrastructure 20",
        "How often each kind of failure is tried again. Preemptions are free.",
        "{failure: 2}",
    ),
    JobField(
        "crash_loop",
        "whole number",
        "3",
        "Stop after this many failed attempts in a row without a newer checkpoint.",
        "5",
    ),
    JobField(
        "grace",
        "duration",
        "30s",
        "Time between the request to stop (SIGTERM) and the end (SIGKILL).",
        "2m",
    ),
    JobField(
        "hung_after",
        "duration",
        "30m",
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
    JobField(
        "notes", "text", "empty", "Anything that you want to remember.", "the one with dropout"
    ),
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


SHELL = ("bash", "-euo", "pipefail", "-c")  # what runs a command that is given as text
KNOWN_PROVIDERS = ("local", "tpu-vm", "gke")

_LABEL = re.compile(r"[a-z](?:[a-z0-9-]{0,38}[a-z0-9])?")
_ZONE = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}-(?:[a-z]|ai[0-9][a-z])")
_REGION = re.compile(r"[a-z]+(?:-[a-z]+)*[0-9]{0,2}")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.=:/-]{0,62}")
_LAUNCHER = re.compile(
    r"(python|pypy)[0-9.]*|bash|sh|env|exec|uv|run|poetry|time|nice|torchrun|cd|set"
)


def label_error(value: Any) -> str | None:
    """Why this cannot be a name of a job or pool, and what can; None when it can."""
    if isinstance(value, str) and _LABEL.fullmatch(value):
        return None
    cure = _label_from(value) if isinstance(value, str) else ""
    return (
        f"{quote_value(value)} is not a name of lower-case letters, digits and dashes, at most 40, "
        f"starting with a letter; write {cure or 'train-1'}"
    )


def _label_from(text: str) -> str:
    cleaned = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return re.sub(r"^[0-9-]+", "", cleaned)[:40].strip("-")


def name_from(command: tuple[str, ...]) -> str:
    """`python -m lab.train lr=1` → train; `./run.sh` → run."""
    words = command[len(SHELL) :] if command[: len(SHELL)] == SHELL else command
    for word in [part for text in words for part in text.split()]:
        stem = word.rpartition("/")[2]
        if word.startswith("-") or "=" in word or _LAUNCHER.fullmatch(stem):
            continue
        parts = [part for part in stem.split(".") if part not in ("", "py", "sh")]
        if label := _label_from(parts[-1] if parts else ""):
            return label
    return "job"


def quote_value(value: Any) -> str:
    """A value in a message: short, on one line, whatever it is."""
    if isinstance(value, str):
        return repr(value if len(value) <= 60 else value[:57] + "…")
    if value is None or isinstance(value, (bool, float)):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if value.bit_length() <= 64 else "so large a number"
    kinds = {list: "a list", tuple: "a list", dict: "a mapping"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def suggest(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """`; did you mean …?`, or a list of what there is."""
    known = list(known)
    close = [name for name in (COMMON_ALIASES.get(word.lower()),) if name in known]
    close += difflib.get_close_matches(word[:60].lower(), known, n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else f"; write one of {', '.join(known)}"


def zone_error(item: str) -> str | None:
    if _ZONE.fullmatch(item):
        return None
    if _REGION.fullmatch(item):
        return f"{item!r} is not a zone; write {item}-a, say"
    guess = item.strip().lower()
    cure = guess if _ZONE.fullmatch(guess) else "us-central1-a"
    return f"{quote_value(item)} is not a zone; write {cure}, say"


def provider_error(item: str) -> str | None:
    if item in KNOWN_PROVIDERS or (
        _LABEL.fullmatch(item)
        and not difflib.get_close_matches(item, KNOWN_PROVIDERS, n=1, cutoff=0.75)
    ):
        return None
    return f"no provider is called {quote_value(item)}{suggest(item, KNOWN_PROVIDERS)}"


def tag_error(item: str) -> str | None:
    if _TAG.fullmatch(item):
        return None
    cure = re.sub(r"[^A-Za-z0-9_.=:/-]+", "-", item).strip("-")[:63] or "baseline"
    return (
        f"{quote_value(item)} is not a tag of letters, digits and _.=:/-, at most 63; write {cure}"
    )


__all__ = ["FIELDS", "label_error", "parse_job", "to_document"]

T = TypeVar("T")
MAX_SLICES = 4096
MAX_TEXT_LENGTH = 100_000  # Linux refuses one argument of more than 128 KiB

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_SECRET = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}|file:/[^\0\n]+")
_UNPRINTABLE = re.compile("[\0\ud800-\udfff]")  # cannot be an argument, nor UTF-8
_OURS = re.compile(
    "TPUFLEET_.*|TPU_WORKER_(ID|HOSTNAMES)|JAX_COORDINATOR_ADDRESS"
    "|MEGASCALE_(COORDINATOR_ADDRESS|NUM_SLICES|SLICE_ID)"
)


def parse_job(document: Any) -> JobSpec:
    """BadInput holds one line for each fault: `path: what is wrong; what to write`."""
    return _JobParser(document).spec()


def to_document(spec: JobSpec) -> dict[str, Any]:
    """The job file that `parse` reads back as this very spec; defaults are left out."""
    plain: dict[str, Any] = {}
    for field in fields(JobSpec):
        value = getattr(spec, field.name)
        always = field.name in ("name", "command", "accelerator", "capacity", "rule")
        if not always and value == _DEFAULTS.get(field.name):
            continue
        if field.name in ("timeout", "grace", "hung_after"):
            value = durations.to_builtin(value)
        elif isinstance(value, Retries):
            value = {part.name: getattr(value, part.name) for part in fields(Retries)}
        elif isinstance(value, tuple):
            value = [str(item) for item in value]
        elif isinstance(value, dict):
            value = dict(value)
        elif isinstance(value, Rule):
            value = value.value
        plain[field.name] = value
    return plain


_SMALLEST = JobSpec(name="x", command=("x",), accelerator="x")
_DEFAULTS = {field.name: getattr(_SMALLEST, field.name) for field in fields(JobSpec)}


class _JobParser:
    """Reads one file. Goes on after a fault, so that all of them are told at once."""

    def __init__(self, plain: Any) -> None:
        if not isinstance(plain, dict):
            raise BadInput(
                f"job: a mapping of fields is needed, not {quote_value(plain)}; "
                "write at least `command: …` and `accelerator: …`"
            )
        self.faults: list[str] = []
        self.plain = {key: value for key, value in plain.items() if value is not None}
        self._refuse_unknown(self.plain, [field.name for field in FIELDS], "")

    def spec(self) -> JobSpec:
        command = self.field("command", self._argv)
        capacity = self.field("capacity", self._capacity, (Capacity.SPOT,))
        by_default = Rule.PRE if Capacity.SPOT in capacity[:1] else Rule.PASS
        env = self.field("env", self._env, {})
        read = dict(
            name=self.field("name", self._label, name_from(command or ())),
            command=command,
            setup=self.field("setup", self._argv, ()),
            accelerator=self.field("accelerator", self._accelerator),
            slices=self.field("slices", self._whole(1, MAX_SLICES), 1),
            capacity=capacity,
            zones=self.field("zones", self._several(zone_error), ()),
            providers=self.field("providers", self._several(provider_error), ()),
            pool=self.field("pool", self._label, None),
            env=env,
            secrets=self.field("secrets", lambda path, value: self._secrets(path, value, env), {}),
            workdir=self.field("workdir", self._text, "."),
            checkpoint=self.field("checkpoint", self._location, None),
            timeout=self.field("timeout", self._span(least=1), None),
            priority=self.field("priority", self._whole(-1_000_000, 1_000_000), 0),
            rule=self.field("rule", self._rule, by_default),
            retries=self.field("retries", self._retries, Retries()),
            crash_loop=self.field("crash_loop", self._whole(1, 1_000_000), 3),
            grace=self.field("grace", self._span(least=0, none=False), _DEFAULTS["grace"]),
            hung_after=self.field("hung_after", self._span(least=1), _DEFAULTS["hung_after"]),
            tags=self.field("tags", self._several(tag_error), ()),
            notes=self.field("notes", self._text, ""),
        )
        if self.faults:
            raise BadInput("\n".join(self.faults))
        return JobSpec(**read)  # type: ignore[arg-type]

    def field(self, name: str, read: Callable[[str, Any], T | None], default: Any = ...) -> Any:
        if name not in self.plain:
            if default is ...:
                example = next(field.example for field in FIELDS if field.name == name)
                self.fault(name, f"missing; write `{name}: {example}`")
                return None
            return default
        before = len(self.faults)
        found = read(name, self.plain[name])
        return found if len(self.faults) == before or default is ... else default

    def fault(self, path: str, words: str) -> None:
        self.faults.append(f"{path}: {words}")

    def _refuse_unknown(self, given: dict[Any, Any], known: list[str], path: str) -> None:
        for key in given:
            if not isinstance(key, str):
                self.fault(path + quote_value(key), "field names are words")
            elif key not in known:
                name = key if re.fullmatch(r"[\w.-]{1,60}", key) else quote_value(key)
                self.fault(path + name, "unknown field" + suggest(key, known))

    # Each reader below returns the value, or tells the fault and returns None.

    def _text(self, path: str, value: Any) -> str | None:
        if type(value) is float or (type(value) is int and value.bit_length() <= 64):
            return str(value)
        if not isinstance(value, str):
            self.fault(path, f"text is needed, not {quote_value(value)}; put it in quotes")
        elif _UNPRINTABLE.search(value):
            self.fault(path, "holds a character that no program can be given; take it out")
        elif len(value) > MAX_TEXT_LENGTH:
            self.fault(path, f"longer than {MAX_TEXT_LENGTH} characters; put it in a file")
        else:
            return value
        return None

    def _argv(self, path: str, value: Any) -> tuple[str, ...] | None:
        if isinstance(value, str):
            if not value.strip():
                return self.fault(path, "empty; write what to run")
            text = self._text(path, value)
            return None if text is None else (*SHELL, text)
        if not isinstance(value, (list, tuple)):
            return self.fault(path, f"a list or text is needed, not {quote_value(value)}")
        words = [self._text(f"{path}[{index}]", word) for index, word in enumerate(value)]
        if not words or words[0] == "":
            return self.fault(path, "empty; write what to run, such as [python, train.py]")
        return None if None in words else tuple(words)  # type: ignore[arg-type]

    def _label(self, path: str, value: Any) -> str | None:
        fault = label_error(value)
        return self.fault(path, fault) if fault else value

    def _accelerator(self, path: str, value: Any) -> str | None:
        if not isinstance(value, str) or not re.fullmatch(r"[ -~]{1,40}", value):
            return self.fault(
                path, f"no TPU type is called {quote_value(value)}; write v5e-16, say"
            )
        try:
            return topology.find(value).name
        except BadInput as error:
            return self.fault(path, str(error))

    def _whole(self, least: int, most: int) -> Callable[[str, Any], int | None]:
        def read(path: str, value: Any) -> int | None:
            if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
                return value
            cure = least if least >= 0 else 0
            if isinstance(value, (int, float)) and value == value:
                cure = int(min(max(value, least), most))
            return self.fault(
                path,
                f"a whole number from {least} to {most} is needed, not {quote_value(value)}; "
                f"write {cure}",
            )

        return read

    def _several(self, fault_of: Callable[[str], str | None]) -> Callable[[str, Any], Any]:
        """One text or a list of them, each in order and once."""

        def read(path: str, value: Any) -> tuple[str, ...] | None:
            if not isinstance(value, (list, tuple)):
                value, at = [value], lambda index: path
            else:
                at = lambda index: f"{path}[{index}]"
            before = len(self.faults)
            for index, item in enumerate(value):
                if not isinstance(item, str):
                    self.fault(at(index), f"text is needed, not {quote_value(item)}")
                elif fault := fault_of(item):
                    self.fault(at(index), fault)
                elif item in value[:index]:
                    self.fault(at(index), f"{item} is there twice; take one out")
            return tuple(value) if len(self.faults) == before else None

        return read

    def _capacity(self, path: str, value: Any) -> tuple[Capacity, ...] | None:
        kinds = [kind.value for kind in Capacity]
        if isinstance(value, (list, tuple)):
            value = [_kind(item) for item in value]
        found = self._several(
            lambda item: (
                None
                if item in kinds
                else f"no capacity is called {quote_value(item)}{suggest(item, kinds)}"
            )
        )(path, _kind(value))
        if found == ():
            return self.fault(path, f"empty; write one of {', '.join(kinds)}")
        return None if found is None else tuple(Capacity(kind) for kind in found)

    def _env(self, path: str, value: Any) -> dict[str, str] | None:
        if not isinstance(value, dict):
            return self.fault(
                path, f"a mapping is needed, not {quote_value(value)}; write {{NAME: value}}"
            )
        before = len(self.faults)
        read = {}
        for name, item in value.items():
            if not isinstance(name, str) or not _ENV_NAME.fullmatch(name):
                words = "is not a name of an environment variable; write letters, digits and _"
                self.fault(path, f"{quote_value(name)} {words}")
            elif _OURS.fullmatch(name):
                self.fault(f"{path}.{name}", "tpufleet sets this itself; take it out")
            else:
                read[name] = self._text(f"{path}.{name}", item)
        return read if len(self.faults) == before else None  # type: ignore[return-value]

    def _secrets(self, path: str, value: Any, env: dict[str, str]) -> dict[str, str] | None:
        before = len(self.faults)
        read = self._env(path, value) or {}
        for name, reference in read.items():
            if not _SECRET.fullmatch(reference):
                self.fault(
                    f"{path}.{name}",
                    "not a reference to a secret; write the name that you gave to "
                    "`tpu secret set`, or file:/path/on/host",
                )
            elif name in env:
                self.fault(f"{path}.{name}", "also in env; take one out")
        return read if len(self.faults) == before else None

    def _location(self, path: str, value: Any) -> str | None:
        text = self._text(path, value)
        if text is not None and not re.match(r"/|[a-z][a-z0-9+]*://[^/]", text):
            return self.fault(
                path,
                f"{quote_value(text)} is not a full path or URL; write gs://bucket/folder or /…",
            )
        return text

    def _span(self, least: int, none: bool = True) -> Callable[[str, Any], Any]:
        def read(path: str, value: Any) -> timedelta | str | None:
            try:
                span = durations.parse(value)
            except BadInput as error:
                return self.fault(path, str(error))
            if span is None and not none:
                return self.fault(path, "cannot be none; write 30s, say")
            if span is not None and span.total_seconds() < least:
                return self.fault(path, f"shorter than {least}s; write {least}s or none")
            return span

        return read

    def _rule(self, path: str, value: Any) -> Rule | None:
        names = [rule.value for rule in Rule]
        if isinstance(value, str) and value.strip().lower() in names:
            return Rule(value.strip().lower())
        near = suggest(value if isinstance(value, str) else "", names)
        return self.fault(path, f"no rule is called {quote_value(value)}{near}")

    def _retries(self, path: str, value: Any) -> Retries | None:
        if not isinstance(value, dict):
            example = value if isinstance(value, int) and 0 <= value <= 1000 else 2
            words = f"a mapping of budgets is needed, not {quote_value(value)}"
            return self.fault(path, f"{words}; write {{failure: {int(example)}}}")
        given = {key: amount for key, amount in value.items() if amount is not None}
        names = [field.name for field in fields(Retries)]
        before = len(self.faults)
        self._refuse_unknown(given, names, f"{path}.")
        whole = self._whole(0, 1_000_000)
        read = {name: whole(f"{path}.{name}", given[name]) for name in names if name in given}
        return Retries(**read) if len(self.faults) == before else None  # type: ignore[arg-type]


def _kind(value: Any) -> Any:
    return value.strip().lower().replace("_", "-") if isinstance(value, str) else value
