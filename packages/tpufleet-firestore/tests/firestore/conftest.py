from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.firestore import firestore_emulator
from tests.server_process import Server


@pytest.fixture(scope="package")
def emulator(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[firestore_emulator.FirestoreEmulator]:
    pytest.importorskip(
        "google.cloud.firestore", reason="no Firestore client; pip install 'tpufleet[firestore]'"
    )
    if reason := firestore_emulator.missing_reason():
        pytest.skip(reason)
    before = os.environ.pop("FIRESTORE_EMULATOR_HOST", None)
    started = firestore_emulator.FirestoreEmulator(tmp_path_factory.mktemp("emulator"))
    # Servers and agents inherit it too, so tests notice a workload that passes it on.
    os.environ["FIRESTORE_EMULATOR_HOST"] = started.address
    yield started
    started.stop()
    os.environ.pop("FIRESTORE_EMULATOR_HOST", None)
    if before is not None:
        os.environ["FIRESTORE_EMULATOR_HOST"] = before


@pytest.fixture
def ledger() -> Iterator[Path]:
    """A file that submitted code may write, whichever user runs it."""
    with tempfile.TemporaryDirectory(prefix="tpufleet-ledger-") as folder:
        os.chmod(folder, 0o711)
        path = Path(folder, "ledger")
        path.touch()
        path.chmod(0o666)
        yield path


@pytest.fixture(scope="module")
def fleet(
    emulator: firestore_emulator.FirestoreEmulator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """One server per test module, with a pool of simulated slices."""
    from tests.firestore.harness import create_pool

    server = Server(tmp_path_factory.mktemp("fleet") / "home")
    try:
        server.start()
        create_pool(server, 2)
        yield server
    finally:
        server.cleanup()


@pytest.fixture
def harness(
    emulator: firestore_emulator.FirestoreEmulator, fleet: Server, tmp_path: Path
) -> Iterator:
    """A new collection, without a bridge."""
    from tests.firestore.harness import BridgeHarness

    bridge_harness = BridgeHarness(tmp_path, fleet, emulator, f"tpu_jobs_{secrets.token_hex(3)}")
    yield bridge_harness
    bridge_harness.close()
