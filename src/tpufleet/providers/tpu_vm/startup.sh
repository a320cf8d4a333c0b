#!/bin/bash
# Installs and starts the tpufleet agent on a TPU VM host. Runs as root at every boot; idempotent.
# The script is the same for every host: all input comes from the metadata server and is never
# executed.
set -euo pipefail

# Tests run this against another root and metadata server.
readonly ROOT="${TPUFLEET_ROOT:-}"
readonly METADATA="${TPUFLEET_METADATA_URL:-http://metadata.google.internal}"
readonly STORAGE="${TPUFLEET_STORAGE_URL:-https://storage.googleapis.com}"
readonly HOME_DIR="$ROOT/opt/tpufleet"
readonly STATE_DIR="$ROOT/var/lib/tpufleet"
readonly UNIT="$ROOT/etc/systemd/system/tpufleet-agent.service"
readonly DOWNLOAD_TRIES=5
readonly CHIP_WAIT="${TPUFLEET_CHIP_WAIT:-180}" # seconds

say() { echo "tpufleet: $*"; }
fail() {
  say "$*" >&2
  exit 1
}

# instance/$1 of the metadata server; fails if it does not exist.
metadata() {
  curl --fail --silent --show-error --noproxy '*' --retry 5 --retry-connrefused \
    --header 'Metadata-Flavor: Google' "$METADATA/computeMetadata/v1/instance/$1"
}
attribute() { metadata "attributes/$1"; }
attribute_or() { attribute "$1" 2>/dev/null || printf '%s' "$2"; }

make_folders() {
  mkdir -p "$HOME_DIR" "$STATE_DIR/work"
  id tpufleet >/dev/null 2>&1 || useradd --system --create-home --shell /usr/sbin/nologin tpufleet
  chmod 700 "$STATE_DIR"
  chown -R tpufleet: "$STATE_DIR"
}

# Mounts attached disks at /mnt/disks/N. An empty disk is formatted only if the metadata allows it;
# a disk with a file system never is.
mount_disks() {
  local number=0 device target
  while read -r device; do
    number=$((number + 1))
    target="$ROOT/mnt/disks/$number"
    if mountpoint --quiet "$target"; then continue; fi
    mkdir -p "$target"
    if ! blkid "$device" >/dev/null 2>&1; then
      if [[ "$(attribute_or tpufleet-format-disks no)" != yes ]]; then
        say "disk $device has no file system; set the metadata tpufleet-format-disks=yes to format it"
        continue
      fi
      mkfs.ext4 -q -F "$device"
    fi
    mount -o discard,defaults "$device" "$target" \
      || mount -o ro,noload "$device" "$target" \
      || say "disk $device cannot be mounted"
  done < <(find "$ROOT/dev/disk/by-id" -name 'google-*' ! -name '*-part*' ! -name '*persistent-disk-0' \
    2>/dev/null | sort)
}

# Older generations have /dev/accel*, newer ones /dev/vfio/*: either folder may be missing.
chip_devices() {
  find "$ROOT/dev" -maxdepth 1 -name 'accel[0-9]*' 2>/dev/null || true
  find "$ROOT/dev/vfio" -maxdepth 1 -name '[0-9]*' 2>/dev/null || true
}

# While an agent runs, processes that hold chips are its workload.
agent_runs() { systemctl is-active --quiet tpufleet-agent; }

# Processes left from before the agent.
free_chips() {
  if agent_runs; then return; fi
  local device
  while read -r device; do
    fuser --kill --silent "$device" || true
    chmod a+rw "$device"
  done < <(chip_devices)
  rm -f "$ROOT/tmp/libtpu_lockfile"
  rm -rf "$ROOT/tmp/tpu_logs"
}

# Drivers may load minutes after boot.
check_chips() {
  local wanted found waited=0
  wanted="$(attribute_or tpufleet-chips 0)"
  while found="$(chip_devices | wc -l)" && [[ "$found" -lt "$wanted" ]]; do
    if [[ "$waited" -ge "$CHIP_WAIT" ]]; then
      fail "$found of $wanted chips present in /dev/accel* and /dev/vfio after $waited s; replace the node"
    fi
    sleep 1
    waited=$((waited + 1))
  done
}

# A Python with JAX: the agent's, or the system's.
python_with_jax() {
  local python
  for python in "$HOME_DIR/current/bin/python" "$(command -v python3)"; do
    if "$python" -c 'import jax' 2>/dev/null; then
      printf '%s' "$python"
      return
    fi
  done
  return 1
}

# JAX must see all chips that the kernel shows. The host is checked as a slice of its own, because
# others may not be up yet. Two cores of one chip have the same coordinates.
check_jax() {
  local wanted python bounds chips seen
  if agent_runs; then return; fi
  wanted="$(attribute_or tpufleet-chips 0)"
  if ! python="$(python_with_jax)"; then
    say "JAX is not installed; skipping the chip check"
    return
  fi
  case "$wanted" in
    1) bounds=1,1,1 ;;
    2) bounds=1,2,1 ;;
    4) bounds=2,2,1 ;;
    8) bounds=2,4,1 ;;
    *) return ;;
  esac
  chips="$(seq --separator=, 0 $((wanted - 1)))"
  seen="$(TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS="$bounds" \
    TPU_VISIBLE_CHIPS="$chips" CLOUD_TPU_TASK_ID=0 timeout 300 "$python" -c \
    'import jax; print(len({d.coords for d in jax.local_devices()}))' 2>/dev/null || echo 0)"
  if [[ "$seen" -lt "$wanted" ]]; then
    fail "JAX sees $seen of $wanted chips; replace the node"
  fi
  rm -f "$ROOT/tmp/libtpu_lockfile"
}

# Some images have a Python without venv.
find_python() {
  local name try
  for name in python3.13 python3.12 python3.11; do
    if command -v "$name" >/dev/null && "$name" -c 'import ensurepip, venv' 2>/dev/null; then
      command -v "$name"
      return
    fi
  done
  say "installing Python 3.11" >&2
  # The machine's own upgrades may hold the lists and the packages for a while after boot.
  for try in 1 2 3 4 5; do
    if DEBIAN_FRONTEND=noninteractive apt-get -qq update >&2 \
      && DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 install -y \
        python3.11 python3.11-venv >&2; then
      command -v python3.11
      return
    fi
    sleep $((try * 10))
  done
  fail "cannot install Python 3.11"
}

# gs:// with the host's service account, https:// without credentials.
download() {
  local source="$1" target="$2" token
  case "$source" in
    gs://*)
      token="$(metadata service-accounts/default/token | python3 -c \
        'import json, sys; print(json.load(sys.stdin)["access_token"])')"
      printf 'header = "Authorization: Bearer %s"\n' "$token" \
        | curl --fail --silent --show-error --retry "$DOWNLOAD_TRIES" --config - \
          --output "$target" "$STORAGE/${source#gs://}"
      ;;
    https://*)
      curl --fail --silent --show-error --location --proto '=https' \
        --retry "$DOWNLOAD_TRIES" --output "$target" "$source"
      ;;
    *) fail "tpufleet-wheel must be a gs:// or https:// URL" ;;
  esac
}

# Installed by checksum: an existing installation is never modified.
install_build() {
  local source sum folder draft name python
  source="$(attribute tpufleet-wheel)" || fail "metadata tpufleet-wheel is missing"
  sum="$(attribute tpufleet-wheel-sha256)" || fail "metadata tpufleet-wheel-sha256 is missing"
  [[ "$sum" =~ ^[0-9a-f]{64}$ ]] || fail "metadata tpufleet-wheel-sha256 is not a SHA-256"
  folder="$HOME_DIR/$sum"
  if [[ ! -e "$folder/ready" ]]; then
    draft="$(mktemp -d "$HOME_DIR/.draft.XXXXXX")"
    name="$(basename "$source")"
    download "$source" "$draft/$name"
    echo "$sum  $draft/$name" | sha256sum --check --quiet - \
      || fail "checksum of $source does not match tpufleet-wheel-sha256"
    python="$(find_python)"
    rm -rf "$folder"
    "$python" -m venv "$folder"
    case "$name" in
      *.whl) "$folder/bin/python" -m pip install --quiet --no-input "$draft/$name" ;;
      *.tar.gz) # a folder of wheels: nothing else is fetched
        mkdir "$draft/wheels"
        tar --extract --gzip --file "$draft/$name" --directory "$draft/wheels" --no-same-owner
        "$folder/bin/python" -m pip install --quiet --no-input --no-index \
          --find-links "$draft/wheels" tpufleet
        ;;
      *) fail "$name is neither a wheel nor a tar.gz of wheels" ;;
    esac
    touch "$folder/ready"
    rm -rf "$draft"
  fi
  ln -sfn "$folder" "$HOME_DIR/current"
}

start_agent() {
  local draft
  draft="$(mktemp)"
  cat >"$draft" <<UNIT
[Unit]
Description=tpufleet agent
After=network-online.target
Wants=network-online.target

[Service]
User=tpufleet
Delegate=yes
Environment=TPUFLEET_METADATA=$METADATA
Environment=TPUFLEET_WORK=/var/lib/tpufleet/work
WorkingDirectory=/var/lib/tpufleet
ExecStart=/opt/tpufleet/current/bin/python -m tpufleet agent
# Exit status 3: the slice was released. All other failures restart the agent.
Restart=on-failure
RestartPreventExitStatus=3
RestartSec=2
# Only the agent gets SIGTERM: it lets the workload checkpoint and reports its end.
KillMode=mixed
TimeoutStopSec=60
LimitMEMLOCK=infinity
LimitNOFILE=1048576

[Install]
WantedBy=multi-user.target
UNIT
  mkdir -p "$(dirname "$UNIT")"
  if ! cmp --silent "$draft" "$UNIT"; then
    install -m 644 "$draft" "$UNIT"
    systemctl daemon-reload
  fi
  rm -f "$draft"
  systemctl enable --quiet tpufleet-agent
  local running wanted
  running="$(cat "$STATE_DIR/running-build" 2>/dev/null || true)"
  wanted="$(readlink "$HOME_DIR/current")"
  if [[ "$running" != "$wanted" ]] || ! agent_runs; then
    systemctl restart tpufleet-agent
    printf '%s' "$wanted" >"$STATE_DIR/running-build"
  fi
}

main() {
  make_folders
  mount_disks
  free_chips
  check_chips
  install_build
  check_jax
  start_agent
  say "agent started"
}

main "$@"
