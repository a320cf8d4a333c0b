"""What runs on the hosts of a node with ssh, and how the output is interpreted."""

from __future__ import annotations

import re
from dataclasses import replace

from tpufleet.views.cli import gcloud
from tpufleet.views.cli.gcloud import NodeAddress, SshResult
from tpufleet.views.cli.vm.outcomes import NodeOutcome, NodeResult

TIMEOUT_SECONDS = 300.0
# A lock that a process holds is not removed.
_REMOVE_STALE_LOCK = "sudo fuser -s /tmp/libtpu_lockfile || sudo rm -f /tmp/libtpu_lockfile"
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
# What `wandb login` would write; the key comes from standard input.
_INSTALL_WANDB_KEY = """
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
print("key installed")
"""
# Runs the startup script that the metadata has now, as a boot does:
# https://cloud.google.com/compute/docs/instances/startup-scripts/linux
STARTUP_COMMAND = ("sudo", "google_metadata_script_runner", "startup")
# Argument: the slice, whose metadata may take a moment to arrive.
_RUN_STARTUP_SCRIPT = r"""
set -u; source=http://metadata.google.internal/computeMetadata/v1/instance/attributes
read_value() { curl -fsS --noproxy '*' -H 'Metadata-Flavor: Google' "$source/$1" 2>/dev/null; }
waited=0
until [ "$(read_value tpufleet-adopted)" = "$1" ]; do
  if [ "$waited" -ge 120 ]; then echo "failed the metadata of $1 has not arrived"; exit 1; fi
  sleep 2; waited=$((waited + 2))
done
script="$(mktemp)"; trap 'rm -f "$script"' EXIT
read_value startup-script >"$script"
bash "$script" </dev/null && echo "agent started"
"""
STARTUP_SECONDS = 900.0
# Known errors in the output of gcloud, ssh and JAX, which have no typed form.
_KNOWN_ERRORS = (
    ("already in use", NodeResult.CHIPS_IN_USE, "another process uses the chips"),
    ("No module named 'jax'", NodeResult.NO_JAX, "install it with pip install 'jax[tpu]'"),
    ("gcloud auth login", NodeResult.NO_ACCOUNT, "log in with `gcloud auth login`"),
    (
        "Permission denied",
        NodeResult.NO_SSH,
        "ssh key rejected; check OS Login and your gcloud account",
    ),
)


def run_on_all_hosts(node: NodeAddress, *command: str) -> SshResult:
    return gcloud.run(node.ssh("all", command), TIMEOUT_SECONDS)


def check_devices(node: NodeAddress) -> NodeOutcome:
    """Which chips JAX sees."""
    result = run_on_all_hosts(node, "python3", "-c", _SHOW_DEVICES)
    counts = re.findall(r"^devices (\d+) (\d+)$", result.output, re.MULTILINE)
    if result.status == 0 and counts:
        hosts = "1 host sees" if len(counts) == 1 else f"{len(counts)} hosts see"
        return _outcome(node, NodeResult.OK, f"{hosts} {counts[0][1]} chips")
    return _failure(node, result)


def remove_stale_locks(node: NodeAddress) -> None:
    run_on_all_hosts(node, "sh", "-c", _REMOVE_STALE_LOCK)


def mount_disks(node: NodeAddress, force: bool) -> NodeOutcome:
    return _mount_outcome(
        node, run_on_all_hosts(node, *_as_root(_MOUNT_DISKS), *_force_argument(force))
    )


def mount_nfs(node: NodeAddress, source: str, target: str, force: bool) -> NodeOutcome:
    result = run_on_all_hosts(node, *_as_root(_MOUNT_NFS), source, target, *_force_argument(force))
    return _mount_outcome(node, result)


def run_startup_script(node: NodeAddress, slice_id: str) -> NodeOutcome:
    """Of an adopted node, on every host."""
    argv = node.ssh("all", (*_as_root(_RUN_STARTUP_SCRIPT), slice_id))
    result = gcloud.run(argv, STARTUP_SECONDS)
    failed = re.findall(r"^(?:failed|tpufleet: .* failed:) (.+)$", result.output, re.MULTILINE)
    if failed:
        return _outcome(node, NodeResult.FAILED, "; ".join(dict.fromkeys(failed)))
    if result.status == 0 and "agent started" in result.output:
        return _outcome(node, NodeResult.DONE, "agent started")
    return _failure(node, result)


def install_wandb_key(node: NodeAddress, host: int, key: str) -> NodeOutcome:
    argv = node.ssh(str(host), ("python3", "-c", _INSTALL_WANDB_KEY))
    result = gcloud.run(argv, TIMEOUT_SECONDS, stdin=f"{key}\n")
    if result.status == 0 and "key installed" in result.output:
        return _outcome(node, NodeResult.DONE, f"host {host}")
    return _failure(node, replace(result, output=result.output.replace(key, "…")))


def _as_root(script: str) -> tuple[str, ...]:
    return "sudo", "bash", "-c", script, "tpu"


def _force_argument(force: bool) -> tuple[str, ...]:
    return ("force",) if force else ()


def _mount_outcome(node: NodeAddress, result: SshResult) -> NodeOutcome:
    """From the lines that the mount scripts above print."""
    failed = re.findall(r"^failed (.+)$", result.output, re.MULTILINE)
    mounted = re.findall(r"^mounted (.+)$", result.output, re.MULTILINE)
    if failed:
        return _outcome(node, NodeResult.FAILED, "; ".join(dict.fromkeys(failed)))
    if result.status == 0 and mounted:
        return _outcome(node, NodeResult.MOUNTED, ", ".join(dict.fromkeys(mounted)))
    return _failure(node, result)


def _failure(node: NodeAddress, result: SshResult) -> NodeOutcome:
    if result.timed_out:
        return _outcome(
            node,
            NodeResult.NO_ANSWER,
            f"no answer within {TIMEOUT_SECONDS:g} s; try `tpu vm restart {node.name}`",
        )
    for pattern, kind, message in _KNOWN_ERRORS:
        if pattern in result.output:
            return _outcome(node, kind, message)
    lines = result.output.strip().splitlines() or ["no output"]
    line = next((line for line in lines if line.startswith("ERROR")), lines[-1])
    return _outcome(node, NodeResult.FAILED, f"exit status {result.status}: {line[:200]}")


def _outcome(node: NodeAddress, result: NodeResult, message: str) -> NodeOutcome:
    return NodeOutcome(name=node.name, zone=node.zone, result=result, message=message)
