"""Certificates of servers in tests."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

VALID = timedelta(days=2)  # before and after now: clocks of servers and hosts may be set


class Certificate(NamedTuple):
    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "IP:127.0.0.1") -> Certificate:
    """Signed by itself, for an address (`IP:…`) or a host (`DNS:…`)."""
    certificate = Certificate(folder / "cert.pem", folder / "key.pem")
    kind, _, value = name.partition(":")
    of_server = x509.IPAddress(ipaddress.ip_address(value)) if kind == "IP" else x509.DNSName(value)
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "fleet")])
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - VALID)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([of_server]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    certificate.cert.write_bytes(signed.public_bytes(Encoding.PEM))
    certificate.key.write_bytes(
        key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    )
    certificate.key.chmod(0o600)
    return certificate
