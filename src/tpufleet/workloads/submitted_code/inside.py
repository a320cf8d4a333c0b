"""Runs submitted code in a process of its own. What it says to the supervisor is only about itself.

Started as `python -c THIS DESCRIPTOR`, with the request on standard input. It tells the descriptor,
one JSON object a line: {"kind": "began"}, then {"kind": "ended", …} or {"kind": "no device"}.
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

NAME = "<submitted code>"
LARGEST_RESULT = 10 * 1024 * 1024
LONGEST_ERROR = 64 * 1024
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG


def main(report: int, parent: int) -> None:
    _die_with(parent)
    request = json.load(sys.stdin)
    _close_standard_input()
    logger = _logger()
    jax, numpy = _devices(request, report, logger)
    given = {
        "__name__": "__main__",
        "__builtins__": __builtins__,
        "jax": jax,
        "jnp": numpy,
        "logger": logger,
        "challenge_number": request["challenge_number"],
    }
    # Shows in the log where code stood that used up its time.
    faulthandler.dump_traceback_later(request["timeout"])
    _tell(report, kind="began")
    _tell(report, kind="ended", **_run(request["code"], given))


def _run(code: str, given: dict[str, Any]) -> dict[str, Any]:
    linecache.cache[NAME] = (len(code), None, code.splitlines(keepends=True), NAME)
    sys.argv[:] = [NAME]
    try:
        try:
            exec(compile(code, NAME, "exec"), given)
        except SystemExit as error:
            if error.code not in (None, 0):
                raise
        result = given.get("result")
        text = None if result is None else _text(str(result))
        if text is not None and len(text.encode()) > LARGEST_RESULT:
            raise ValueError(f"result: longer than {LARGEST_RESULT} bytes; write it to a file")
        return {"status": "completed", "result": text, "error": None}
    except BaseException as error:  # also SystemExit and KeyboardInterrupt: the code's own end
        traceback.print_exc()
        return {"status": "failed", "result": None, "error": _text(_words(error))}
    finally:
        faulthandler.cancel_dump_traceback_later()


def _text(text: str) -> str:
    """Halves of surrogate pairs are no text that could be stored anywhere."""
    return text.encode("utf-8", "replace").decode()


def _words(error: BaseException) -> str:
    """What went wrong in the first line, and the traceback of the code below it."""
    told = "".join(traceback.format_exception_only(error)).strip()
    first = told.splitlines()[-1] if told else type(error).__name__
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != NAME:
        frames = frames.tb_next
    whole = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    text = f"{first}\n\n{whole}"
    if len(text) > LONGEST_ERROR:
        text = f"{text[: LONGEST_ERROR // 2]}\n…\n{text[-LONGEST_ERROR // 2 :]}"
    return text


def _devices(request: dict[str, Any], report: int, logger: logging.Logger) -> tuple[Any, Any]:
    """JAX, once it has shown that its devices compute."""
    try:
        import jax
        import jax.numpy as jnp

        if request["num_processes"] > 1:
            _join(jax, request)
        found = [device for device in jax.devices() if device.platform == request["platform"]]
        if not found:
            raise RuntimeError(f"JAX sees {jax.devices()}, no {request['platform']}")
        ones = jnp.ones((1000, 1000))
        if float(jnp.dot(ones, ones)[0, 0]) != 1000.0:
            raise RuntimeError(f"{found[0]} does not multiply")
    except Exception:
        traceback.print_exc()
        _tell(report, kind="no device")
        sys.exit(1)
    logger.info("%d devices: %s", len(found), found[0].device_kind)
    return jax, jnp


def _join(jax: Any, request: dict[str, Any]) -> None:
    if request["platform"] == "cpu":
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        coordinator_address=request["coordinator"],
        num_processes=request["num_processes"],
        process_id=request["process_id"],
    )


def _die_with(parent: int) -> None:
    """Code without its supervisor could hand nothing back, and must not run beside its next run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _close_standard_input() -> None:
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


def _logger() -> logging.Logger:
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format="%(asctime)s - %(name)s - %(levelname)s - %(message)s",
    )
    return logging.getLogger("tpu_worker")


def _tell(report: int, **message: Any) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    left = memoryview(json.dumps(message, ensure_ascii=False).encode() + b"\n")
    while left:
        left = left[os.write(report, left) :]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
