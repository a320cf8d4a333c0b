"""What is installed in this Python environment."""

from __future__ import annotations

import re
from importlib.metadata import Distribution, PackageNotFoundError, distribution

_NAME = re.compile(r"[A-Za-z0-9._-]+")


def requirements_of(name: str) -> list[Distribution]:
    """What a distribution requires, and what that requires, as far as it is installed: a
    requirement of another platform is not."""
    found: dict[str, Distribution] = {}
    pending = [distribution(name)]
    while pending:
        for requirement in pending.pop().requires or ():
            match = _NAME.match(requirement)
            if match is None or "extra ==" in requirement or match[0] in found:
                continue
            try:
                found[match[0]] = distribution(match[0])
            except PackageNotFoundError:
                continue
            pending.append(found[match[0]])
    return list(found.values())


def modules(packages: list[Distribution]) -> list[str]:
    """Their top-level modules."""
    firsts = {file.parts[0] for package in packages for file in package.files or ()}
    # A compiled one has the interface of its Python in its name.
    names = {first.partition(".")[0] for first in firsts if not first.endswith(".dist-info")}
    return sorted(name for name in names if name.isidentifier() and name != "__pycache__")
