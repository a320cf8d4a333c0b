"""Root file systems in folders: bootstrap from Debian packages, and commands in a chroot."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tpufleet.errors import FleetError, Permanent
from tpufleet_testbed.kubernetes import programs

RELEASES = {"11": "bullseye", "12": "bookworm", "13": "trixie"}
DEBIAN = re.compile(r"(?:docker\.io/library/)?debian:(\d+)[.0-9]*(?:-slim)?")
MIRROR, SECURITY = "http://deb.debian.org/debian", "http://deb.debian.org/debian-security"
CA_BUNDLE = "etc/ssl/certs/ca-certificates.crt"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
REQUIRED_PROGRAMS = {"debootstrap": "debootstrap", "unshare": "util-linux", "chroot": "coreutils"}
# Excluded as in the official slim images.
EXCLUDED_DOCS = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
# Runs in its own mount namespace, so that no mount outlives the command. The host's resolver and
# certificates are bind-mounted while it runs.
CHROOT_SCRIPT = """
root=$1 command=$2
mount --bind "$root" "$root"
mount -t proc proc "$root/proc"
mount -t tmpfs tmpfs "$root/tmp"
mount --bind /etc/resolv.conf "$root/etc/resolv.conf"
if [ -s /etc/ssl/certs/ca-certificates.crt ] && [ -s "$root/etc/ssl/certs/ca-certificates.crt" ]
then mount --bind /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/ca-certificates.crt"
fi
exec chroot "$root" /bin/sh -euc "$command"
"""


class ImageBuildError(FleetError, Permanent):
    """The image cannot be built on this machine."""


def check_requirements() -> None:
    """Fail before minutes are spent on a build that cannot finish."""
    missing = programs.missing_packages(REQUIRED_PROGRAMS)
    purpose = "building an image without a container engine"
    if reason := programs.unsupported_reason(purpose, missing):
        raise ImageBuildError(reason)


def bootstrap_debian(image: str, root: Path, mtime: int) -> None:
    """The content of an image such as `debian:12-slim`, from the packages of the same release."""
    match = DEBIAN.fullmatch(image)
    if match is None or match[1] not in RELEASES:
        raise ImageBuildError(
            f"unsupported base image {image}; use an official Debian image, such as debian:12-slim"
        )
    release = RELEASES[match[1]]
    argv = ["debootstrap", "--variant=minbase", release, root, MIRROR]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": str(mtime), "LC_ALL": "C"}
    programs.run(f"debootstrap {release}", argv, ImageBuildError, env=environ)
    (root / "etc" / "apt" / "sources.list").write_text(
        f"deb {MIRROR} {release} main\ndeb {MIRROR} {release}-updates main\n"
        f"deb {SECURITY} {release}-security main\n"
    )
    excluded = "".join(f"path-exclude /usr/share/{name}/*\n" for name in EXCLUDED_DOCS)
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text(excluded)
    for name in EXCLUDED_DOCS:
        shutil.rmtree(root / "usr" / "share" / name, ignore_errors=True)
    for archive in (root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
        archive.unlink()


def run_in_chroot(root: Path, command: str, environment: Mapping[str, str]) -> None:
    """A RUN instruction. ImageBuildError with the end of its output if it fails."""
    resolver = root / "etc" / "resolv.conf"
    resolver.touch()
    certificate = {"PIP_CERT": f"/{CA_BUNDLE}"} if (root / CA_BUNDLE).exists() else {}
    programs.run(
        f"RUN {command}",
        [
            "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
            "--", "/bin/sh", "-euc", CHROOT_SCRIPT, "run", root, command,
        ],
        ImageBuildError,
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
            **{name: os.environ[name] for name in PROXIES if name in os.environ},
            **certificate, **environment,
        },
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    resolver.write_text("")
