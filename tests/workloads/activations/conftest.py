"""Eight small devices, quick compilation, and a tiny model with a tokenizer."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.workloads.activations.object_store_servers import amazon, cloud, google  # noqa: F401
from tests.workloads.activations.tiny_model import SMALL_DEVICES, write_tokenizer

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="package", autouse=True)
def small_devices():
    """JAX reads its environment once, at its first program; other tests must not inherit it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_DEVICES.items():
            patch.setenv(name, value)
        import jax

        jax.jit(lambda number: number + 1)(1)
    assert jax.device_count() == 8, "JAX was started before with other devices"


@pytest.fixture(autouse=True)
def terminable():
    """A command that remembers SIGTERM must not teach that to the tests after it."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(FIXTURES / "qwen2", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder
