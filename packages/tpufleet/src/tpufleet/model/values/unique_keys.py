"""YAML whose duplicate keys are errors: YAML would silently keep the last. Slow to import."""

from __future__ import annotations

from typing import Any

import yaml

from tpufleet.errors import BadInput


class Loader(yaml.SafeLoader):
    """Raises BadInput at the first duplicate key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    self.duplicate(key_node.start_mark.line + 1, key_node.value)
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)

    def duplicate(self, line: int, key: str) -> None:
        raise BadInput(f"line {line}: duplicate key {key}; remove one")


class _Collector(Loader):
    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self.duplicates: dict[tuple[int, str], None] = {}

    def duplicate(self, line: int, key: str) -> None:
        self.duplicates[line, key] = None


def load(written: str) -> tuple[Any, list[tuple[int, str]]]:
    """The document, and the line and name of each duplicate key."""
    loader = _Collector(written)
    try:
        return loader.get_single_data(), sorted(loader.duplicates)
    finally:
        loader.dispose()
