"""Compiled programs, and what was found out about a device, kept for the next run.

JAX's own cache of compiled programs finds one by its lowered form, so every start has to trace and
lower it first, which takes longer than loading it. Here a program is found by what it depends on:
the model, the shapes, the devices, the versions, and the source of this package.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import pickle
import stat
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import jaxlib

log = logging.getLogger(__name__)

COMPILE_CACHE = "~/.cache/tpufleet/compile"
FOLDER = "programs"  # in that folder, beside the files of JAX
# What changes a program without being one of its inputs.
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
CONFIG = ("jax_enable_x64", "jax_default_matmul_precision", "jax_numpy_dtype_promotion")
Finding = TypeVar("Finding")


class ProgramCache:
    """Programs and findings of one kind of device, in a folder that this user alone can write:
    loading a program runs its code."""

    def __init__(self, folder: Path, devices: Sequence[Any]):
        self._folder, self._devices = folder, list(devices)
        self._facts = _facts(self._devices)

    def load(self, parts: Any) -> Any | None:
        """The program with these `parts`, or None."""
        from jax.experimental import serialize_executable

        path = self._path(parts, ".program")
        if not path.exists() or not _is_own(path):
            return None
        try:
            _import_kernel_runtime(self._devices[0].platform)
            program, inputs, outputs = pickle.loads(path.read_bytes())
            return serialize_executable.deserialize_and_load(
                program,
                inputs,
                outputs,
                backend=self._devices[0].client,
                execution_devices=self._devices,
            )
        except Exception as error:
            # Whatever is wrong with the file: the program is compiled instead.
            _warn_unused(path, error)
            path.unlink(missing_ok=True)
            return None

    def save(self, parts: Any, program: Any) -> None:
        from jax.experimental import serialize_executable

        try:
            stored = serialize_executable.serialize(program)
        except Exception:
            return  # not every program of every platform can be stored; JAX's own cache remains
        self._write(self._path(parts, ".program"), pickle.dumps(stored))

    def finding(
        self,
        parts: Any,
        find: Callable[[], Finding],
        *,
        keep: Callable[[Finding], bool] = lambda finding: True,
        renew: bool = False,
    ) -> Finding:
        """What `find` returned in an earlier run, as JSON holds it; or, also to `renew` that, its
        result now, which is kept if `keep` says so."""
        path = self._path(parts, ".json")
        if not renew and path.exists() and _is_own(path):
            try:
                found: Finding = json.loads(path.read_bytes())["finding"]
                return found
            except (ValueError, KeyError, TypeError, OSError) as error:
                _warn_unused(path, error)
        found = find()
        if keep(found):
            self._write(path, json.dumps({"finding": found}).encode())
        return found

    def _path(self, parts: Any, suffix: str) -> Path:
        text = repr((self._facts, parts))
        return self._folder / (hashlib.sha256(text.encode()).hexdigest() + suffix)

    def _write(self, path: Path, data: bytes) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # A file of another name first: other processes may read while this one writes.
            with tempfile.NamedTemporaryFile(dir=self._folder, delete=False) as file:
                file.write(data)
            os.replace(file.name, path)
        except OSError as error:
            _warn_unused(path, error)


def open_cache(folder: str | None, devices: Sequence[Any]) -> ProgramCache | None:
    """Keep compiled programs in a folder, JAX's and ours.

    None: the default folder on accelerators, unless JAX is configured with one. On CPUs programs
    are specific to the machine's instructions, so there it is only used if asked for. "": none.
    """
    if folder == "":
        return None
    configured = getattr(jax.config, "jax_compilation_cache_dir", None)
    on_cpu = devices[0].platform == "cpu"
    if folder is None:
        if on_cpu:
            return None
        folder = configured or COMPILE_CACHE
    path = Path(os.path.expanduser(folder))
    # Programs that several processes run together belong to this very set of processes.
    stores_ours = jax.process_count() == 1 and "://" not in folder
    if on_cpu and stores_ours:
        # Not both: a CPU program that JAX has loaded from its cache is stored without its code.
        return None if configured else ProgramCache(path / FOLDER, devices)
    if folder != configured:
        jax.config.update("jax_compilation_cache_dir", str(path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return ProgramCache(path / FOLDER, devices) if stores_ours else None


def _facts(devices: Sequence[Any]) -> Mapping[str, Any]:
    """Everything that a program depends on, apart from its own description."""
    first = devices[0]
    return {
        "jax": (jax.__version__, jaxlib.__version__),
        "platform": (first.platform, first.client.platform_version),
        "devices": [(device.id, device.device_kind) for device in devices],
        "instructions": _instructions() if first.platform == "cpu" else "",
        "environment": [os.environ.get(name, "") for name in ENVIRONMENT],
        "config": [repr(getattr(jax.config, name, None)) for name in CONFIG],
        "source": _source_digest(),
    }


@functools.cache
def _source_digest() -> str:
    """Of the modules that programs are made from."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _instructions() -> str:
    """The instruction sets of this machine's CPUs."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


def _import_kernel_runtime(platform: str) -> None:
    """Kernels in a program call a library that JAX only finds once this module was imported, which
    tracing them does, and loading them does not."""
    if platform == "gpu":
        import jax.experimental.mosaic.gpu  # noqa: F401


def _is_own(path: Path) -> bool:
    """Whether only this user can have written a file."""
    for each in (path, path.parent):
        found = each.stat()
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o022:
            _warn_unused(path, f"other users can write it; run `chmod go-w {each}`")
            return False
    return True


def _warn_unused(path: Path, reason: object) -> None:
    warn_unused(f"{path}, a file of --compile-cache,", reason)


def warn_unused(what: str, reason: object) -> None:
    """A run gives the same results without it, only more slowly."""
    lines = (str(reason) or repr(reason)).splitlines()
    log.warning("%s is not used: %s", what, lines[0])
