"""The bill of materials of an image (CycloneDX JSON), read from its layers: Debian packages and
Python packages, as they are installed.

The format: https://cyclonedx.org/docs/1.5/json/
"""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from email.parser import HeaderParser
from typing import Any

from tpufleet_testbed.kubernetes.image.oci import Image

Json = dict[str, Any]

DPKG_STATUS = "var/lib/dpkg/status"
_METADATA = re.compile(r".*/site-packages/[^/]+\.dist-info/METADATA")


def bill_of_materials(image: Image) -> Json:
    found: dict[str, Json] = {}
    for layer in image.layers:
        with tarfile.open(layer.path) as archive:
            for member in archive:
                name = member.name.removeprefix("./").lstrip("/")
                if not member.isfile() or not (name == DPKG_STATUS or _METADATA.fullmatch(name)):
                    continue
                content = archive.extractfile(member)
                assert content is not None  # a regular file has one
                text = content.read().decode(errors="replace")
                packages = _debian(text) if name == DPKG_STATUS else _python(text)
                found |= {package["purl"]: package for package in packages}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {
            "component": {"type": "container", "name": image.name, "version": image.reference}
        },
        "components": [found[purl] for purl in sorted(found)],
    }


def _debian(status: str) -> Iterator[Json]:
    for paragraph in status.split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if "installed" in str(fields["Status"]).split():
            name, version = fields["Package"], fields["Version"]
            purl = f"pkg:deb/debian/{name}@{version}?arch={fields['Architecture']}"
            yield {"type": "library", "name": name, "version": version, "purl": purl}


def _python(metadata: str) -> Iterator[Json]:
    fields = HeaderParser().parsestr(metadata)
    name = re.sub(r"[-_.]+", "-", fields["Name"]).lower()
    version = fields["Version"]
    purl = f"pkg:pypi/{name}@{version}"
    yield {"type": "library", "name": name, "version": version, "purl": purl}
