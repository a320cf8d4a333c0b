"""YAML with libyaml where it is there: rendered manifests have ten thousands of lines, for which
PyYAML's own parser takes seconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import yaml

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def load_all(text: str) -> list[dict[str, Any]]:
    """Without empty documents."""
    return [document for document in yaml.load_all(text, Loader=_LOADER) if document]


def dump_all(documents: Iterable[Any]) -> str:
    return str(yaml.dump_all(documents, Dumper=_DUMPER))
