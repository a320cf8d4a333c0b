"""GKE settings from the config file and from environment variables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tpufleet import config
from tpufleet.errors import BadInput
from tpufleet.providers.gke import settings
from tpufleet.providers.gke.settings import GkeSettings, GkeTeam

MINIMAL = {"image": "registry/agent:1", "zones": ["us-central1-a"]}


def gke_section(environ, file: str = "", tmp_path: Path = Path("/nowhere")):
    if file:
        (tmp_path / "config.yaml").write_text(file)
    return config.load({"TPUFLEET_CONFIG": str(tmp_path / "config.yaml"), **environ}, tmp_path).gke


def test_an_image_and_a_zone_are_sufficient():
    found = settings.parse(MINIMAL)
    assert found == GkeSettings(image="registry/agent:1", zones=("us-central1-a",))
    assert found.namespace == "tpu-training"


def test_every_field_can_be_set_and_accelerators_have_aliases():
    found = settings.parse({
        **MINIMAL, "namespace": "n", "queue": "q", "cpu": 8, "memory": "32Gi", "scratch": "1Ti",
        "pull_secrets": ["a", "b"], "reservations": {"v5e-16": "mine"}, "most_slices": 3,
        "volumes": "/mnt/data=disk",
    })  # fmt: skip
    assert found == GkeSettings(
        image="registry/agent:1", zones=("us-central1-a",), namespace="n", queue="q", cpu="8",
        memory="32Gi", scratch="1Ti", pull_secrets=("a", "b"), most_slices=3,
        reservations={"v5litepod-16": "mine"}, volumes={"/mnt/data": "disk"},
    )  # fmt: skip


def test_an_environment_variable_overrides_the_config_file(tmp_path):
    file = "gke: {image: 'registry/agent:1', zones: [us-east1-b], queue: q}\n"
    environ = {
        "TPUFLEET_GKE_ZONES": "us-central1-a, us-central1-b", "TPUFLEET_GKE_MOST_SLICES": "4",
        "TPUFLEET_GKE_RESERVATIONS": "v5e-16=mine",
    }  # fmt: skip
    found = settings.parse(gke_section(environ, file, tmp_path))
    assert found == GkeSettings(
        image="registry/agent:1", zones=("us-central1-a", "us-central1-b"), queue="q",
        most_slices=4, reservations={"v5litepod-16": "mine"},
    )  # fmt: skip


def test_teams_are_a_mapping_in_the_file_and_json_in_a_variable(tmp_path):
    teams = {"red": {"queue": "q", "users": ["ada"]}, "blue": {"namespace": "lab"}}
    file = json.dumps({"gke": {**MINIMAL, "teams": teams}})
    by_file = settings.parse(gke_section({}, file, tmp_path))
    assert by_file.teams["red"] == GkeTeam(queue="q", users=("ada",))
    assert by_file.namespaces == ("red", "lab") and by_file.has_queues
    variables = {"TPUFLEET_GKE_TEAMS": json.dumps(teams)}
    assert settings.parse({**MINIMAL, **gke_section(variables)}).teams == by_file.teams
    with pytest.raises(BadInput, match=r"gke\.teams: not JSON"):
        settings.parse({**MINIMAL, "teams": "{red"})


def test_all_settings_can_be_one_json_variable():
    assert gke_section({"TPUFLEET_GKE": '{"image": "i"}'}) == {"image": "i"}
    assert gke_section({}) is None


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("100Gi", 100 * 2**30), ("32Mi", 2**25), ("1.5k", 1500), ("7", 7), ("1Ti", 2**40)],
)
def test_quantities_are_parsed_like_kubernetes_does(quantity, expected):
    assert settings.parse_quantity(quantity) == expected


INVALID = {
    "no image": ({"zones": ["us-central1-a"]}, "gke.image"),
    "no zone": ({"image": "i"}, "gke.zones"),
    "invalid zone": ({**MINIMAL, "zones": ["us-central1"]}, "us-central1-a"),
    "unknown field": ({**MINIMAL, "qeue": "q"}, "did you mean queue"),
    "a reservation without a name": ({**MINIMAL, "reservations": "mine"}, "NAME=VALUE"),
    "unknown accelerator": ({**MINIMAL, "reservations": {"v9-1": "mine"}}, "v9-1"),
    "invalid namespace": ({**MINIMAL, "namespace": "My Jobs"}, "namespace"),
    "invalid image": ({**MINIMAL, "image": "my image"}, "image"),
    "invalid memory": ({**MINIMAL, "memory": "lots"}, "memory"),
    "zero slices": ({**MINIMAL, "most_slices": 0}, "most_slices"),
    "not a number": ({**MINIMAL, "most_slices": "many"}, "most_slices"),
    "a volume without a claim": ({**MINIMAL, "volumes": {"data": "disk"}}, "gke.volumes.data"),
    "root": ({**MINIMAL, "user": 0}, "gke.user"),
}


@pytest.mark.parametrize(("config_section", "message"), INVALID.values(), ids=INVALID)
def test_an_invalid_field_is_named_in_the_error(config_section, message):
    with pytest.raises(BadInput, match=message):
        settings.parse(config_section)
