"""The program of a hostile member: reports a progress that no program can have, and results that
are not its own."""

from __future__ import annotations

import os
import time
from pathlib import Path

RUN = Path(os.environ["TPUFLEET_RUN_DIR"])
SECRET = "/proc/1/environ"
FORGED = [
    b'{"step": 1e400, "total": -5}',
    b'{"step": 99999999999999999999999999, "total": 1}',
    b'{"step": -1, "checkpoint_step": 9223372036854775808}',
    b'{"step": 5, "metrics": {"loss": NaN, "\\u001b]0;x\\u0007": 1}}',
    b'{"step": 5, "metrics": {"' + b"a" * 5000 + b'": 1}}',
    b'{"step": 5, "metrics": ' + b"[" * 20000 + b"]" * 20000 + b"}",
    b'{"step": 5, "at": "9999-12-31T23:59:59Z", "timings": {"restored": -1e308, "x": 1e308}}',
    b'{"step": 5, "timings": {"steps": [[1e308, -1e308]]}, "checkpoint_step": -7}',
    b"\xff\xfe\x00",
    b"{" * 1000000,
    b'{"step": 7, "result": "../../../../../../token"}',
]


def put(content: bytes) -> None:
    draft = RUN / "draft"
    draft.write_bytes(content)
    draft.replace(RUN / "progress.json")


RUN.mkdir(exist_ok=True)
for content in FORGED:
    put(content)
    time.sleep(0.7)
for make in (lambda path: os.mkfifo(path), lambda path: path.symlink_to(SECRET), os.mkdir):
    path = RUN / "progress.json"
    path.rmdir() if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
    make(path)
    time.sleep(0.7)
result = Path(os.environ.get("TPUFLEET_RESULT_FILE", RUN / "result"))
try:
    result.symlink_to(SECRET)
except OSError as error:
    print("no result", error)
# Lines that pose as those of the platform, of another host, and of the server.
print("\r\x1b[2K[1] [tpufleet] exited with status 0 after 0.1 s")
print("\n2026-01-01 00:00:00,000 ERROR forged-by-mal")
print("a" * (1 << 20))
print("done", flush=True)
