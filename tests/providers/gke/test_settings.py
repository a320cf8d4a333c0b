"""The provider's settings, from the config file and from variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tpufleet import config
from tpufleet.errors import BadInput
from tpufleet.providers.gke import settings
from tpufleet.providers.gke.settings import GkeSettings

LEAST = {"image": "registry/agent:1", "zones": ["us-central1-a"]}


def written(environ, file: str = "", tmp_path: Path = Path("/nowhere")):
    if file:
        (tmp_path / "config.yaml").write_text(file)
    return config.load({"TPUFLEET_CONFIG": str(tmp_path / "config.yaml"), **environ}, tmp_path).gke


def test_an_image_and_a_zone_are_all_that_is_needed():
    found = settings.parse(LEAST)
    assert found == GkeSettings(image="registry/agent:1", zones=("us-central1-a",))
    assert found.namespace == "tpu-training"


def test_everything_can_be_set_and_types_by_any_of_their_spellings():
    found = settings.parse({
        **LEAST, "namespace": "n", "queue": "q", "cpu": 8, "memory": "32Gi", "scratch": "1Ti",
        "pull_secrets": ["a", "b"], "reservations": {"v5e-16": "mine"}, "most_slices": 3,
        "volumes": "/mnt/data=disk",
    })  # fmt: skip
    assert found == GkeSettings(
        image="registry/agent:1", zones=("us-central1-a",), namespace="n", queue="q", cpu="8",
        memory="32Gi", scratch="1Ti", pull_secrets=("a", "b"), most_slices=3,
        reservations={"v5litepod-16": "mine"}, volumes={"/mnt/data": "disk"},
    )  # fmt: skip


def test_a_variable_of_a_field_wins_over_the_config_file(tmp_path):
    file = "gke: {image: 'registry/agent:1', zones: [us-east1-b], queue: q}\n"
    environ = {
        "TPUFLEET_GKE_ZONES": "us-central1-a, us-central1-b", "TPUFLEET_GKE_MOST_SLICES": "4",
        "TPUFLEET_GKE_RESERVATIONS": "v5e-16=mine",
    }  # fmt: skip
    found = settings.parse(written(environ, file, tmp_path))
    assert found == GkeSettings(
        image="registry/agent:1", zones=("us-central1-a", "us-central1-b"), queue="q",
        most_slices=4, reservations={"v5litepod-16": "mine"},
    )  # fmt: skip


def test_all_of_it_may_be_one_variable_as_json():
    assert written({"TPUFLEET_GKE": '{"image": "i"}'}) == {"image": "i"}
    assert written({}) is None


@pytest.mark.parametrize(
    ("quantity", "expected"),
    [("100Gi", 100 * 2**30), ("32Mi", 2**25), ("1.5k", 1500), ("7", 7), ("1Ti", 2**40)],
)
def test_a_quantity_is_as_many_bytes_as_kubernetes_takes_it_for(quantity, expected):
    assert settings.parse_quantity(quantity) == expected


WRONG = {
    "no image": ({"zones": ["us-central1-a"]}, "gke: image"),
    "no zone": ({"image": "i"}, "gke: zones"),
    "a zone that is none": ({**LEAST, "zones": ["us-central1"]}, "us-central1-a"),
    "a field that is none": ({**LEAST, "qeue": "q"}, "did you mean queue"),
    "a reservation without a name": ({**LEAST, "reservations": "mine"}, "NAME=VALUE"),
    "a type that is none": ({**LEAST, "reservations": {"v9-1": "mine"}}, "v9-1"),
    "a namespace that is none": ({**LEAST, "namespace": "My Jobs"}, "namespace"),
    "an image that is none": ({**LEAST, "image": "my image"}, "image"),
    "memory without sense": ({**LEAST, "memory": "lots"}, "memory"),
    "no slice at all": ({**LEAST, "most_slices": 0}, "most_slices"),
    "words for a number": ({**LEAST, "most_slices": "many"}, "most_slices"),
    "a volume without a claim": ({**LEAST, "volumes": {"data": "disk"}}, "/PATH=CLAIM"),
    "root": ({**LEAST, "user": 0}, "root"),
}


@pytest.mark.parametrize(("given", "words"), WRONG.values(), ids=WRONG)
def test_what_is_wrong_is_named(given, words):
    with pytest.raises(BadInput, match=words):
        settings.parse(given)
