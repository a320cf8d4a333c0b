"""From the text of cluster.yaml to an Environment; all errors of a file at once."""

from __future__ import annotations

from typing import Any

import yaml

from tpufleet.errors import BadInput
from tpufleet.model.values.field_types import ParseErrors
from tpufleet_gke.environment.config import checks
from tpufleet_gke.environment.config.field_kinds import schema_of
from tpufleet_gke.environment.config.sections import ENVIRONMENT, Environment


def parse(document: Any, source: str = "cluster.yaml") -> Environment:
    """BadInput with one line per error: file, path, what is wrong, nearest valid value."""
    errors = ParseErrors()
    environment = ENVIRONMENT.parse(errors, "", document)
    if environment is not None:
        checks.check(environment, errors)
    if errors.lines:
        raise BadInput("\n".join(f"{source}: {line.removeprefix(': ')}" for line in errors.lines))
    parsed: Environment = environment
    return parsed


def parse_text(text: str, source: str = "cluster.yaml") -> Environment:
    try:
        document = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        reason = problem or str(error).partition("\n")[0]
        raise BadInput(f"{source}: {line}not YAML: {reason}") from error
    if not isinstance(document, dict):
        raise BadInput(f"{source}: must be a mapping; `tpu cluster init` writes one")
    return parse(document, source)


def json_schema() -> dict[str, Any]:
    return dict(schema_of(ENVIRONMENT))
