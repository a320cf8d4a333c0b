"""The job file: what is parsed, what is rejected, and with which message."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tpufleet.errors import BadInput
from tpufleet.model.job import job_file
from tpufleet.model.job.jobs import Capacity, JobSpec, Retries, Rule
from tpufleet.model.tpu import type_lookup
from tpufleet.model.values.encoding import from_json, to_json

MINIMAL = {"command": ["python", "train.py"], "accelerator": "v5e-16"}
SCHEMA = job_file.json_schema()
jsonschema = pytest.importorskip("jsonschema")
NAME_RULE = (
    "is not a name (lower-case letters, digits and dashes, starting with a letter, "
    "at most 40 characters)"
)


def errors_of(**document) -> list[str]:
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({**MINIMAL, **document})
    return str(caught.value).splitlines()


def test_the_minimal_file_gets_every_default():
    assert job_file.parse_job(MINIMAL) == JobSpec(
        name="train", command=("python", "train.py"), accelerator="v5litepod-16"
    )


def test_every_field_is_parsed():
    spec = job_file.parse_job(
        {
            "name": "tiny-lm",
            "command": ["python", "train.py", "lr=0.01"],
            "setup": "pip install -r requirements.txt",
            "accelerator": "V5E-16",
            "slices": 2,
            "capacity": ["reserved", "on_demand"],
            "zones": ["us-central1-a", "local-a"],
            "providers": ["tpu-vm", "gke"],
            "pool": "lab",
            "env": {"LR": 0.1, "MODE": "offline"},
            "secrets": {"WANDB_API_KEY": "wandb", "HF": "file:/etc/hf-token"},
            "workdir": "..",
            "checkpoint": "gs://bucket/tiny",
            "timeout": "1h30m",
            "priority": -3,
            "rule": "resume",
            "retries": {"failure": 2},
            "crash_loop": 5,
            "grace": 90,
            "hung_after": "none",
            "tags": "sweep",
            "notes": "with dropout",
        }
    )
    assert spec == JobSpec(
        name="tiny-lm",
        command=("python", "train.py", "lr=0.01"),
        setup=("bash", "-euo", "pipefail", "-c", "pip install -r requirements.txt"),
        accelerator="v5litepod-16",
        slices=2,
        capacity=(Capacity.RESERVED, Capacity.ON_DEMAND),
        zones=("us-central1-a", "local-a"),
        providers=("tpu-vm", "gke"),
        pool="lab",
        env={"LR": "0.1", "MODE": "offline"},
        secrets={"WANDB_API_KEY": "wandb", "HF": "file:/etc/hf-token"},
        workdir="..",
        checkpoint="gs://bucket/tiny",
        timeout=timedelta(minutes=90),
        priority=-3,
        rule=Rule.RESUME,
        retries=Retries(failure=2),
        crash_loop=5,
        grace=timedelta(seconds=90),
        hung_after=None,
        tags=("sweep",),
        notes="with dropout",
    )


def test_every_attribute_of_a_job_spec_has_a_field():
    assert {field.name for field in job_file.FIELDS} == set(JobSpec.__struct_fields__)


@pytest.mark.parametrize("capacity", [None, "spot", "on-demand", ["reserved", "spot"], "queued"])
def test_the_default_rule_is_the_same_for_every_capacity_type(capacity):
    assert job_file.parse_job({**MINIMAL, "capacity": capacity}).rule == "auto"


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "train.py", "lr=1"], "train"),
        (["python3.11", "-m", "lab.experiments.My_Sweep"], "my-sweep"),
        (["/opt/bin/run_all.sh"], "run-all"),
        ("XLA_FLAGS=1 python eval.py", "eval"),
        (["bash"], "job"),
        ("…", "job"),
    ],
    ids=str,
)
def test_the_default_name_comes_from_the_program(command, name):
    assert job_file.parse_job({"command": command, "accelerator": "v4-8"}).name == name


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("name", "My Job", f"name: 'My Job' {NAME_RULE}; for example my-job"),
        ("name", 7, f"name: 7 {NAME_RULE}; for example train-1"),
        ("name", "a" * 41, f"name: '{'a' * 41}' {NAME_RULE}; for example {'a' * 40}"),
        ("command", [], "command: empty; write the command to run, such as [python, train.py]"),
        ("command", "  ", "command: empty; write the command to run"),
        ("command", {"a": 1}, "command: must be a list or text, not a mapping"),
        ("command", ["x", True], "command[1]: must be text, not true; put it in quotes"),
        ("command", ["x", "\0"],
         "command[1]: contains a NUL or an unpaired surrogate; remove it"),
        ("setup", 5, "setup: must be a list or text, not 5"),
        ("accelerator", "v5e-15",
         "accelerator: unknown TPU type 'v5e-15'; the nearest size is v5e-16"),
        ("accelerator", "h100", "accelerator: unknown TPU type 'h100'; "
         "run `tpu types` for the list"),
        ("accelerator", "v5e-²",
         "accelerator: 'v5e-²' is not a TPU type; for example v5e-16"),
        ("slices", 0, "slices: must be an integer from 1 to 4096, not 0; for example 2"),
        ("slices", 2.5, "slices: must be an integer from 1 to 4096, not 2.5; for example 2"),
        ("slices", True, "slices: must be an integer from 1 to 4096, not true; for example 2"),
        ("slices", {"min": 4, "max": 2}, "slices: must be an integer from 1 to 4096, not a map"),
        ("slices", {"min": 2}, "slices: must be an integer from 1 to 4096, not a mapping; for"),
        ("slices", "4-2", "slices: must be an integer from 1 to 4096, not '4-2'; for example 2"),
        ("capacity", "sopt", "capacity: unknown value 'sopt'; did you mean spot?"),
        ("capacity", ["spot", "cheap"], "capacity[1]: unknown value 'cheap'; "
         "write one of spot, on-demand, reserved, queued"),
        ("capacity", [], "capacity: empty; write at least 1"),
        ("capacity", ["spot", "SPOT"], "capacity[1]: duplicate 'SPOT'; remove one"),
        ("zones", ["us-central1-a", "us-east1"],
         "zones[1]: 'us-east1' is not a zone; for example us-east1-a"),
        ("zones", "US-Central1-A",
         "zones: 'US-Central1-A' is not a zone; for example us-central1-a"),
        ("zones", [3], "zones[0]: 3 is not a zone; for example us-central1-a"),
        ("providers", "tpuvm", "providers: unknown provider 'tpuvm'; did you mean tpu-vm?"),
        ("pool", "Lab", f"pool: 'Lab' {NAME_RULE}; for example lab"),
        ("env", ["A=1"], "env: must be a mapping, not a list; write {WANDB_MODE: offline}"),
        ("env", {"A-B": 1}, "env.A-B: 'A-B' is not a variable (letters, digits and _); "
         "for example LR"),
        ("env", {"DEBUG": True}, "env.DEBUG: must be text, not true; put it in quotes"),
        ("env", {"TPU_WORKER_ID": 0}, "env.TPU_WORKER_ID: reserved by tpufleet or the system; "
         "use another variable"),
        ("secrets", {"KEY": "sk-123 456"}, "secrets.KEY: not a secret; write a "
         "name from `tpu secret set`, or file:/path/on/host"),
        ("workdir", [], "workdir: must be text, not a list; put it in quotes"),
        ("checkpoint", "ckpt", "checkpoint: 'ckpt' is not an absolute path or URL; "
         "for example gs://bucket/folder or /mnt/checkpoints"),
        ("timeout", "90min", "timeout: '90min' is not a duration; for example 90m"),
        ("timeout", "soon", "timeout: 'soon' is not a duration; "
         "for example 90s, 15m, 2h, 1d, 1h30m or a number of seconds"),
        ("timeout", -1, "timeout: must be from zero to ten years; write none for no limit"),
        ("timeout", 0, "timeout: must be from 1s to 3650d, not '0s'"),
        ("timeout", "99999d", "timeout: must be from zero to ten years; write none for no limit"),
        ("priority", "high", "priority: must be an integer from -1000000 to 1000000, "
         "not 'high'; for example 10"),
        ("rule", "resum", "rule: unknown value 'resum'; did you mean resume?"),
        ("rule", 1, "rule: unknown value 1; write one of auto, pre, pass, reapply, rerun, resume"),
        ("retries", 3, "retries: must be a mapping with fields such as failure"),
        ("retries", {"infra": 1}, "retries.infra: unknown field; did you mean infrastructure?"),
        ("retries", {"hang": -1}, "retries.hang: must be an integer from 0 to 1000000, "
         "not -1"),
        ("crash_loop", 0,
         "crash_loop: must be an integer from 1 to 1000000, not 0; for example 5"),
        ("grace", "none", "grace: cannot be none; leave it out for the default"),
        ("grace", "100d", "grace: must be from 0s to 1h, not '100d'"),
        ("hung_after", float("nan"), "hung_after: must be from zero to ten years; "
         "write none for no limit"),
        ("tags", [f"t{n}" for n in range(101)], "tags: 101 items; at most 100"),
        ("tags", ["a b"], "tags[0]: 'a b' is not a tag (letters, digits and _.=:/-, "
         "at most 63 characters); for example a-b"),
        ("mounts", [f"bucket:/data/{n}" for n in range(101)], "mounts: 101 items; at most 100"),
        ("command", ["x" * 99_999] * 11, "command: 1099989 characters; at most 1048576"),
        ("setup", ["x" * 99_999] * 11, "setup: 1099989 characters; at most 1048576"),
        ("notes", ["x"], "notes: must be text, not a list; put it in quotes"),
        ("cmd", "x", "cmd: unknown field; did you mean command?"),
        ("zone", "x", "zone: unknown field; did you mean zones?"),
        (4, "x", "4: unknown field; write one of "),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_an_invalid_field_is_reported_with_path_and_fix(field, value, message):
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({**MINIMAL, field: value})
    assert str(caught.value).startswith(message)


def test_every_error_is_reported_not_only_the_first():
    errors = errors_of(
        zones=["us-east1", "us-central1-a", 3], retries={"infra": 1}, grace="x", rul="y"
    )
    assert [line.partition(":")[0] for line in errors] == [
        "zones[0]", "zones[2]", "retries.infra", "grace", "rul",
    ]  # fmt: skip


def test_a_missing_field_is_reported_with_an_example():
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({})
    assert str(caught.value).splitlines() == [
        "command: required; for example [python, train.py, lr=0.01]",
        "accelerator: required; for example v5e-16",
    ]


def test_a_secret_must_not_also_be_in_env():
    assert errors_of(env={"KEY": "x"}, secrets={"KEY": "y"}) == [
        "secrets.KEY: also in env; remove one"
    ]


def test_an_error_never_shows_a_possible_secret():
    errors = errors_of(secrets={"KEY": "not a reference but hunter2"})
    assert "hunter2" not in errors[0]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("1h 30m", 5400),
     (90, 90), ("90", 90), (1.5, 1.5), ("0.5h", 1800), ("1d2h3m4s", 93784)],
)  # fmt: skip
def test_durations_accept_common_notations(written, seconds):
    assert job_file.parse_job({**MINIMAL, "timeout": written}).timeout == timedelta(seconds=seconds)


labels = st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)
texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
spans = st.timedeltas(timedelta(seconds=1), timedelta(days=300))
env_names = st.from_regex(r"[A-SU-Z_][A-Z0-9_]{0,10}", fullmatch=True).filter(
    lambda name: not name.startswith(("JAX_", "MEGASCALE_"))
)
job_specs = st.builds(
    JobSpec,
    name=labels,
    command=st.builds(lambda first, rest: ("x" + first, *rest), texts, st.lists(texts)),
    accelerator=st.sampled_from(sorted(type_lookup.all_types())),
    setup=st.one_of(st.just(()), st.builds(lambda word: ("sh", "-c", word), texts)),
    slices=st.integers(1, 4096),
    capacity=st.lists(st.sampled_from(Capacity), min_size=1, unique=True).map(tuple),
    zones=st.lists(
        st.from_regex(r"[a-z]{2,8}-[a-z]{2,8}[1-9]-[a-f]", fullmatch=True), unique=True
    ).map(tuple),
    providers=st.lists(st.sampled_from(["local", "tpu-vm", "gke"]), unique=True).map(tuple),
    pool=st.none() | labels,
    env=st.dictionaries(env_names, texts, max_size=3),
    secrets=st.dictionaries(env_names.map(lambda n: "T" + n), st.just("file:/a"), max_size=2),
    workdir=texts,
    checkpoint=st.none() | st.just("gs://bucket/x"),
    timeout=st.none() | spans,
    priority=st.integers(-1000, 1000),
    rule=st.sampled_from(Rule),
    retries=st.builds(Retries, failure=st.integers(0, 9), hang=st.integers(0, 9)),
    crash_loop=st.integers(1, 99),
    grace=st.timedeltas(timedelta(0), timedelta(hours=1)),
    hung_after=st.none() | spans,
    tags=st.lists(st.from_regex(r"[a-z0-9][a-z_.=-]{0,9}", fullmatch=True), unique=True).map(tuple),
    notes=texts,
)


def test_defaults_in_the_table_are_the_defaults_of_the_spec():
    spec = job_file.parse_job(MINIMAL)
    for field in job_file.FIELDS:
        if field.label in ("integer", "duration"):
            shown = "none" if field.default == "none" else yaml.safe_load(field.default)
            parsed = job_file.parse_job({**MINIMAL, field.name: shown})
            assert getattr(parsed, field.name) == getattr(spec, field.name)


@given(job_specs)
def test_every_document_that_is_written_satisfies_the_json_schema(spec):
    jsonschema.validate(job_file.to_document(spec), SCHEMA)


@pytest.mark.parametrize(
    ("field", "value"),
    [("slices", 0), ("slices", "two"), ("capacity", []), ("capacity", "cheap"), ("zones", [3]),
     ("env", ["A=1"]), ("env", {"A-B": 1}), ("retries", {"infra": 1}), ("rule", "resum"),
     ("command", []), ("checkpoint", "ckpt"), ("cmd", "x")],
    ids=str,
)  # fmt: skip
def test_the_json_schema_rejects_what_the_parser_rejects(field, value):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**MINIMAL, field: value}, SCHEMA)
    assert errors_of(**{field: value})


def test_the_json_schema_is_valid_and_describes_every_field():
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert set(SCHEMA["properties"]) == {field.name for field in job_file.FIELDS}
    assert SCHEMA["required"] == ["command", "accelerator"]


@given(job_specs)
def test_a_spec_round_trips_through_a_document(spec):
    assert job_file.parse_job(job_file.to_document(spec)) == spec


scalars = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=30)
    | st.binary(max_size=3) | st.dates() | st.just(10**4000) | st.just("\ud800")
)  # fmt: skip
anything = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner, max_size=4),
    max_leaves=8,
)
field_names = st.sampled_from([field.name for field in job_file.FIELDS])


@settings(max_examples=examples(400))
@given(anything | st.dictionaries(field_names | scalars, anything, max_size=6))
def test_any_document_is_parsed_or_rejected_with_messages(document):
    try:
        spec = job_file.parse_job(document)
    except BadInput as error:
        assert all(": " in line for line in str(error).splitlines())
    else:
        assert job_file.parse_job(job_file.to_document(spec)) == spec


@settings(max_examples=examples(400))
@given(field_names, anything)
def test_an_invalid_field_causes_errors_for_that_field_only(name, value):
    try:
        job_file.parse_job({**MINIMAL, name: value})
    except BadInput as error:
        assert all(line.startswith(name) for line in str(error).splitlines())


@pytest.mark.parametrize("name", [field.name for field in job_file.FIELDS])
def test_a_number_too_large_to_print_is_rejected_with_a_message(name):
    with pytest.raises(BadInput, match=name):
        job_file.parse_job({**MINIMAL, name: [2**20000] if name == "command" else 2**20000})


@pytest.mark.parametrize("field", job_file.FIELDS, ids=lambda field: field.name)
def test_the_example_of_each_field_is_valid(field):
    spec = job_file.parse_job({**MINIMAL, field.name: yaml.safe_load(field.example)})
    assert getattr(spec, field.name) != getattr(
        job_file.parse_job({**MINIMAL, "command": ["x"], "accelerator": "v4-8"}), field.name
    )


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": "loss [0-9.]+"}, "metrics.loss: has no group; put the number in parentheses"),
        ({"loss": "(["}, "metrics.loss: not a regular expression"),
        ({"loss": "([\x01-\U0010ffff])"}, "metrics.loss: has a range of characters beyond ASCII"),
        ({"loss": r"(?i)([a-\uffff])"}, "metrics.loss: has a range of characters beyond ASCII"),
        ({"loss": r"([a-\N{DOUBLE STRUCK CAPITAL Z}])"}, "metrics.loss: has a range"),
        ({"a b": "(x)"}, "is not a metric"),
        ("loss", "metrics: must be a mapping"),
    ],
)
def test_patterns_of_metrics_are_checked(metrics, message):
    with pytest.raises(BadInput, match=re.escape(message)):
        job_file.parse_job({"command": "x", "accelerator": "v5e-16", "metrics": metrics})


@pytest.mark.parametrize(
    ("written", "least", "most", "document"),
    [
        (2, 2, 2, 2),
        ("2", 2, 2, 2),
        ({"min": 2, "max": 4}, 2, 4, {"min": 2, "max": 4}),
        ("2-4", 2, 4, {"min": 2, "max": 4}),
        ({"min": 3, "max": 3}, 3, 3, 3),
    ],
)
def test_the_number_of_slices_may_be_a_range(written, least, most, document):
    spec = job_file.parse_job({**MINIMAL, "slices": written})
    assert (spec.min_slices, spec.max_slices) == (least, most)
    assert job_file.to_document(spec)["slices"] == document
    assert from_json(to_json(spec), JobSpec) == spec, "as the database keeps it"


def test_the_pattern_of_the_reference_finds_every_number():
    example = next(row.example for row in job_file.FIELDS if row.name == "metrics")
    pattern = re.compile(yaml.safe_load(example)["loss"])
    for number in ("0.5", "-3", "1e-05", "nan", "inf"):
        found = pattern.search(f"step 7, loss: {number}, lr: 0.1")
        assert found is not None and found[1] == number
