"""Certificates of servers in tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest


class Certificate(NamedTuple):
    cert: Path
    key: Path


def make_certificate(folder: Path, name: str = "IP:127.0.0.1") -> Certificate:
    if shutil.which("openssl") is None:
        pytest.skip("no openssl program to make a certificate with")
    certificate = Certificate(folder / "cert.pem", folder / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
         "-nodes", "-days", "2", "-subj", "/CN=fleet", "-addext", f"subjectAltName={name}",
         "-keyout", str(certificate.key), "-out", str(certificate.cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    certificate.key.chmod(0o600)
    return certificate
