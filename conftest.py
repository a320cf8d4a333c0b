"""What all tests share."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
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
settings.register_profile("quick", settings.get_profile("shared machine"), max_examples=15)
settings.load_profile("shared machine")


# Tests that start processes (servers, agents, programs), compile JAX programs or take long: by
# folder, file or function. The default run leaves them out, and fails a test that belongs there.
# Files are named without their folder, so that they can be moved.
LIST = Path(__file__).with_name("tests") / "integration.txt"
INTEGRATION = frozenset(LIST.read_text().split())
# Left out unless -m asks for them; `--all` has the slow ones.
OWN_RUNS = ("chaos", "scale", "slow", "versions")
# Seconds, for tests without a timeout of their own. Of others: `timeout` in pyproject.toml.
TIMEOUTS = {"cluster": 900, "slow": 900, "chaos": 1800, "scale": 1800, "versions": 1800}
MAX_CPU_SECONDS = 10.0
STARTS = frozenset(
    {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
)


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all", action="store_true", help="also integration tests and those marked slow"
    )
    parser.addoption("--in-process", action="store_true", help="no integration tests (default)")


def pytest_configure(config: pytest.Config) -> None:
    options = config.option
    if workerinput := getattr(config, "workerinput", None):  # in a process of pytest-xdist
        options.in_process, options.markexpr = workerinput["selection"]
    else:
        config.pluginmanager.register(FailuresAtOnce(config))
        named = config.args_source is config.ArgsSource.ARGS
        if not (named or options.all or options.markexpr):
            options.in_process = True
        if not options.markexpr:
            options.markexpr = " and ".join(
                f"not {mark}" for mark in OWN_RUNS if mark != "slow" or not options.all
            )
    if workerinput or not getattr(options, "numprocesses", None):  # it collects tests
        gc.disable()  # meanwhile: what is made then stays
    if options.in_process:
        settings.load_profile("quick")
        sys.addaudithook(_refuse_processes)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    options = node.config.option
    node.workerinput["selection"] = (options.in_process, options.markexpr)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Garbage collections during tests do not look at thousands of tests and modules."""
    gc.collect()
    gc.freeze()
    gc.enable()


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


def is_integration(nodeid: str) -> bool:
    """In the list: a folder that it is in, its file or its function (both also without the
    folder), or a parameter of it, such as [postgres]."""
    path, _, function = nodeid.partition("::")
    function, _, parameters = function.rstrip("]").partition("[")
    parts = path.split("/")
    names = {"/".join(parts[:length]) for length in range(1, len(parts) + 1)}
    names |= {parts[-1], f"{parts[-1]}::{function}", f"{path}::{function}"}
    names |= {f"[{parameter}]" for parameter in parameters.split("-")}
    return not INTEGRATION.isdisjoint(names)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.option.in_process or not collection_path.is_relative_to(config.rootpath):
        return None
    name = collection_path.relative_to(config.rootpath).as_posix()
    return True if is_integration(name) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What takes longest goes first, and has time."""
    kept, left_out = [], []
    for item in items:
        integration = is_integration(item.nodeid)
        (left_out if integration and config.option.in_process else kept).append(item)
        marks = {mark.name for mark in item.iter_markers()}
        if "timeout" not in marks and (integration or marks & TIMEOUTS.keys()):
            seconds = max((TIMEOUTS[mark] for mark in marks & TIMEOUTS.keys()), default=900)
            item.add_marker(pytest.mark.timeout(seconds))
    if left_out:
        config.hook.pytest_deselected(items=left_out)
    items[:] = sorted(
        kept,
        key=lambda item: (
            line(item.nodeid) not in LINES.values(),
            not item.nodeid.startswith(LONG),
        ),
    )


class NotInProcess(Exception):
    """A test of the default selection starts a process, or takes long."""

    def __init__(self, nodeid: str, what: str) -> None:
        name = nodeid.rpartition("/")[2].partition("[")[0]
        super().__init__(f"{what}; if it has to, add {name} (or its file) to tests/{LIST.name}")


running = ""  # the test of the default selection that runs now


def _refuse_processes(event: str, arguments: tuple[object, ...]) -> None:
    program = str(arguments[0]) if arguments else ""
    if running and event in STARTS and program != "git":  # quick, and everywhere
        raise NotInProcess(running, f"starts a process ({event} {program})")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    begun = time.process_time()
    yield
    seconds = time.process_time() - begun
    if running and seconds > MAX_CPU_SECONDS:
        raise NotInProcess(running, f"takes {seconds:.1f} s of CPU")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    global running
    running = item.nodeid if item.config.option.in_process else ""
    try:
        return (yield)
    finally:
        running = ""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from xdist.scheduler import LoadScopeScheduling

    class Lines(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return line(nodeid)

    return Lines(config, log)
