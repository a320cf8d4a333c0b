"""Pipelines have the fields, types and values of Google's schema of a build, and keep the rules of
https://cloud.google.com/build/docs/build-config-file-schema that the schema does not state.

`cloud_build_schema.json` is `Build` of the discovery document of the Cloud Build API, without
descriptions and without fields that only the service sets.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.environment.environments import example
from tpufleet_gke.environment.cloud_build import pipelines

SCHEMAS = json.loads(Path(__file__).with_name("cloud_build_schema.json").read_text())["schemas"]
FILES = {name: yaml.safe_load(text) for name, text in pipelines.files(example()).items()}
# https://cloud.google.com/build/docs/configuring-builds/substitute-variable-values
BUILT_IN = {
    "PROJECT_ID", "BUILD_ID", "PROJECT_NUMBER", "LOCATION", "TRIGGER_NAME", "COMMIT_SHA",
    "REVISION_ID", "SHORT_SHA", "REPO_NAME", "REPO_FULL_NAME", "BRANCH_NAME", "TAG_NAME",
    "REF_NAME", "TRIGGER_BUILD_CONFIG_PATH", "SERVICE_ACCOUNT_EMAIL", "SERVICE_ACCOUNT",
}  # fmt: skip
SCALARS: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "boolean": (bool,),
    "int32": (int,),
    "int64": (int, str),
    "google-duration": (str,),
    "google-datetime": (str,),
    "byte": (str,),
}


def errors(value: Any, kind: Any, path: str) -> Iterator[str]:
    if isinstance(kind, list):
        if not isinstance(value, list):
            yield f"{path}: not a list"
            return
        for index, item in enumerate(value):
            yield from errors(item, kind[0], f"{path}[{index}]")
    elif isinstance(kind, dict):
        for key, item in value.items():
            yield from errors(item, kind["*"], f"{path}.{key}")
    elif kind in SCHEMAS:
        for key, item in value.items():
            if key not in SCHEMAS[kind]:
                yield f"{path}: {kind} has no field {key}"
            else:
                yield from errors(item, SCHEMAS[kind][key], f"{path}.{key}")
    elif kind in SCALARS:
        if not isinstance(value, SCALARS[kind]):
            yield f"{path}: {value!r} is not a {kind}"
        elif kind == "google-duration" and not re.fullmatch(r"[0-9]+(\.[0-9]+)?s", value):
            yield f"{path}: {value!r} is not a duration"
    elif value not in kind.split("|"):
        yield f"{path}: {value!r} is none of {kind}"


@pytest.mark.parametrize("name", FILES)
def test_a_pipeline_has_googles_schema(name):
    assert list(errors(FILES[name], "Build", name)) == []


WRONG = {
    "unknown field": ({"steps": [{"name": "x", "arguments": []}]}, "BuildStep has no field"),
    "a string for a list": ({"steps": [{"name": "x", "args": "a b"}]}, "not a list"),
    "a number for a duration": ({"timeout": 600}, "is not a google-duration"),
    "minutes": ({"timeout": "10m"}, "is not a duration"),
    "unknown value": ({"options": {"logging": "STDOUT"}}, "is none of"),
}


@pytest.mark.parametrize(("build", "text"), WRONG.values(), ids=WRONG)
def test_the_check_finds_mistakes(build, text):
    (error,) = errors(build, "Build", "build")
    assert text in error


@pytest.mark.parametrize("name", FILES)
def test_steps_have_unique_names_and_wait_for_earlier_ones(name):
    """ "-" starts a step at once."""
    seen = {"-"}
    for step in FILES[name]["steps"]:
        assert set(step.get("waitFor", [])) <= seen, step["id"]
        assert step["id"] not in seen
        seen.add(step["id"])


@pytest.mark.parametrize("name", FILES)
def test_substitutions_are_declared_and_used(name):
    """With the default MUST_MATCH a build fails otherwise. User-defined names start with _ and have
    upper-case letters; `$$` is a dollar sign."""
    build = dict(FILES[name])
    declared = set(build.pop("substitutions", {}))
    assert all(re.fullmatch(r"_[A-Z0-9_]+", one) for one in declared)
    text = json.dumps(build).replace("$$", "")
    used = set(re.findall(r"\$\{?([A-Z_][A-Z0-9_]*)", text))
    assert used - BUILT_IN == declared


@pytest.mark.parametrize("name", FILES)
def test_secrets_of_steps_are_available(name):
    secrets = FILES[name].get("availableSecrets", {}).get("secretManager", [])
    available = {secret["env"] for secret in secrets}
    for step in FILES[name]["steps"]:
        assert set(step.get("secretEnv", [])) <= available, step["id"]


@pytest.mark.parametrize("name", FILES)
def test_a_build_keeps_the_limits_of_cloud_build(name):
    """https://cloud.google.com/build/quotas: 300 steps, 100 arguments of 10,000 characters."""
    build = FILES[name]
    assert len(build["steps"]) <= 300
    for step in build["steps"]:
        arguments = step.get("args", [])
        assert len(arguments) <= 100 and all(len(one) <= 10_000 for one in arguments), step["id"]
    if "serviceAccount" in build:  # a user-specified account needs a place for logs
        assert build["options"]["logging"] in ("CLOUD_LOGGING_ONLY", "NONE") or build["logsBucket"]
