"""How clients and agents reach a server: trusted certificates, and the proxy on the way."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from tpufleet.errors import unreadable

if TYPE_CHECKING:
    import ssl


def verification(
    url: str,
    ca_file: str | PathLike[str] | None = None,
    ca_certificates: str = "",
    certificate: Path | None = None,
) -> ssl.SSLContext | bool:
    """For httpx. Loading certificates takes longer than a call, and plain HTTP needs none.

    `ca_certificates`: CAs in PEM, besides those of the file and the system's. `certificate`: that
    of the server itself, on this machine; then it is the only one that is trusted, whatever names
    it has."""
    if _scheme(url) == "http":
        return False
    if certificate is not None:
        return _only(certificate)
    if ca_file is None and not ca_certificates:
        return True
    import ssl

    context = ssl.create_default_context()
    try:
        if ca_file is not None:
            context.load_verify_locations(cafile=ca_file)
        if ca_certificates:
            context.load_verify_locations(cadata=ca_certificates)
    except (OSError, ssl.SSLError, ValueError) as error:
        where = ca_file if ca_file is not None else "that of the server"
        raise unreadable(where, error, "ca_file") from error
    return context


def _scheme(url: str) -> str:
    """In lower case: "HTTPS://" is encrypted too."""
    return urlsplit(url).scheme


def _only(certificate: Path) -> ssl.SSLContext:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    try:
        # The first one of a chain is the server's; the others could vouch for other servers.
        own, mark, _ = certificate.read_text().partition("-----END CERTIFICATE-----")
        context.load_verify_locations(cadata=own + mark)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise unreadable(certificate, error) from error
    return context


def is_untrusted(error: BaseException | None) -> bool:
    """Whether a connection failed because the server's certificate was rejected."""
    import ssl

    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None


def proxy_for(url: str, environ: Mapping[str, str]) -> str | None:
    """The proxy of `HTTPS_PROXY`, unless `NO_PROXY` excludes the host. Only for https: a proxy then
    forwards an encrypted connection, and never sees a token."""
    # Not in typeshed.
    from urllib.request import proxy_bypass_environment  # type: ignore[attr-defined]

    proxy = environ.get("HTTPS_PROXY") or environ.get("https_proxy")
    if not proxy or _scheme(url) == "http":
        return None
    excluded = environ.get("NO_PROXY") or environ.get("no_proxy") or ""
    host = urlsplit(url).hostname or ""
    if proxy_bypass_environment(host, {"no": excluded}):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"
