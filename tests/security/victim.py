"""The program of another member: leaves its mark wherever a job can leave something."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import time
from multiprocessing import shared_memory
from pathlib import Path

MARK = "-".join(("of", "the", "victim"))  # this file does not contain it
libc = ctypes.CDLL(None, use_errno=True)
for folder in ("/tmp", "/dev/shm", "/var/tmp", ".", os.environ["TPUFLEET_CHECKPOINT_DIR"]):
    try:
        path = Path(folder, "left")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{MARK}: a file")
        path.chmod(0o644)
    except OSError as error:
        print(path, error, flush=True)
memory = shared_memory.SharedMemory(MARK, create=True, size=4096)
libc.shmget(0x1234, 4096, 0o1666)
libc.syscall(248, b"user", MARK.encode(), MARK.encode(), 13, -3)  # add_key to the session keyring
listener = socket.socket(socket.AF_UNIX)
listener.bind(b"\0" + MARK.encode())
listener.listen()
subprocess.Popen(["sleep", "3600"], env={**os.environ, "PASSWORD": MARK})
print("ready", flush=True)
time.sleep(3600)
