"""Root file systems in folders: made from Debian's packages, and commands run inside of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tpufleet.errors import FleetError, Permanent

RELEASES = {"11": "bullseye", "12": "bookworm", "13": "trixie"}
DEBIAN = re.compile(r"(?:docker\.io/library/)?debian:(\d+)[.0-9]*(?:-slim)?")
MIRROR, SECURITY = "http://deb.debian.org/debian", "http://deb.debian.org/debian-security"
TRUST = "etc/ssl/certs/ca-certificates.crt"
PROXIES = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
# Left out as in Debian's own slim images.
UNWANTED = ("doc", "groff", "info", "linda", "lintian", "locale", "man")
# Mounts are made in a namespace of their own, so that none outlives the command. The machine's
# resolver and certificates are lent for as long as it runs.
SCRIPT = """
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
    """The image cannot be built on this machine as things are."""


def check_requirements() -> None:
    """What building without an engine needs, told before minutes are spent."""
    if os.name != "posix" or os.uname().sysname != "Linux" or os.geteuid() != 0:
        raise ImageBuildError("building an image without an engine needs Linux and root")
    for program in ("debootstrap", "unshare", "chroot"):
        if shutil.which(program) is None:
            raise ImageBuildError(f"{program} is not here; `apt-get install {program}`")


def bootstrap_debian(image: str, root: Path, moment: int) -> None:
    """What the image `debian:12-slim` holds, from the packages of the same release."""
    match = DEBIAN.fullmatch(image)
    if match is None or match[1] not in RELEASES:
        raise ImageBuildError(f"{image}: only Debian's own images can be made from packages")
    release = RELEASES[match[1]]
    argv = ["debootstrap", "--variant=minbase", release, str(root), MIRROR]
    done = subprocess.run(
        argv, capture_output=True, text=True, check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": str(moment), "LC_ALL": "C"},
    )  # fmt: skip
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise ImageBuildError(f"debootstrap {release} failed:\n{said}")
    (root / "etc" / "apt" / "sources.list").write_text(
        f"deb {MIRROR} {release} main\ndeb {MIRROR} {release}-updates main\n"
        f"deb {SECURITY} {release}-security main\n"
    )
    excluded = "".join(f"path-exclude /usr/share/{name}/*\n" for name in UNWANTED)
    (root / "etc" / "dpkg" / "dpkg.cfg.d" / "slim").write_text(excluded)
    for name in UNWANTED:
        shutil.rmtree(root / "usr" / "share" / name, ignore_errors=True)
    for archive in (root / "var" / "cache" / "apt" / "archives").glob("*.deb"):
        archive.unlink()


def run_in_chroot(root: Path, command: str, environment: Mapping[str, str]) -> None:
    """A RUN. CannotBuildImage with its last words when it fails."""
    resolver = root / "etc" / "resolv.conf"
    resolver.touch()
    lent = {"PIP_CERT": f"/{TRUST}"} if (root / TRUST).exists() else {}
    done = subprocess.run(
        [
            "unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child",
            "--", "/bin/sh", "-euc", SCRIPT, "run", str(root), command,
        ],
        env={
            "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
            "HOME": "/root", "LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive",
            "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_ROOT_USER_ACTION": "ignore",
            **{name: os.environ[name] for name in PROXIES if name in os.environ},
            **lent, **environment,
        },
        stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False,
    )  # fmt: skip
    resolver.write_text("")
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-2000:]
        raise ImageBuildError(f"RUN {command} failed:\n{said}")
