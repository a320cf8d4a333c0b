"""From the text of cluster.yaml to an Environment; all errors of a file at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

from tpufleet import schema
from tpufleet.errors import BadInput, InvalidSettings, not_yaml, quote
from tpufleet.model.values import unique_keys
from tpufleet.schema import Problem
from tpufleet_gke.environment.config import checks
from tpufleet_gke.environment.config.sections import Environment

TITLE = "tpufleet GKE environment (cluster.yaml)"


def parse(document: Any, source: str = "cluster.yaml") -> Environment:
    """InvalidSettings with one line per error: file, path, what is wrong, nearest valid value."""
    try:
        environment = schema.parse(Environment, _without_empty_entries(document))
        problems = [*_templates(document), *checks.check(environment)]
        if problems:
            raise InvalidSettings(problems)
    except InvalidSettings as error:
        lines = [(f"{source}: {path}", problem) for path, problem in error.errors]
        raise InvalidSettings(lines) from None
    return environment


def parse_text(text: str, source: str = "cluster.yaml") -> Environment:
    try:
        document, duplicates = unique_keys.load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        raise not_yaml(source, line, problem or error) from error
    if duplicates:
        lines = [
            (f"{source}:{line}", f"duplicate key {key}; remove one") for line, key in duplicates
        ]
        raise InvalidSettings(lines)
    if not isinstance(document, dict):
        raise BadInput(f"{source}: must be a mapping; `tpu cluster init` writes one")
    return parse(document, source)


def json_schema() -> dict[str, Any]:
    return schema.json_schema(Environment, TITLE)


def _templates(value: Any, path: str = "") -> Iterator[Problem]:
    """Texts that Terraform would evaluate."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _templates(item, f"{path}.{key}".strip("."))
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from _templates(item, f"{path}[{index}]")
    if isinstance(value, str) and ("${" in value or "%{" in value):
        yield (
            path,
            f"Terraform would evaluate {quote(value)}; write it without ${{ and %{{",
        )


def _without_empty_entries(document: Any) -> Any:
    """`teams: {training: }` is a team of defaults."""
    if not isinstance(document, dict):
        return document
    return {
        name: {key: {} if item is None else item for key, item in value.items()}
        if isinstance(value, dict)
        and name in ("cpu_pools", "gpu_pools", "tpu_pools", "buckets", "teams")
        else value
        for name, value in document.items()
    }
