"""Which addresses the server may connect to for a user. Users choose the URL, so it must not lead
to the server's own network: loopback, private networks, the metadata server."""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from tpufleet.errors import BadInput, Unreachable
from tpufleet.model.people.notifications import MAX_URL, NotificationRules

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# IPv4 inside IPv6, which a gateway would translate back (RFC 6052).
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# All IPv6 addresses of the internet (IANA IPv6 address space registry). Outside it are site-local,
# unique local and link-local addresses, multicast, and blocks that are not assigned.
_GLOBAL_IPV6 = ipaddress.ip_network("2000::/3")
# Blocks of the IANA special-purpose address registries that `is_global` of some Python versions
# lets through: protocol assignments (RFC 6890), 6to4 relays (RFC 7526), documentation (RFC 9637).
_SPECIAL = tuple(
    ipaddress.ip_network(block)
    for block in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "3fff::/20")
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Destination:
    secure: bool
    host: str
    port: int
    path: str  # with the query


def parse(url: str, rules: NotificationRules) -> Destination:
    """Checks what can be checked without a lookup."""
    if len(url) > MAX_URL or not url.isascii() or any(ord(sign) <= 32 for sign in url):
        raise BadInput("url: must be ASCII without spaces, at most 2000 characters")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadInput(f"url: {error}") from error
    host = (parts.hostname or "").rstrip(".")
    secure = parts.scheme == "https"
    plain = parts.scheme == "http" and _host_allowed(host, rules)
    if not host or not (secure or plain):
        raise BadInput(
            "url: must start with https:// and name a host; an admin can allow plain HTTP to a "
            "host with notifications.allow"
        )
    if parts.username is not None or parts.password is not None:
        raise BadInput("url: must not contain a user name or password")
    literal = _literal(host)
    if literal is not None:
        check_address(literal, host, rules)
    path = parts.path or "/"
    return Destination(
        secure=secure,
        host=host,
        port=port or (443 if secure else 80),
        path=f"{path}?{parts.query}" if parts.query else path,
    )


def resolve(destination: Destination, rules: NotificationRules) -> list[Address]:
    """The addresses to connect to. All must be allowed: which one answers is chance."""
    try:
        found = socket.getaddrinfo(destination.host, destination.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unreachable(f"cannot resolve {destination.host}: {error}") from error
    addresses = list(dict.fromkeys(ipaddress.ip_address(each[4][0]) for each in found))
    for address in addresses:
        check_address(address, destination.host, rules)
    return addresses


def check_address(address: Address, host: str, rules: NotificationRules) -> None:
    plain = embedded(address)
    if _host_allowed(host, rules) or _network_allowed(plain, rules):
        return
    if not is_public(plain):
        raise BadInput(
            f"{host} is not on the public internet ({plain}); an admin can allow it with "
            "notifications.allow"
        )


def is_public(address: Address) -> bool:
    if not address.is_global or address.is_multicast or address.is_reserved:
        return False
    if address.version == 6 and address not in _GLOBAL_IPV6:
        return False
    return not any(address.version == block.version and address in block for block in _SPECIAL)


def embedded(address: Address) -> Address:
    """The IPv4 address that an IPv6 one stands for."""
    if isinstance(address, ipaddress.IPv4Address):
        return address
    if address.ipv4_mapped is not None:
        return address.ipv4_mapped
    if address.sixtofour is not None:
        return address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if address in _NAT64:
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return address


def _literal(host: str) -> Address | None:
    """Also in the spellings that resolvers accept: 127.1, 0x7f000001, 2130706433."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        pass
    try:
        return ipaddress.IPv4Address(socket.inet_aton(host))
    except (OSError, ValueError):
        return None


def _host_allowed(host: str, rules: NotificationRules) -> bool:
    if host.lower() in {each.lower() for each in rules.allow}:
        return True
    literal = _literal(host)
    return literal is not None and _network_allowed(embedded(literal), rules)


def _network_allowed(address: Address, rules: NotificationRules) -> bool:
    for each in rules.allow:
        try:
            network = ipaddress.ip_network(each)
        except ValueError:  # a host name
            continue
        if address.version == network.version and address in network:
            return True
    return False
