"""Eight CPU devices with fast compilation, and a tiny model with a tokenizer."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest

from tests.activations.object_store_servers import amazon, cloud, google  # noqa: F401
from tests.activations.tiny_model import SMALL_DEVICES, write_tokenizer
from tests.chaos.small_disk import SmallDisk

FIXTURES = Path(__file__).parent / "fixtures"


@pytest.fixture(scope="package", autouse=True)
def small_devices():
    """JAX reads these variables when it is first used; they are unset again for other tests."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL_DEVICES.items():
            patch.setenv(name, value)
        import jax

        jax.jit(lambda number: number + 1)(1)
    assert jax.device_count() == 8, "JAX was already initialized with other devices"


@pytest.fixture(autouse=True)
def restore_sigterm():
    """Restore the SIGTERM handler, which `tpu extract run` replaces."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def small_disk(tmp_path):
    disk = SmallDisk(tmp_path / "small")
    if not disk.mounted:
        pytest.skip("only root can mount a disk")
    yield disk
    disk.cleanup()


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    shutil.copytree(FIXTURES / "qwen2", folder, dirs_exist_ok=True)
    write_tokenizer(folder)
    return folder
