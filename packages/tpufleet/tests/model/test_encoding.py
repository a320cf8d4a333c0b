"""Model objects to JSON and back: round trips, and clear errors for invalid input."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Union, get_args, get_origin, get_type_hints

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tpufleet.errors import BadInput
from tpufleet.model.events import Event
from tpufleet.model.fleet.agent_protocol import Assignment, Heartbeat, HeartbeatReply
from tpufleet.model.fleet.hosts import Host, Progress
from tpufleet.model.fleet.pools import CapacityRefusal, Pool
from tpufleet.model.fleet.slices import TpuSlice
from tpufleet.model.inbox import InboxMessage
from tpufleet.model.job.attempts import Attempt
from tpufleet.model.job.jobs import Capacity, Job, JobSpec, JobState
from tpufleet.model.values import encoding
from tpufleet.model.values.bounds import Seconds, StepNumber

KINDS = (
    Job, Attempt, TpuSlice, Host, Event, InboxMessage, Pool, CapacityRefusal, Heartbeat,
    HeartbeatReply, Assignment,
)  # fmt: skip
NOON = datetime(2026, 4, 5, 12, 0, 0, 123456, tzinfo=UTC)

# JSON has no NaN, and a model holds moments with a time zone and spans of milliseconds.
PLAIN = {
    datetime: st.datetimes(
        min_value=datetime(2000, 1, 1), max_value=datetime(2100, 1, 1), timezones=st.just(UTC)
    ),
    timedelta: st.integers(0, 10**9).map(lambda count: timedelta(milliseconds=count)),
    float: st.floats(allow_nan=False, allow_infinity=False),
    int: st.integers(-(2**53), 2**53),
    StepNumber: st.integers(0, 2**53),
    Seconds: st.floats(0, 1e8),
    str: st.text(st.characters(codec="utf-8"), max_size=12),
    bool: st.booleans(),
    NoneType: st.none(),
}


def any_of(kind) -> st.SearchStrategy:
    """Values of a type as the model's fields are declared."""
    kind = getattr(kind, "__supertype__", kind)
    inner = get_args(kind)
    if kind in PLAIN:
        return PLAIN[kind]
    if get_origin(kind) is Annotated:
        return any_of(inner[0])
    if get_origin(kind) in (Union, UnionType):
        return st.one_of(any_of(item) for item in inner)
    if get_origin(kind) is tuple:
        return st.lists(any_of(inner[0]), max_size=2).map(tuple)
    if get_origin(kind) is dict:
        return st.dictionaries(any_of(inner[0]), any_of(inner[1]), max_size=2)
    if issubclass(kind, Enum):
        return st.sampled_from(kind)
    hints = get_type_hints(kind, include_extras=True)
    if issubclass(kind, msgspec.Struct):  # whose numbers and lists have bounds
        names = [name for name in kind.__struct_fields__ if name in FREE]
        return st.builds(kind, **{name: any_of(hints[name]) for name in names})
    return st.builds(kind, **{field.name: any_of(hints[field.name]) for field in fields(kind)})


FREE = {
    "name", "command", "accelerator", "setup", "env", "timeout", "grace", "hung_after", "rule",
    "pod", "mounts", "bucket", "path", "read_only", "labels", "volumes", "tolerations", "reuse",
    "dependencies", "python", "require_reservation",
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@settings(max_examples=examples(25))
@given(data=st.data())
def test_objects_round_trip_through_json(kind, data):
    value = data.draw(any_of(kind))
    assert encoding.from_json(encoding.to_json(value), kind) == value
    plain = encoding.to_builtins(value)
    assert encoding.from_builtins(plain, kind) == value
    assert json.loads(encoding.to_json(value)) == json.loads(json.dumps(plain))


def test_states_are_strings_times_have_a_zone_and_durations_are_iso():
    spec = JobSpec(
        name="a", command=("true",), accelerator="v5litepod-16", timeout=timedelta(minutes=90)
    )
    plain = encoding.to_builtins(Job(id="j", spec=spec, owner="ada", submitted_at=NOON))
    assert plain["state"] == "queued" and list(plain["spec"]["capacity"]) == ["spot"]
    assert plain["submitted_at"] == "2026-04-05T12:00:00.123456Z"
    assert plain["spec"]["timeout"] == "PT5400S"


def test_an_unknown_field_is_ignored():
    text = json.dumps({"step": 7, "colour": "blue"})
    assert encoding.from_json(text, Progress) == Progress(step=7)


def test_a_missing_field_gets_its_default():
    written = encoding.to_builtins(
        Pool(name="lab", provider="local", accelerator="v4-8", largest=2)
    )
    for name in ("smallest", "zones", "capacity", "members", "supersede", "idle_after"):
        del written[name]
    read = encoding.from_builtins(written, Pool)
    assert read.capacity == (Capacity.SPOT,) and read.idle_after == timedelta(minutes=10)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "truncated"),
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"step": "seven"}', "$.step"),
        (b'{"at": "yesterday"}', "$.at"),
        (b'{"metrics": {"loss": "low"}}', "$.metrics"),
        (b"\xff\xfe", "malformed"),
    ],
)
def test_invalid_json_is_rejected_with_the_path_of_the_field(text, message):
    with pytest.raises(BadInput) as error:
        encoding.from_json(text, Progress)
    assert "not a valid Progress" in str(error.value) and message in str(error.value)


@pytest.mark.parametrize("text", ["waiting", "succeeded"])
def test_an_enum_comes_back_as_itself(text):
    assert encoding.from_builtins(text, JobState) is JobState(text)


def test_an_unknown_state_is_refused():
    with pytest.raises(BadInput, match="paused"):
        encoding.from_builtins("paused", JobState)


@given(st.binary(max_size=60))
def test_any_bytes_are_an_object_or_a_clear_error(data):
    for kind in (Heartbeat, Progress, InboxMessage):
        try:
            encoding.from_json(data, kind)
        except BadInput as error:
            assert f"not a valid {kind.__name__}" in str(error)


# Threads that meet the same new types at once, over and over.
TOGETHER = """
import faulthandler, sys, threading, types
from tpufleet.model.values import encoding

faulthandler.enable()
sys.setswitchinterval(1e-6)
SOURCE = "from __future__ import annotations\\nfrom dataclasses import dataclass\\n" + "".join(
    f"@dataclass(frozen=True, kw_only=True, slots=True)\\nclass K{i}:\\n"
    f"    a: int\\n    b: {'K%d' % (i - 1) if i else 'int'} | None = None\\n"
    "    c: tuple[str, ...] = ()\\n    d: dict[str, int] | None = None\\n"
    for i in range(6)
)
for number in range(60):
    module = sys.modules[f"kinds{number}"] = types.ModuleType(f"kinds{number}")
    exec(SOURCE, module.__dict__)
    start = threading.Barrier(6)

    def work(first):
        start.wait()
        for step in range(6):
            kind = getattr(module, f"K{(first + step) % 6}")
            assert encoding.from_json(b'{"a": 1, "c": ["x"]}', kind).c == ("x",)
            assert encoding.from_builtins({"a": 2}, kind).a == 2

    threads = [threading.Thread(target=work, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


def test_threads_that_first_use_a_type_at_once_do_not_crash():
    done = subprocess.run(
        [sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=False, timeout=900
    )
    assert (done.returncode, done.stderr) == (0, "")
