"""A VM on this machine that runs the real startup script and server of `tpu deploy server`. Only
what changes a machine (mounts, users, services) is a stand-in."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil

from tpufleet_testbed.cloud_tpu import metadata_server
from tpufleet_testbed.cloud_tpu.metadata_server import MetadataServer

STUB = """#!/bin/bash
echo "$(basename "$0") $*" >>"$CALLS"
case "$(basename "$0") $*" in
  "mountpoint"*) [[ -e "$CALLS.mounted" ]] ;;
  "mount "*) touch "$CALLS.mounted" ;;
  "blkid "*) [[ -e "$CALLS.formatted" ]] ;;
  "mkfs"*) touch "$CALLS.formatted" ;;
  "systemctl restart"*)
    if [[ -e "$CALLS.pid" ]]; then
      pid="$(cat "$CALLS.pid")"
      kill "$pid" 2>/dev/null
      while grep -q '^State:.[^Z]' "/proc/$pid/status" 2>/dev/null; do sleep 0.1; done
    fi
    unit="$TPUFLEET_ROOT/etc/systemd/system/tpufleet-server.service"
    here() {
      sed "s#/var/lib/#$TPUFLEET_ROOT/var/lib/#g; s#/opt/#$TPUFLEET_ROOT/opt/#g" \\
        | sed "s#0.0.0.0#$ADDRESS#"
    }
    mapfile -t environment < <(sed -n 's/^Environment=//p' "$unit" | here)
    read -ra command < <(sed -n 's/^ExecStart=//p' "$unit" | here)
    setsid env -i HOME="$TPUFLEET_ROOT" PATH="$PATH" "${environment[@]}" \\
      STORAGE_EMULATOR_HOST="$STORAGE_EMULATOR_HOST" "${command[@]}" \\
      >>"$CALLS.server.log" 2>&1 </dev/null &
    echo $! >"$CALLS.pid"
    ;;
esac
"""
STUBS = ("mountpoint", "mount", "blkid", "mkfs.ext4", "id", "useradd", "chown", "systemctl")


class ServerMachine:
    """The VM: its folder is the root of the script. It gets its bundle from `storage`, or else
    from a bucket of its own."""

    def __init__(self, folder: Path, address: str = "127.0.0.1", storage: str = "") -> None:
        self.address = address
        self.root, self.calls = folder / "vm", folder / "calls"
        self._bin = folder / "bin"
        for path in (self._bin, self.root / "dev/disk/by-id", folder / "bucket"):
            path.mkdir(parents=True)
        for name in STUBS:
            (self._bin / name).write_text(STUB)
            (self._bin / name).chmod(0o755)
        (self.root / "dev/disk/by-id/google-tpufleet-state").touch()
        self.bundle = folder / "bucket/bundle.tar.gz"
        self.bundle.write_bytes(packed())
        self.metadata = MetadataServer()
        self._bucket = _serve(self.bundle.parent)
        self._emulated_storage = storage
        self._storage = storage or f"http://127.0.0.1:{self._bucket.server_port}"
        self.output = ""
        self.instance: dict[str, Any] = {}
        self._boots: list[threading.Thread] = []

    def boot(self, instance: dict[str, Any] | None = None) -> None:
        self.instance = instance or self.instance
        boot = threading.Thread(target=self._run_script)
        boot.start()
        self._boots.append(boot)

    def wait(self) -> None:
        for boot in self._boots:
            boot.join(timeout=900)

    def guest_attribute(self, _name: str, path: str) -> str | None:
        values = self.metadata.guest_attributes("vm", 0, path)
        return next(iter(values.values()), None)

    def log(self) -> str:
        log = Path(f"{self.calls}.server.log")
        return self.output + (log.read_text() if log.exists() else "")

    def close(self) -> None:
        self.wait()
        pid = Path(f"{self.calls}.pid")
        if pid.exists() and psutil.pid_exists(int(pid.read_text())):
            process = psutil.Process(int(pid.read_text()))
            process.terminate()
            process.wait(900)
        self.metadata.close()
        self._bucket.shutdown()
        self._bucket.server_close()

    def _run_script(self) -> None:
        items = {item["key"]: item["value"] for item in self.instance["metadata"]["items"]}
        values = metadata_server.instance_values(items)
        values["service-accounts/default/token"] = '{"access_token": "s3cret"}'
        values["network-interfaces/0/ip"] = self.address
        values["network-interfaces/0/access-configs/0/external-ip"] = self.address
        self.metadata.put("vm", values)
        done = subprocess.run(
            ["bash", "-c", items["startup-script"]], capture_output=True, text=True, timeout=900,
            env={
                "PATH": f"{self._bin}:{os.environ['PATH']}", "CALLS": str(self.calls),
                "TPUFLEET_ROOT": str(self.root),
                "TPUFLEET_METADATA_URL": f"{self.metadata.url}/vm/0",
                "TPUFLEET_STORAGE_URL": self._storage, "ADDRESS": self.address,
                "STORAGE_EMULATOR_HOST": self._emulated_storage,
            },
        )  # fmt: skip
        self.output += done.stdout + done.stderr


def packed() -> bytes:
    """A bundle whose Python is the one that runs this test."""
    script = f'#!/bin/bash\nexec "{sys.executable}" "$@"\n'.encode()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        entry = tarfile.TarInfo("python/bin/python3")
        entry.size, entry.mode = len(script), 0o755
        archive.addfile(entry, io.BytesIO(script))
    return buffer.getvalue()


def _serve(folder: Path) -> ThreadingHTTPServer:
    class Handler(SimpleHTTPRequestHandler):
        def __init__(self, *args: object) -> None:
            super().__init__(*args, directory=str(folder))  # type: ignore[arg-type]

        def log_message(self, format: str, *args: object) -> None:
            """Not logged."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server
