"""Checks before the first spend that the server is where TPU hosts can reach it."""

from __future__ import annotations

import ipaddress
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from tpufleet.model.fleet.preflight import Check, CheckStatus, failed, ok, skipped, warning
from tpufleet.providers.tpu_vm.google_rest import GoogleRest
from tpufleet.providers.tpu_vm.preflight_accounts import unknown
from tpufleet.providers.tpu_vm.server_vm import PRIVATE_RANGES

REACH_SECONDS = 10.0
# Of the TPU runtime, of JAX's coordinator (agent/metadata.py), and of multislice jobs
# (cloud.google.com/tpu/docs/multislice-introduction).
GANG_PORTS = (8471, 8476, 8080)
DEPLOY = "tpu deploy server"  # also builds the bundle


def check_server_url(url: str, server: str, ca_file: str, emulated: bool) -> Check:
    """Whether hosts can reach the server at `url`, its `public_url`. From here only the address
    itself can be tried; of a `server` that runs elsewhere, the one for clients."""
    name = "public_url"
    if server and not url:
        return _answers("server", server, ca_file, DEPLOY)
    if emulated:
        return skipped(name, "emulated hosts run on this machine")
    fix = "set `public_url: https://HOST:PORT` in the config file, an address that TPU hosts reach"
    parts = urlsplit(url)
    if not url or not parts.hostname:
        message = "not set: TPU hosts have no server to connect to"
        return failed(name, message, f"{DEPLOY}; or {fix}")
    try:
        found = {info[4][0] for info in socket.getaddrinfo(parts.hostname, None)}
    except OSError as error:
        return failed(name, f"{parts.hostname}: {error}", fix)
    addresses = [ipaddress.ip_address(address) for address in found]
    if any(address.is_loopback for address in addresses):
        return failed(name, f"{url} is this machine only", fix)
    answers = _answers(name, url, ca_file, "tpu serve")
    if answers.status is CheckStatus.OK and any(address.is_private for address in addresses):
        message = f"{url} responds; its address is private: hosts must be in the same VPC network"
        return warning(name, message)
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
        return failed(name, f"{url}: {reason}", fix)
    return ok(name, f"{url} responds")


def check_firewall(rest: GoogleRest, project: str, network: str, url: str) -> Check | None:
    """Whether a rule of the VPC lets hosts connect to a server with a private address, on the port
    of `url`. None for other servers: rules of other networks are not known. Rules that deny, and
    targets of rules, are not considered."""
    parts = urlsplit(url)
    try:
        address = ipaddress.ip_address(parts.hostname or "")
    except ValueError:
        return None
    if not any(address in ipaddress.ip_network(each) for each in PRIVATE_RANGES):
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    rules = _rules(rest, project, network, "firewall")
    if isinstance(rules, Check):
        return rules
    for rule in rules:
        if _allows(rule, port):
            return ok("firewall", f"{rule.get('name')} lets hosts connect to TCP {port}")
    return failed(
        "firewall",
        f"no rule of network {network} lets hosts connect to TCP {port}",
        _new_rule("tpufleet-server", f"tcp:{port}", network, project),
    )


def check_gangs(rest: GoogleRest, project: str, network: str) -> Check:
    """Whether hosts of one slice, and of several, can reach each other. A warning only: Google adds
    a rule of its own to some networks when it creates the first slice of several hosts."""
    name, ports = "firewall between hosts", "/".join(map(str, GANG_PORTS))
    rules = _rules(rest, project, network, name)
    if isinstance(rules, Check):
        return rules
    if all(any(_allows(rule, port) for rule in rules) for port in GANG_PORTS):
        return ok(name, f"hosts of a slice reach each other on {ports}")
    return warning(
        name,
        f"no rule of network {network} lets hosts reach each other on TCP {ports}: "
        "slices of several hosts may hang when JAX starts",
        _new_rule("tpufleet-hosts", "tcp,udp,icmp", network, project),
    )


def _rules(
    rest: GoogleRest, project: str, network: str, name: str
) -> Sequence[Mapping[str, Any]] | Check:
    answer = rest.get("compute", f"compute/v1/projects/{project}/global/firewalls")
    if answer.status != 200:
        return unknown(project, name, answer)
    rules = answer.body.get("items", ())
    return [rule for rule in rules if str(rule.get("network", "")).endswith(f"/{network}")]


def _new_rule(name: str, allowed: str, network: str, project: str) -> str:
    return (
        f"gcloud compute firewall-rules create {name} --network {network} --allow {allowed} "
        f"--source-ranges 10.0.0.0/8 --project {project}"
    )


def _allows(rule: Mapping[str, Any], port: int) -> bool:
    """From addresses of the VPC, by Compute Engine's resource `firewalls`."""
    sources = [ipaddress.ip_network(each) for each in rule.get("sourceRanges", ())]
    vpc = ipaddress.ip_network("10.0.0.0/8")
    from_vpc = any(each.version == 4 and each.overlaps(vpc) for each in sources)
    incoming = rule.get("direction", "INGRESS") == "INGRESS" and not rule.get("disabled")
    return (
        incoming
        and from_vpc
        and any(
            entry.get("IPProtocol") in ("tcp", "all") and _covers(entry.get("ports"), port)
            for entry in rule.get("allowed", ())
        )
    )


def _covers(ports: list[str] | None, port: int) -> bool:
    """`8470` or `8000-9000`; none: all."""
    if not ports:
        return True
    ranges = [each.split("-") for each in ports]
    return any(int(each[0]) <= port <= int(each[-1]) for each in ranges)
