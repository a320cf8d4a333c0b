"""Runs submitted code in its own process. The supervisor trusts what it reports only about itself.

Started as `python -c THIS DESCRIPTOR PARENT_PID`, with the request on standard input. It writes one
JSON object per line to the descriptor: {"kind": "started"}, then {"kind": "ended", …} or
{"kind": "no device"}.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import linecache
import logging
import os
import signal
import sys
import traceback
from typing import Any

FILE_NAME = "<submitted code>"
MAX_RESULT_BYTES = 10 * 1024 * 1024
MAX_ERROR_CHARS = 64 * 1024
_PR_SET_PDEATHSIG = 1


def main(pipe: int, parent: int) -> None:
    _die_with(parent)
    request = json.load(sys.stdin)
    _close_standard_input()
    logger = _logger()
    jax, numpy = _check_devices(request, pipe, logger)
    namespace = {
        "__name__": "__main__",
        "__builtins__": __builtins__,
        "jax": jax,
        "jnp": numpy,
        "logger": logger,
        "challenge_number": request["challenge_number"],
    }
    # On a timeout, the log shows the stack of the code.
    faulthandler.dump_traceback_later(request["timeout"])
    _send(pipe, kind="started")
    _send(pipe, kind="ended", **_run(request["code"], namespace))


def _run(code: str, namespace: dict[str, Any]) -> dict[str, Any]:
    linecache.cache[FILE_NAME] = (
        len(code),
        None,
        code.splitlines(keepends=True),
        FILE_NAME,
    )
    sys.argv[:] = [FILE_NAME]
    try:
        try:
            exec(compile(code, FILE_NAME, "exec"), namespace)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        result = namespace.get("result")
        text = None if result is None else _text(str(result))
        if text is not None and len(text.encode()) > MAX_RESULT_BYTES:
            raise ValueError(f"result: larger than {MAX_RESULT_BYTES} bytes; write it to a file")
        return {"status": "completed", "result": text, "error": None}
    except BaseException as error:  # including SystemExit and KeyboardInterrupt
        traceback.print_exc()
        return {"status": "failed", "result": None, "error": _text(_describe(error))}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _text(text: str) -> str:
    """Replace lone surrogates, which cannot be encoded."""
    return text.encode("utf-8", "replace").decode()


def _describe(error: BaseException) -> str:
    """The error in the first line, then the traceback of the code."""
    summary = "".join(traceback.format_exception_only(error)).strip()
    first = summary.splitlines()[-1] if summary else type(error).__name__
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != FILE_NAME:
        frames = frames.tb_next
    full = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    text = f"{first}\n\n{full}"
    if len(text) > MAX_ERROR_CHARS:
        text = f"{text[: MAX_ERROR_CHARS // 2]}\n…\n{text[-MAX_ERROR_CHARS // 2 :]}"
    return text


def _check_devices(request: dict[str, Any], pipe: int, logger: logging.Logger) -> tuple[Any, Any]:
    """Import JAX and check that its devices compute."""
    try:
        import jax
        import jax.numpy as jnp

        if request["num_processes"] > 1:
            _initialize_distributed(jax, request)
        devices = [device for device in jax.devices() if device.platform == request["platform"]]
        if not devices:
            raise RuntimeError(f"JAX has {jax.devices()}, but no {request['platform']} device")
        ones = jnp.ones((1000, 1000))
        if float(jnp.dot(ones, ones)[0, 0]) != 1000.0:
            raise RuntimeError(f"{devices[0]} computes a wrong result")
    except Exception:
        traceback.print_exc()
        _send(pipe, kind="no device")
        sys.exit(1)
    logger.info("%d devices: %s", len(devices), devices[0].device_kind)
    return jax, jnp


def _initialize_distributed(jax: Any, request: dict[str, Any]) -> None:
    if request["platform"] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=request["coordinator"],
        num_processes=request["num_processes"],
        process_id=request["process_id"],
    )


def _die_with(parent: int) -> None:
    """Without its supervisor, the code could return nothing and might run beside its next run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _close_standard_input() -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)


def _logger() -> logging.Logger:
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s - %(name)s - %(levelname)s - %(message)s",
    )
    return logging.getLogger("tpu_worker")


def _send(pipe: int, **message: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    remaining = memoryview(json.dumps(message, ensure_ascii=False).encode() + b"\n")
    while remaining:
        remaining = remaining[os.write(pipe, remaining) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
