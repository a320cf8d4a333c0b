"""What is done on the hosts of a node by ssh, and how its answer reads."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tpufleet.views.cli import gcloud
from tpufleet.views.cli.vm.fleet import NodeOutcome

SECONDS = 300.0
# Only what belongs to nobody: a lock that a process holds is left alone.
_FREE_CHIPS = "sudo fuser -s /tmp/libtpu_lockfile || sudo rm -f /tmp/libtpu_lockfile"
_SHOW_DEVICES = "import jax; print('devices', jax.local_device_count(), jax.device_count())"
# Arguments: "force" or nothing.
_MOUNT_DISKS = r"""
set -u; force="${1:-}"; number=0
for device in $(find /dev/disk/by-id -name 'google-*' ! -name '*-part*' \
    ! -name '*persistent-disk-0' 2>/dev/null | sort); do
  number=$((number + 1)); target="/mnt/disks/$number"; mkdir -p "$target"
  if mountpoint -q "$target"; then
    if [ "$force" != force ]; then echo "mounted $target"; continue; fi
    umount "$target" || { echo "failed $target is in use"; continue; }
  fi
  if ! blkid "$device" >/dev/null; then
    echo "failed $device has no file system; make one with mkfs.ext4"; continue
  fi
  if mount -o discard,defaults "$device" "$target" 2>/dev/null \
      || mount -o ro,noload "$device" "$target"; then
    echo "mounted $target"
  else
    echo "failed $device cannot be mounted"
  fi
done
[ "$number" -gt 0 ] || echo "failed no data disk is attached"
"""
# Arguments: source, target, "force" or nothing.
_MOUNT_NFS = r"""
set -u; source="$1"; target="$2"; force="${3:-}"; mkdir -p "$target"
if mountpoint -q "$target"; then
  if [ "$force" != force ]; then echo "mounted $target"; exit 0; fi
  umount "$target" || { echo "failed $target is in use"; exit 1; }
fi
if ! command -v mount.nfs >/dev/null; then
  export DEBIAN_FRONTEND=noninteractive
  apt-get -qq update && apt-get -qq -o DPkg::Lock::Timeout=120 install -y nfs-common >/dev/null
fi
if mount -t nfs "$source" "$target"; then
  echo "mounted $target"
else
  echo "failed $source cannot be mounted"
fi
"""
# What `wandb login` would write; the key comes by standard input.
_LOG_IN = """
import os, pathlib, re, sys
key, file = sys.stdin.readline().strip(), pathlib.Path.home() / ".netrc"
old = file.read_text() if file.exists() else ""
entry = r"machine\\s+api\\.wandb\\.ai\\s+login\\s+\\S+\\s+password\\s+\\S+\\s*"
kept = re.sub(entry, "", old)
draft = file.with_name(".netrc.new")
draft.unlink(missing_ok=True)
with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
    out.write(f"machine api.wandb.ai\\n  login user\\n  password {key}\\n{kept}")
draft.replace(file)
print("kept the key")
"""
_SIGNS = (
    ("already in use", "chips in use", "another process holds the chips"),
    ("No module named 'jax'", "no JAX", "pip install 'jax[tpu]' on its hosts"),
    ("gcloud auth login", "no account", "run `gcloud auth login` first"),
    ("Permission denied", "no ssh", "your key is not accepted: see `gcloud auth login`, OS Login"),
    ("no answer within", "no answer", "a host hangs; `tpu restart` or `tpu reapply` it"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAddress:
    name: str
    zone: str
    project: str


def run_on_all_hosts(node: NodeAddress, *command: str) -> tuple[int, str]:
    return gcloud.run(gcloud.ssh(node.name, node.zone, node.project, "all", command), SECONDS)


def check_devices(node: NodeAddress) -> NodeOutcome:
    """Which chips JAX sees."""
    status, said = run_on_all_hosts(node, "python3", "-c", _SHOW_DEVICES)
    seen = re.findall(r"^devices (\d+) (\d+)$", said, re.MULTILINE)
    if status == 0 and seen:
        hosts = "1 host sees" if len(seen) == 1 else f"{len(seen)} hosts see"
        return _outcome(node, "good", f"{hosts} {seen[0][1]} chips")
    return _trouble(node, status, said)


def remove_stale_locks(node: NodeAddress) -> None:
    run_on_all_hosts(node, "sh", "-c", _FREE_CHIPS)


def mount_disks(node: NodeAddress, force: bool) -> NodeOutcome:
    return _mounted(node, *run_on_all_hosts(node, *_as_root(_MOUNT_DISKS), *_again(force)))


def mount_nfs(node: NodeAddress, source: str, target: str, force: bool) -> NodeOutcome:
    asked = run_on_all_hosts(node, *_as_root(_MOUNT_NFS), source, target, *_again(force))
    return _mounted(node, *asked)


def log_in_to_wandb(node: NodeAddress, host: int, key: str) -> NodeOutcome:
    argv = gcloud.ssh(node.name, node.zone, node.project, str(host), ("python3", "-c", _LOG_IN))
    status, said = gcloud.run(argv, SECONDS, given=f"{key}\n")
    if status == 0 and "kept the key" in said:
        return _outcome(node, "done", f"host {host}")
    return _trouble(node, status, said.replace(key, "…"))


def _as_root(script: str) -> tuple[str, ...]:
    return "sudo", "bash", "-c", script, "tpu"


def _again(force: bool) -> tuple[str, ...]:
    return ("force",) if force else ()


def _mounted(node: NodeAddress, status: int, said: str) -> NodeOutcome:
    failed = re.findall(r"^failed (.+)$", said, re.MULTILINE)
    done = re.findall(r"^mounted (.+)$", said, re.MULTILINE)
    if failed:
        return _outcome(node, "bad", "; ".join(dict.fromkeys(failed)))
    if status == 0 and done:
        return _outcome(node, "mounted", ", ".join(dict.fromkeys(done)))
    return _trouble(node, status, said)


def _trouble(node: NodeAddress, status: int, said: str) -> NodeOutcome:
    for sign, result, words in _SIGNS:
        if sign in said:
            return _outcome(node, result, words)
    lines = said.strip().splitlines() or ["nothing was said"]
    line = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return _outcome(node, "bad", f"exit status {status}: {line[:200]}")


def _outcome(node: NodeAddress, result: str, words: str) -> NodeOutcome:
    return NodeOutcome(name=node.name, zone=node.zone, result=result, words=words)
