"""Certificates of a control plane: one CA, one server certificate, one admin certificate."""

from __future__ import annotations

import shutil
from pathlib import Path

from tpufleet.errors import FleetError, Permanent
from tpufleet_testbed.kubernetes import programs

DAYS = "3650"


class OpensslMissing(FleetError, Permanent):
    """The program that issues the certificates is not installed."""


API_SERVER_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


def write_all_certificates(folder: Path) -> None:
    """All keys and certificates of one control plane."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    create_authority(folder)
    alt_names = [*(f"DNS:{name}" for name in API_SERVER_NAMES), "IP:127.0.0.1", "IP:10.96.0.1"]
    issue_certificate(folder, "server", "/CN=kube-apiserver", alt_names)
    issue_certificate(folder, "admin", "/O=system:masters/CN=admin", ["DNS:admin"])
    _openssl("genrsa", "-out", folder / "sa.key", "2048")
    _openssl("rsa", "-in", folder / "sa.key", "-pubout", "-out", folder / "sa.pub")
    webhooks = folder / "webhooks"
    webhooks.mkdir(mode=0o700)
    shutil.copy(folder / "server.crt", webhooks / "tls.crt")
    shutil.copy(folder / "server.key", webhooks / "tls.key")


def create_authority(folder: Path) -> None:
    _key(folder / "ca.key")
    _openssl(
        "req", "-x509", "-new", "-key", folder / "ca.key", "-subj", "/CN=tpufleet-local",
        "-days", DAYS, "-out", folder / "ca.crt",
    )  # fmt: skip


def issue_certificate(folder: Path, name: str, subject: str, alt_names: list[str]) -> None:
    """Write NAME.key and NAME.crt, signed by the CA in the same folder."""
    key, request, extra = (folder / f"{name}.{end}" for end in ("key", "csr", "ext"))
    _key(key)
    _openssl("req", "-new", "-key", key, "-subj", subject, "-out", request)
    extra.write_text(
        f"subjectAltName={','.join(alt_names)}\nextendedKeyUsage=serverAuth,clientAuth\n"
    )
    _openssl(
        "x509", "-req", "-in", request, "-CA", folder / "ca.crt", "-CAkey", folder / "ca.key",
        "-CAcreateserial", "-days", DAYS, "-extfile", extra, "-out", folder / f"{name}.crt",
    )  # fmt: skip


def _key(path: Path) -> None:
    _openssl("ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", path)
    path.chmod(0o600)


def _openssl(*args: str | Path) -> None:
    missing = programs.missing_packages({"openssl": "openssl"})
    if reason := programs.unsupported_reason("the local control plane", missing, root=False):
        raise OpensslMissing(reason)
    programs.run(f"openssl {args[0]}", ["openssl", *args])
