"""The job file: what is read, what is refused, and in which words."""

from __future__ import annotations

from datetime import timedelta

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tpufleet.errors import BadInput
from tpufleet.model import job_file, topology
from tpufleet.model.jobs import Capacity, JobSpec, Retries, Rule

SMALLEST = {"command": ["python", "train.py"], "accelerator": "v5e-16"}
NAME_RULE = (
    "is not a name of lower-case letters, digits and dashes, at most 40, starting with a letter"
)


def faults(**plain) -> list[str]:
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({**SMALLEST, **plain})
    return str(caught.value).splitlines()


def test_the_smallest_file_gets_every_default():
    assert job_file.parse_job(SMALLEST) == JobSpec(
        name="train", command=("python", "train.py"), accelerator="v5litepod-16"
    )


def test_every_field_is_read():
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


def test_the_table_of_fields_names_each_field_of_a_spec_in_the_file_order():
    assert {field.name for field in job_file.FIELDS} == set(JobSpec.__slots__)


@pytest.mark.parametrize(
    ("capacity", "rule"),
    [(None, "pre"), ("spot", "pre"), (["spot", "on-demand"], "pre"), ("on-demand", "pass"),
     (["reserved", "spot"], "pass"), ("queued", "pass")],
)  # fmt: skip
def test_the_rule_follows_the_first_kind_of_capacity(capacity, rule):
    assert job_file.parse_job({**SMALLEST, "capacity": capacity}).rule == rule


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
def test_a_job_without_a_name_is_called_after_its_program(command, name):
    assert job_file.parse_job({"command": command, "accelerator": "v4-8"}).name == name


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("name", "My Job", f"name: 'My Job' {NAME_RULE}; write my-job"),
        ("name", 7, f"name: 7 {NAME_RULE}; write train-1"),
        ("name", "a" * 41, f"name: '{'a' * 41}' {NAME_RULE}; write {'a' * 40}"),
        ("command", [], "command: empty; write what to run, such as [python, train.py]"),
        ("command", "  ", "command: empty; write what to run"),
        ("command", {"a": 1}, "command: a list or text is needed, not a mapping"),
        ("command", ["x", True], "command[1]: text is needed, not true; put it in quotes"),
        ("command", ["x", "\0"],
         "command[1]: holds a character that no program can be given; take it out"),
        ("setup", 5, "setup: a list or text is needed, not 5"),
        ("accelerator", "v5e-15",
         "accelerator: no TPU type is called 'v5e-15'; the nearest size is v5e-16"),
        ("accelerator", "h100", "accelerator: no TPU type is called 'h100'; "
         "`tpu types` lists them all"),
        ("accelerator", "v5e-²",
         "accelerator: no TPU type is called 'v5e-²'; write v5e-16, say"),
        ("slices", 0, "slices: a whole number from 1 to 4096 is needed, not 0; write 1"),
        ("slices", 2.5, "slices: a whole number from 1 to 4096 is needed, not 2.5; write 2"),
        ("slices", True, "slices: a whole number from 1 to 4096 is needed, not true; write 1"),
        ("capacity", "sopt", "capacity: no capacity is called 'sopt'; did you mean spot?"),
        ("capacity", ["spot", "cheap"], "capacity[1]: no capacity is called 'cheap'; "
         "write one of spot, on-demand, reserved, queued"),
        ("capacity", [], "capacity: empty; write one of spot, on-demand, reserved, queued"),
        ("capacity", ["spot", "SPOT"], "capacity[1]: spot is there twice; take one out"),
        ("zones", ["us-central1-a", "us-east1"],
         "zones[1]: 'us-east1' is not a zone; write us-east1-a, say"),
        ("zones", "US-Central1-A",
         "zones: 'US-Central1-A' is not a zone; write us-central1-a, say"),
        ("zones", [3], "zones[0]: text is needed, not 3"),
        ("providers", "tpuvm", "providers: no provider is called 'tpuvm'; did you mean tpu-vm?"),
        ("pool", "Lab", f"pool: 'Lab' {NAME_RULE}; write lab"),
        ("env", ["A=1"], "env: a mapping is needed, not a list; write {NAME: value}"),
        ("env", {"A-B": 1}, "env: 'A-B' is not a name of an environment variable; "
         "write letters, digits and _"),
        ("env", {"DEBUG": True}, "env.DEBUG: text is needed, not true; put it in quotes"),
        ("env", {"TPU_WORKER_ID": 0}, "env.TPU_WORKER_ID: tpufleet sets this itself; take it out"),
        ("secrets", {"KEY": "sk-123 456"}, "secrets.KEY: not a reference to a secret; write the "
         "name that you gave to `tpu secret set`, or file:/path/on/host"),
        ("workdir", [], "workdir: text is needed, not a list; put it in quotes"),
        ("checkpoint", "ckpt", "checkpoint: 'ckpt' is not a full path or URL; "
         "write gs://bucket/folder or /…"),
        ("timeout", "90min", "timeout: '90min' is not a duration; write 90m"),
        ("timeout", "soon", "timeout: 'soon' is not a duration; "
         "write 90s, 15m, 2h, 1d, 1h30m or a number of seconds"),
        ("timeout", -1, "timeout: a duration cannot be negative or endless; "
         "write none for no limit"),
        ("timeout", 0, "timeout: shorter than 1s; write 1s or none"),
        ("timeout", "99999d", "timeout: longer than ten years; write none for no limit"),
        ("priority", "high", "priority: a whole number from -1000000 to 1000000 is needed, "
         "not 'high'; write 0"),
        ("rule", "resum", "rule: no rule is called 'resum'; did you mean resume?"),
        ("rule", 1, "rule: no rule is called 1; write one of pre, pass, reapply, rerun, resume"),
        ("retries", 3, "retries: a mapping of budgets is needed, not 3; write {failure: 3}"),
        ("retries", {"infra": 1}, "retries.infra: unknown field; did you mean infrastructure?"),
        ("retries", {"hang": -1}, "retries.hang: a whole number from 0 to 1000000 is needed, "
         "not -1; write 0"),
        ("crash_loop", 0,
         "crash_loop: a whole number from 1 to 1000000 is needed, not 0; write 1"),
        ("grace", "none", "grace: cannot be none; write 30s, say"),
        ("hung_after", float("nan"), "hung_after: a duration cannot be negative or endless; "
         "write none for no limit"),
        ("tags", ["a b"], "tags[0]: 'a b' is not a tag of letters, digits and _.=:/-, "
         "at most 63; write a-b"),
        ("notes", ["x"], "notes: text is needed, not a list; put it in quotes"),
        ("cmd", "x", "cmd: unknown field; did you mean command?"),
        ("zone", "x", "zone: unknown field; did you mean zones?"),
        (4, "x", "4: field names are words"),
    ],
    ids=lambda value: str(value)[:30],
)  # fmt: skip
def test_a_bad_field_is_told_with_its_path_and_its_cure(field, value, words):
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({**SMALLEST, field: value})
    assert str(caught.value) == words


def test_every_fault_is_told_not_only_the_first():
    told = faults(zones=["us-east1", "us-central1-a", 3], retries={"infra": 1}, grace="x", rul="y")
    assert [line.partition(":")[0] for line in told] == [
        "rul", "zones[0]", "zones[2]", "retries.infra", "grace",
    ]  # fmt: skip


def test_what_is_missing_is_told_with_an_example():
    with pytest.raises(BadInput) as caught:
        job_file.parse_job({})
    assert str(caught.value).splitlines() == [
        "command: missing; write `command: [python, train.py, lr=0.01]`",
        "accelerator: missing; write `accelerator: v5e-16`",
    ]


def test_a_secret_may_not_also_be_in_the_environment():
    assert faults(env={"KEY": "x"}, secrets={"KEY": "y"}) == [
        "secrets.KEY: also in env; take one out"
    ]


def test_a_fault_never_shows_what_may_be_a_secret():
    told = faults(secrets={"KEY": "not a reference but hunter2"})
    assert "hunter2" not in told[0]


@pytest.mark.parametrize(
    ("written", "seconds"),
    [("90s", 90), ("15m", 900), ("2h", 7200), ("1d", 86400), ("1h30m", 5400), ("1h 30m", 5400),
     (90, 90), ("90", 90), (1.5, 1.5), ("0.5h", 1800), ("1d2h3m4s", 93784)],
)  # fmt: skip
def test_durations_are_read_as_people_write_them(written, seconds):
    assert job_file.parse_job({**SMALLEST, "timeout": written}).timeout == timedelta(
        seconds=seconds
    )


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
    accelerator=st.sampled_from(sorted(topology.all_types())),
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
    grace=spans,
    hung_after=st.none() | spans,
    tags=st.lists(st.from_regex(r"[a-z0-9][a-z_.=-]{0,9}", fullmatch=True), unique=True).map(tuple),
    notes=texts,
)


@given(job_specs)
def test_a_spec_written_to_a_file_reads_back_as_itself(spec):
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


@settings(max_examples=400)
@given(anything | st.dictionaries(field_names | scalars, anything, max_size=6))
def test_whatever_a_file_holds_it_is_read_or_refused_in_words(plain):
    try:
        spec = job_file.parse_job(plain)
    except BadInput as error:
        assert all(": " in line for line in str(error).splitlines())
    else:
        assert job_file.parse_job(job_file.to_document(spec)) == spec


@settings(max_examples=400)
@given(field_names, anything)
def test_whatever_one_field_holds_only_that_field_is_blamed(name, value):
    try:
        job_file.parse_job({**SMALLEST, name: value})
    except BadInput as error:
        assert all(line.startswith(name) for line in str(error).splitlines())


@pytest.mark.parametrize("name", [field.name for field in job_file.FIELDS])
def test_a_number_too_large_to_print_is_refused_in_words(name):
    with pytest.raises(BadInput, match=name):
        job_file.parse_job({**SMALLEST, name: [2**20000] if name == "command" else 2**20000})


@pytest.mark.parametrize("field", job_file.FIELDS, ids=lambda field: field.name)
def test_the_example_of_each_field_is_valid(field):
    spec = job_file.parse_job({**SMALLEST, field.name: yaml.safe_load(field.example)})
    assert getattr(spec, field.name) != getattr(
        job_file.parse_job({**SMALLEST, "command": ["x"], "accelerator": "v4-8"}), field.name
    )
