#!/bin/bash
# What the startup scripts of a TPU host and of a server VM share: reports, metadata, the bundle.
# The scripts are the same on every machine: all input comes from the metadata server and is never
# executed.
set -euo pipefail

# Tests run this against another root and metadata server.
readonly ROOT="${TPUFLEET_ROOT:-}"
readonly METADATA="${TPUFLEET_METADATA_URL:-http://metadata.google.internal}"
readonly STORAGE="${TPUFLEET_STORAGE_URL:-https://storage.googleapis.com}"
readonly HOME_DIR="$ROOT/opt/tpufleet"
readonly RETRY=(--retry 10 --retry-max-time 300 --retry-connrefused --connect-timeout 20)
readonly STALLED="${TPUFLEET_STALLED:-30}" # seconds without data after which a download starts again
readonly GUEST_ATTRIBUTES="$METADATA/computeMetadata/v1/instance/guest-attributes/tpufleet"

STAGE=started
REPORTED=no

say() { echo "tpufleet: $*"; }

# Writes the stage, and whether it failed, to the guest attributes of this host. The server reads
# them through the Cloud TPU API, also if this host cannot reach it. Format: model/bootstrap.py.
report() {
  local failed="$1" host message adopted
  host="$(attribute agent-worker-number 2>/dev/null || attribute_or worker-id 0)"
  message="$(printf '%s' "$2" | tr -d '\000-\037"\134' | cut -c 1-900)"
  [[ "$host" =~ ^[0-9]+$ ]] || host=0
  adopted="$(attribute_or tpufleet-adopted "$(attribute_or tpufleet-deployment '')" | tr -cd 'a-z0-9-')"
  publish bootstrap "{\"host\": $host, \"stage\": \"$STAGE\", \"failed\": $failed, \
\"message\": \"$message\", \"slice_id\": \"$adopted\"}"
}
publish() {
  curl --fail --silent --noproxy '*' --max-time 5 --retry 3 --request PUT \
    --header 'Metadata-Flavor: Google' "$GUEST_ATTRIBUTES/$1" --data-binary "$2" >/dev/null || true
}
stage() {
  STAGE="$1"
  say "$STAGE${2:+: $2}"
  report false "${2:-}"
}
fail() {
  say "$STAGE failed: $*" >&2
  REPORTED=yes
  report true "$*"
  exit 1
}
on_exit() {
  if [[ "$1" -ne 0 && "$REPORTED" = no ]]; then
    report true "the startup script exited with status $1; see journalctl -t startup-script"
  fi
}
trap 'on_exit $?' EXIT

# instance/$1 of the metadata server; fails if it does not exist.
metadata() {
  curl --fail --silent --show-error --noproxy '*' --retry 5 --retry-connrefused \
    --header 'Metadata-Flavor: Google' "$METADATA/computeMetadata/v1/instance/$1"
}
attribute() { metadata "attributes/$1"; }
attribute_or() { attribute "$1" 2>/dev/null || printf '%s' "$2"; }

# curl itself does not repeat a transfer that was reset, cut or stalled (curl 7.68 of Ubuntu 20.04 has
# no option for it). Hosts of a slice download at the same time, so each waits for a time of its own.
# $1: lines of a config file, which no list of processes shows.
fetch() {
  local config="$1" try status
  shift
  for ((try = 1; ; try++)); do
    printf '%s' "$config" | curl --fail --silent --show-error "${RETRY[@]}" \
      --speed-limit 1000 --speed-time "$STALLED" --config - "$@" && return
    status=$?
    # 22: an answer such as 403, after the retries of curl
    if [[ "$status" -eq 22 || "$try" -ge "${TRIES:-10}" ]]; then return "$status"; fi
    sleep $((try + RANDOM % 10))
  done
}

# gs:// with the host's service account, https:// without credentials.
download() {
  local source="$1" target="$2" token errors
  errors="$target.errors" # deleted with the draft if this fails
  case "$source" in
    gs://*)
      token="$(metadata service-accounts/default/token 2>"$errors" \
        | sed -n 's/.*"access_token": *"\([^"]*\)".*/\1/p')" || token=''
      [[ -n "$token" ]] || fail "no token of the service account of this host:" \
        "$(tail -n 1 "$errors"); give the node a service account"
      fetch "header = \"Authorization: Bearer $token\"" \
        --output "$target" "$STORAGE/${source#gs://}" 2>"$errors" \
        || fail "cannot download $source: $(tail -n 1 "$errors")"
      ;;
    https://*)
      fetch '' --location --proto '=https' --output "$target" "$source" 2>"$errors" \
        || fail "cannot download $source: $(tail -n 1 "$errors")"
      ;;
    *) fail "tpufleet-bundle must be a gs:// or https:// URL" ;;
  esac
  rm -f "$errors"
}

# The bundle holds its own Python and everything that the agent imports: nothing else is fetched, and
# nothing of the system's Python is used. Installed by checksum: an existing one is never modified.
install_bundle() {
  local source sum folder draft
  source="$(attribute tpufleet-bundle)" || fail "metadata tpufleet-bundle is missing; run tpu deploy bundle"
  sum="$(attribute tpufleet-bundle-sha256)" || fail "metadata tpufleet-bundle-sha256 is missing"
  [[ "$sum" =~ ^[0-9a-f]{64}$ ]] || fail "metadata tpufleet-bundle-sha256 is not a SHA-256"
  folder="$HOME_DIR/$sum"
  rm -rf "$HOME_DIR"/.draft.*
  if [[ ! -e "$folder/ready" ]]; then
    draft="$(mktemp -d "$HOME_DIR/.draft.XXXXXX")"
    stage 'downloading tpufleet' "$source"
    download "$source" "$draft/bundle.tar.gz"
    stage 'installing tpufleet'
    echo "$sum  $draft/bundle.tar.gz" | sha256sum --check --status - \
      || fail "checksum of $source does not match tpufleet-bundle-sha256"
    mkdir "$draft/root"
    tar --extract --gzip --file "$draft/bundle.tar.gz" --directory "$draft/root" --no-same-owner \
      || fail "$source is not a tar.gz"
    if [[ -d "$draft/root/python-$(uname -m)" ]]; then # for hosts with other CPUs
      rm -rf "$draft/root/python"
      mv "$draft/root/python-$(uname -m)" "$draft/root/python"
    fi
    rm -rf "$draft"/root/python-*
    [[ -x "$draft/root/python/bin/python3" ]] \
      || fail "$source is not a bundle; make one with tpu deploy bundle"
    python_runs "$draft/root" || fail "the Python of $source does not run on this host"
    rm -rf "$folder"
    chmod 755 "$draft/root"
    mv "$draft/root" "$folder"
    touch "$folder/ready"
    rm -rf "$draft"
  fi
  ln -sfn "$folder" "$HOME_DIR/current"
}
python_runs() { "$1/python/bin/python3" -I -c 'import tpufleet.agent.main'; }
