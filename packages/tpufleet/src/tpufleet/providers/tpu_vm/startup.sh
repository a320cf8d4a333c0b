# shellcheck shell=bash
# Installs and starts the tpufleet agent on a TPU VM host, after install_bundle.sh. Runs as root at
# every boot; idempotent.
readonly STATE_DIR="$ROOT/var/lib/tpufleet"
readonly UNIT="$ROOT/etc/systemd/system/tpufleet-agent.service"
readonly NONCE="$HOME_DIR/nonce"
readonly PACKAGES="${TPUFLEET_PACKAGES_URL:-https://packages.cloud.google.com/apt}"
readonly CHIP_WAIT="${TPUFLEET_CHIP_WAIT:-180}" # seconds

# A node that a person made and the server adopted: its processes, disks and boot stay as they are.
is_adopted() { [[ -n "$(attribute_or tpufleet-adopted '')" ]]; }

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
  if is_adopted; then return; fi
  while read -r device; do
    number=$((number + 1))
    target="$ROOT/mnt/disks/$number"
    if mountpoint --quiet "$target"; then continue; fi
    stage 'mounting disks' "$device"
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

# JAX asks for it on v5e and newer: the TPU runtime starts and ends much faster
# (cloud_tpu_init in jax/_src/cloud_tpu_init.py).
enable_huge_pages() {
  local setting="$ROOT/sys/kernel/mm/transparent_hugepage/enabled"
  if is_adopted || [[ ! -w "$setting" ]]; then return; fi
  echo always >"$setting" || say "transparent hugepages cannot be enabled"
}

# While an agent runs, processes that hold chips are its workload.
agent_runs() { systemctl is-active --quiet tpufleet-agent; }

# Processes left from before the agent. On an adopted node they belong to its users and stay.
free_chips() {
  if agent_runs; then return; fi
  local device users
  if is_adopted; then
    while read -r device; do
      users="$(fuser "$device" 2>/dev/null | xargs || true)"
      if [[ -n "$users" ]]; then
        fail "process $users uses ${device#"$ROOT"}; end it, then adopt the node again"
      fi
    done < <(chip_devices)
  fi
  while read -r device; do
    is_adopted || fuser --kill --silent "$device" || true
    chmod a+rw "$device"
  done < <(chip_devices)
  if [[ -e "$ROOT/dev/vfio/vfio" ]]; then chmod a+rw "$ROOT/dev/vfio/vfio"; fi
  rm -f "$ROOT/tmp/libtpu_lockfile"
  is_adopted || rm -rf "$ROOT/tmp/tpu_logs"
}

# Drivers may load minutes after boot.
check_chips() {
  local wanted found waited=0
  wanted="$(attribute_or tpufleet-chips 0)"
  while found="$(chip_devices | wc -l)" && [[ "$found" -lt "$wanted" ]]; do
    if [[ "$waited" -eq 0 ]]; then stage 'waiting for chips' "$found of $wanted"; fi
    if [[ "$waited" -ge "$CHIP_WAIT" ]]; then
      fail "$found of $wanted chips present in /dev/accel* and /dev/vfio after $waited s; replace the node"
    fi
    sleep 1
    waited=$((waited + 1))
  done
}

# JAX must see all chips that the kernel shows. The host is checked as a slice of its own, because
# others may not be up yet. Two cores of one chip have the same coordinates.
check_jax() {
  local wanted python bounds chips seen
  if agent_runs; then return; fi
  wanted="$(attribute_or tpufleet-chips 0)"
  # Jobs bring their own JAX; only some images have one.
  if ! python="$(command -v python3)" || ! "$python" -c 'import jax' 2>/dev/null; then return; fi
  case "$wanted" in
    1) bounds=1,1,1 ;;
    2) bounds=1,2,1 ;;
    4) bounds=2,2,1 ;;
    8) bounds=2,4,1 ;;
    *) return ;;
  esac
  stage 'checking chips'
  chips="$(seq --separator=, 0 $((wanted - 1)))"
  seen="$(TPU_PROCESS_BOUNDS=1,1,1 TPU_CHIPS_PER_PROCESS_BOUNDS="$bounds" \
    TPU_VISIBLE_CHIPS="$chips" CLOUD_TPU_TASK_ID=0 timeout 300 "$python" -c \
    'import jax; print(len({d.coords for d in jax.local_devices()}))' 2>/dev/null || echo 0)"
  if [[ "$seen" -lt "$wanted" ]]; then
    fail "JAX sees $seen of $wanted chips; replace the node"
  fi
  rm -f "$ROOT/tmp/libtpu_lockfile"
}

# Egress proxy and private CA of the operator. Values are checked: they become lines of a unit.
PROXY_ENVIRONMENT=()
configure_network() {
  local proxy no_proxy ca="$ROOT/usr/local/share/ca-certificates/tpufleet.crt"
  proxy="$(attribute_or tpufleet-https-proxy '')"
  if [[ -n "$proxy" ]]; then
    [[ "$proxy" =~ ^https?://[A-Za-z0-9._:@-]+/?$ ]] || fail "https_proxy is not an address: $proxy"
    no_proxy="$(attribute_or tpufleet-no-proxy '')"
    no_proxy="metadata.google.internal,169.254.169.254,localhost,127.0.0.1${no_proxy:+,$no_proxy}"
    [[ "$no_proxy" =~ ^[A-Za-z0-9.,:*/_-]+$ ]] || fail "no_proxy is not a list of hosts: $no_proxy"
    PROXY_ENVIRONMENT=(
      "HTTPS_PROXY=$proxy" "https_proxy=$proxy" "NO_PROXY=$no_proxy" "no_proxy=$no_proxy"
    )
    export "${PROXY_ENVIRONMENT[@]}"
  fi
  if attribute tpufleet-ca >"$HOME_DIR/.ca" 2>/dev/null; then
    if ! cmp --silent "$HOME_DIR/.ca" "$ca"; then
      mkdir -p "$(dirname "$ca")"
      install -m 644 "$HOME_DIR/.ca" "$ca"
      update-ca-certificates >/dev/null 2>&1 || say "update-ca-certificates failed"
    fi
    # For pip, uv, requests and other programs that bring their own certificates.
    PROXY_ENVIRONMENT+=(
      "SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt"
      "REQUESTS_CA_BUNDLE=/etc/ssl/certs/ca-certificates.crt"
    )
  fi
  rm -f "$HOME_DIR/.ca"
}

# Folders for the buckets of a job, which mounts them as the user of the agent. Only what does not
# exist is made, and nothing below folders of the system. Jobs of pools find /mnt/buckets.
make_mount_points() {
  local path first
  mkdir -p "$ROOT/mnt/buckets"
  chown tpufleet: "$ROOT/mnt/buckets"
  while read -r path || [[ -n "$path" ]]; do
    if [[ ! "$path" =~ ^(/[A-Za-z0-9._-]+)+$ || "/$path/" == */../* ]]; then continue; fi
    first="${path#/}"
    first="/${first%%/*}"
    if [[ -e "$ROOT$path" ]]; then continue; fi
    if [[ -e "$ROOT$first" && "$first" != /mnt && "$first" != /srv && "$first" != /data ]]; then
      say "$path is below a folder of the system: not made"
      continue
    fi
    mkdir -p "$ROOT$path"
    chown tpufleet: "$ROOT$path"
  done < <(attribute_or tpufleet-mounts '')
}

# Automatic upgrades hold the locks of apt for minutes after a boot. That of the lists has no timeout:
# who waits for it has not failed. To apt, lists that cannot be fetched now are no error.
install_package() {
  local try waited apt=(apt-get --option DPkg::Lock::Timeout=120 --quiet)
  export DEBIAN_FRONTEND=noninteractive
  for ((try = 0, waited = 0; try < 12; waited++)); do
    if "${apt[@]}" update && "${apt[@]}" install --yes --no-install-recommends "$1"; then return; fi
    if [[ "$waited" -ge 90 ]] || ! fuser --silent "$ROOT/var/lib/apt/lists/lock"; then
      try=$((try + 1))
    fi
    sleep 10
  done
  return 1
}

# Cloud Storage FUSE, for jobs with mounts; images do not have it. From Google's repository:
# cloud.google.com/storage/docs/cloud-storage-fuse/install. A job with mounts gets another host if
# this one cannot have it; a pool may have jobs without mounts.
install_gcsfuse() {
  local codename key="$ROOT/usr/share/keyrings/cloud.google.asc"
  if [[ "$(attribute_or tpufleet-gcsfuse no)" != yes ]]; then return; fi
  make_mount_points
  if command -v gcsfuse >/dev/null; then return; fi
  stage 'installing tpufleet' 'gcsfuse'
  codename="$(sed -n 's/^VERSION_CODENAME=//p' "$ROOT/etc/os-release" 2>/dev/null || true)"
  mkdir -p "$ROOT/etc/apt/sources.list.d" "$(dirname "$key")"
  if ! {
    TRIES=3 fetch '' --retry 2 --connect-timeout 10 --max-time 60 --output "$key" "$PACKAGES/doc/apt-key.gpg" \
      && echo "deb [signed-by=/usr/share/keyrings/cloud.google.asc]" \
        "$PACKAGES gcsfuse-${codename:-jammy} main" \
        >"$ROOT/etc/apt/sources.list.d/gcsfuse.list" \
      && install_package gcsfuse
  }; then
    if [[ -n "$(attribute_or tpufleet-mounts '')" ]]; then fail "gcsfuse cannot be installed"; fi
    say "gcsfuse cannot be installed: jobs with mounts will fail"
  fi
}

# For jobs with images, which the operator allowed. The images of Cloud TPU VMs have it, those of
# Compute Engine do not.
install_docker() {
  if [[ "$(attribute_or tpufleet-containers no)" != yes ]] || command -v docker >/dev/null; then return; fi
  stage 'installing tpufleet' 'docker'
  install_package docker.io \
    || fail "docker cannot be installed; use a runtime that has it, or leave out \`containers\`"
}

# With it an agent that starts again, after a crash or a reboot, proves that it is the agent of this
# host. systemd opens it for the agent, whose user, that of the jobs too, cannot.
keep_nonce() {
  if [[ -s "$NONCE" ]]; then return; fi
  (umask 077 && od -A n -t x1 -N 16 /dev/urandom | tr -d ' \n' >"$NONCE.draft")
  mv "$NONCE.draft" "$NONCE"
}

start_agent() {
  local draft line extra=''
  keep_nonce
  for line in "${PROXY_ENVIRONMENT[@]}"; do extra+="Environment=$line"$'\n'; done
  # Docker gives its users root on the host, so the operator decides.
  if [[ "$(attribute_or tpufleet-containers no)" = yes ]] && getent group docker >/dev/null; then
    extra+=$'SupplementaryGroups=docker\n'
  fi
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
Environment=TPUFLEET_JOB_PYTHON=uv
Environment=TPUFLEET_NONCE_FD=0
StandardInput=file:/opt/tpufleet/nonce
${extra}WorkingDirectory=/var/lib/tpufleet
# -I: neither variables nor folders of the user reach the agent's Python.
ExecStart=/opt/tpufleet/current/python/bin/python3 -I -m tpufleet agent
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
  # This script starts it at every boot, for as long as the node is adopted.
  is_adopted || systemctl enable --quiet tpufleet-agent
  local running wanted
  running="$(cat "$STATE_DIR/running-build" 2>/dev/null || true)"
  wanted="$(readlink "$HOME_DIR/current")"
  if [[ "$running" != "$wanted" ]] || ! agent_runs; then
    stage 'starting the agent'
    systemctl restart tpufleet-agent
    printf '%s' "$wanted" >"$STATE_DIR/running-build"
  fi
}

main() {
  make_folders
  mount_disks
  check_chips
  free_chips
  enable_huge_pages
  configure_network
  install_bundle
  check_jax
  install_gcsfuse
  install_docker
  start_agent
  say "agent started"
}

main "$@"
