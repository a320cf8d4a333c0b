# shellcheck shell=bash
# Installs and starts a tpufleet server on a Compute Engine VM, after install_bundle.sh. Runs as root
# at every boot; idempotent. All state is on a disk of its own, which survives the VM.
readonly SERVER_HOME="$ROOT/var/lib/tpufleet-server"
readonly TLS="$SERVER_HOME/tls"
readonly DISK="$ROOT/dev/disk/by-id/google-tpufleet-state"
readonly SERVER_UNIT="$ROOT/etc/systemd/system/tpufleet-server.service"
readonly READY_WAIT="${TPUFLEET_READY_WAIT:-180}" # seconds

# A disk with a file system is never formatted.
mount_state() {
  mkdir -p "$HOME_DIR" "$SERVER_HOME"
  id tpufleet >/dev/null 2>&1 || useradd --system --create-home --shell /usr/sbin/nologin tpufleet
  if mountpoint --quiet "$SERVER_HOME"; then return; fi
  stage 'mounting disks' "$DISK"
  [[ -e "$DISK" ]] || fail "disk tpufleet-state is not attached"
  blkid "$DISK" >/dev/null 2>&1 || mkfs.ext4 -q -F -m 0 "$DISK"
  mount -o discard,defaults "$DISK" "$SERVER_HOME" || fail "cannot mount $DISK"
}

# A private CA, made once; a certificate for the addresses of this VM, renewed when these change or
# it expires within 60 days. Keys never leave the state disk.
make_certificates() {
  local names
  mkdir -p "$TLS"
  chmod 700 "$TLS"
  INTERNAL_IP="$(metadata network-interfaces/0/ip)"
  EXTERNAL_IP="$(metadata network-interfaces/0/access-configs/0/external-ip 2>/dev/null || true)"
  names="IP:$INTERNAL_IP${EXTERNAL_IP:+,IP:$EXTERNAL_IP},DNS:$(hostname)"
  if [[ ! -e "$TLS/ca.pem" ]]; then
    make_key "$TLS/ca.key"
    openssl req -x509 -new -key "$TLS/ca.key" -subj "/CN=tpufleet server CA" -days 3650 \
      -addext 'basicConstraints=critical,CA:TRUE' -addext 'keyUsage=critical,keyCertSign,cRLSign' \
      -out "$TLS/.ca.pem" 2>/dev/null || fail "openssl cannot make a CA"
    mv "$TLS/.ca.pem" "$TLS/ca.pem"
  fi
  if [[ "$(cat "$TLS/names" 2>/dev/null)" != "$names" ]] \
    || ! openssl x509 -in "$TLS/server.pem" -noout -checkend 5184000 >/dev/null 2>&1; then
    make_key "$TLS/server.key"
    openssl req -new -key "$TLS/server.key" -subj "/CN=tpufleet server" -out "$TLS/server.csr" \
      2>/dev/null
    printf 'subjectAltName=%s\nextendedKeyUsage=serverAuth\nbasicConstraints=CA:FALSE\n' "$names" \
      >"$TLS/server.ext"
    openssl x509 -req -in "$TLS/server.csr" -CA "$TLS/ca.pem" -CAkey "$TLS/ca.key" \
      -CAcreateserial -days 825 -extfile "$TLS/server.ext" -out "$TLS/server.pem" 2>/dev/null \
      || fail "openssl cannot make a certificate"
    printf '%s' "$names" >"$TLS/names"
  fi
}
make_key() {
  openssl ecparam -name prime256v1 -genkey -noout -out "$1"
  chmod 600 "$1"
}

# The configuration of the operator, and the hash of the admin's token: metadata holds no secret.
write_settings() {
  attribute tpufleet-config >"$SERVER_HOME/config.yaml" || fail "metadata tpufleet-config is missing"
  attribute tpufleet-admin-token-sha256 >"$SERVER_HOME/.hash" \
    || fail "metadata tpufleet-admin-token-sha256 is missing"
  [[ "$(cat "$SERVER_HOME/.hash")" =~ ^[0-9a-f]{64}$ ]] \
    || fail "metadata tpufleet-admin-token-sha256 is not a SHA-256"
  printf 'sha256:%s\n' "$(cat "$SERVER_HOME/.hash")" >"$SERVER_HOME/admin-token"
  rm "$SERVER_HOME/.hash"
  chmod 600 "$SERVER_HOME/admin-token" "$SERVER_HOME/config.yaml"
  chmod 700 "$SERVER_HOME"
  chown -R tpufleet: "$SERVER_HOME"
}

start_server() {
  local port draft wanted
  port="$(attribute_or tpufleet-port 8470)"
  [[ "$port" =~ ^[0-9]{1,5}$ ]] || fail "metadata tpufleet-port is not a port: $port"
  draft="$(mktemp)"
  cat >"$draft" <<UNIT
[Unit]
Description=tpufleet server
After=network-online.target
Wants=network-online.target

[Service]
User=tpufleet
Environment=TPUFLEET_HOME=/var/lib/tpufleet-server
Environment=TPUFLEET_CONFIG=/var/lib/tpufleet-server/config.yaml
Environment=TPUFLEET_LISTEN=0.0.0.0:$port
Environment=TPUFLEET_PUBLIC_URL=https://$INTERNAL_IP:$port
Environment=TPUFLEET_TLS_CERT=/var/lib/tpufleet-server/tls/server.pem
Environment=TPUFLEET_TLS_KEY=/var/lib/tpufleet-server/tls/server.key
Environment=TPUFLEET_CA_FILE=/var/lib/tpufleet-server/tls/ca.pem
Environment=TPUFLEET_ADMIN_TOKEN_FILE=/var/lib/tpufleet-server/admin-token
WorkingDirectory=/var/lib/tpufleet-server
ExecStart=/opt/tpufleet/current/python/bin/python3 -I -m tpufleet serve
Restart=always
RestartSec=2
TimeoutStopSec=60
LimitNOFILE=1048576
ReadWritePaths=/var/lib/tpufleet-server
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes
PrivateTmp=yes
ProtectKernelModules=yes
ProtectClock=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6
RestrictSUIDSGID=yes
LockPersonality=yes
CapabilityBoundingSet=
UMask=0077
PrivateDevices=yes
ProtectControlGroups=yes
ProtectKernelTunables=yes
RestrictNamespaces=yes
SystemCallFilter=@system-service

[Install]
WantedBy=multi-user.target
UNIT
  mkdir -p "$(dirname "$SERVER_UNIT")"
  install -m 644 "$draft" "$SERVER_UNIT"
  rm -f "$draft"
  systemctl daemon-reload
  systemctl enable --quiet tpufleet-server
  stage 'starting the server'
  systemctl restart tpufleet-server
  for ((wanted = 0; wanted < READY_WAIT; wanted++)); do
    if curl --fail --silent --noproxy '*' --max-time 5 --cacert "$TLS/ca.pem" \
      "https://$INTERNAL_IP:$port/healthz" >/dev/null; then
      # The certificate of the CA is public; the operator reads it through the Compute Engine API.
      publish ca "$(cat "$TLS/ca.pem")"
      STAGE=connected
      report false "https://$INTERNAL_IP:$port"
      say "server ready at https://$INTERNAL_IP:$port"
      return
    fi
    sleep 1
  done
  fail "the server does not answer after $READY_WAIT s; see journalctl -u tpufleet-server"
}

main() {
  mount_state
  install_bundle
  make_certificates
  write_settings
  start_server
}

main "$@"
