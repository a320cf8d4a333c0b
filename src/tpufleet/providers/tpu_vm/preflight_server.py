"""Checks before the first spend that the server is where TPU hosts can reach it."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
from urllib.parse import urlsplit

from tpufleet.model.preflight import Check, CheckStatus

REACH_SECONDS = 10.0
DEPLOY = "tpu deploy server"  # also builds the bundle
OK, WARNING, FAILED = CheckStatus.OK, CheckStatus.WARNING, CheckStatus.FAILED


def check_server_url(url: str, server: str, ca_file: str, emulated: bool) -> Check:
    """Whether hosts can reach the server at `url`, its `public_url`. From here only the address
    itself can be tried; of a `server` that runs elsewhere, the one for clients."""
    name = "public_url"
    if server and not url:
        return _answers("server", server, ca_file, DEPLOY)
    if emulated:
        message = "emulated hosts run on this machine"
        return Check(name=name, status=CheckStatus.SKIPPED, message=message)
    fix = "set `public_url: https://HOST:PORT` in the config file, an address that TPU hosts reach"
    parts = urlsplit(url)
    if not url or not parts.hostname:
        message = "not set: TPU hosts have no server to connect to"
        return Check(name=name, status=FAILED, message=message, fix=f"{DEPLOY}; or {fix}")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(parts.hostname, None)}
    except OSError as error:
        return Check(name=name, status=FAILED, message=f"{parts.hostname}: {error}", fix=fix)
    addresses = [ipaddress.ip_address(address) for address in found]
    if any(address.is_loopback for address in addresses):
        return Check(name=name, status=FAILED, message=f"{url} is this machine only", fix=fix)
    answers = _answers(name, url, ca_file, "tpu serve")
    if answers.status is OK and any(address.is_private for address in addresses):
        message = f"{url} responds; its address is private: hosts must be in the same VPC network"
        return Check(name=name, status=WARNING, message=message)
    return answers


def _answers(name: str, url: str, ca_file: str, fix: str) -> Check:
    context = ssl.create_default_context()
    if ca_file:
        context.load_verify_locations(ca_file)
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=REACH_SECONDS, context=context):
            pass
    except urllib.error.HTTPError:
        pass  # something answers
    except (OSError, ssl.SSLError) as error:
        reason = getattr(error, "reason", error)
        return Check(name=name, status=FAILED, message=f"{url}: {reason}", fix=fix)
    return Check(name=name, status=OK, message=f"{url} responds")
