"""The provider's settings, from the environment."""

from __future__ import annotations

import pytest

from tpufleet.errors import BadInput
from tpufleet.providers.gke import opening
from tpufleet.providers.gke.manifests import GkeSettings


def test_an_image_is_all_that_is_needed():
    found = opening.settings_of({"TPUFLEET_GKE_IMAGE": "i", "OTHER": "x"})
    assert found == GkeSettings(namespace="tpu-training", image="i")
    assert opening.wanted({"TPUFLEET_GKE_IMAGE": "i"}) and not opening.wanted({})


def test_everything_can_be_set_and_types_by_any_of_their_spellings():
    environ = {
        "IMAGE": "i", "NAMESPACE": "n", "QUEUE": "q", "CPU": "8", "MEMORY": "32Gi",
        "SCRATCH": "1Ti", "PULL_SECRETS": "a, b", "RESERVATIONS": "v5e-16=mine",
    }  # fmt: skip
    found = opening.settings_of({f"TPUFLEET_GKE_{key}": value for key, value in environ.items()})
    assert found == GkeSettings(
        namespace="n", image="i", queue="q", cpu="8", memory="32Gi", scratch="1Ti",
        pull_secrets=("a", "b"), reservations={"v5litepod-16": "mine"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "TPUFLEET_GKE_IMAGE"),
        ({"TPUFLEET_GKE_IMAGE": "i", "TPUFLEET_GKE_RESERVATIONS": "mine"}, "RESERVATIONS"),
    ],
)
def test_what_is_wrong_is_named(environ, words):
    with pytest.raises(BadInput, match=words):
        opening.settings_of(environ)
