"""What all tests share."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.repository import TEST_ROOTS

# Tests start processes while gRPC is at work, and none of them uses it before its own exec: what it
# does about forks only disturbs its streams.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
# Models of tests are tiny: XLA would take longer to optimize their programs than to run them.
# Servers, agents and jobs that tests start inherit this.
os.environ.setdefault(
    "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)
# All processes of a run share their compiled programs, instead of compiling the same ones again.
PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
own_programs = "" if PROGRAMS in os.environ else tempfile.mkdtemp(prefix="tpufleet-programs-")
os.environ.setdefault(PROGRAMS, own_programs)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# A virtual machine may stand still for minutes, and then nothing has answered for so long.
os.environ.setdefault("TPUFLEET_REQUEST_TIMEOUT", "15m")
# Programs that tests start import helpers of theirs.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [*map(str, TEST_ROOTS), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# What runs in the background of a shell ignores Ctrl-C, and so would every process it starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# How long one example takes says more about who else uses the machine than about the code.
settings.register_profile(
    "shared machine",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # The same examples each time: a new failure is the change's, not the dice's.
    derandomize=True,
)
settings.load_profile("shared machine")


class FailuresAtOnce:
    """Names each failure when it happens: a run may take half an hour, or be cut."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            crash = getattr(report.longrepr, "reprcrash", None)
            message = str(crash.message if crash else report.longrepr).partition("\n")[0]
            terminal.write_line(f"\n{report.nodeid} ({report.when}): {message[:300]}")


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # not in the processes of pytest-xdist
        config.pluginmanager.register(FailuresAtOnce(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    if own_programs:
        shutil.rmtree(own_programs, ignore_errors=True)


# Each needs a control plane or a Firestore emulator, and real nodes much of the machine. To import
# transformers takes several seconds.
LINES = {
    "tests/k8s/test_real_": "real nodes",
    "tests/k8s/": "control plane",
    "packages/tpufleet-firestore/tests/firestore/": "Firestore",
    **{
        f"packages/tpufleet-activations/tests/activations/test_{name}.py": "transformers"
        for name in ("chat_templates", "datasets", "decoder", "inputs", "published_configs")
    },
}

# Files of minutes, which no worker should begin when the others are done.
LONG = (
    "packages/tpufleet/tests/agent/",
    "packages/tpufleet/tests/web/",
    "packages/tpufleet-activations/tests/activations/",
)


def line(nodeid: str) -> str:
    """What is tested one after the other: a whole file, so that what it sets up is set up once; or
    all that shares a server."""
    return next(
        (name for start, name in LINES.items() if nodeid.startswith(start)),
        nodeid.partition("::")[0],
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest goes first."""
    items.sort(
        key=lambda item: (line(item.nodeid) not in LINES.values(), not item.nodeid.startswith(LONG))
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lines(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return line(nodeid)

    return Lines(config, log)
