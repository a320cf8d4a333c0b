"""Job files from disk: YAML in, plain mappings out, with `--set` applied."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from tpufleet.errors import BadInput


class _Loader(yaml.SafeLoader):
    """Refuses a key that is there twice, where YAML would quietly keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode) and key_node.tag != "tag:yaml.org,2002:merge":
                if key_node.value in seen:
                    line = key_node.start_mark.line + 1
                    raise BadInput(f"line {line}: {key_node.value} is there twice; take one out")
                seen.add(key_node.value)
        return super().construct_mapping(node, deep)


def read(name: str) -> list[tuple[dict[str, Any], Path]]:
    """Each document of a file (`-`: standard input), with the folder that paths start from."""
    if name == "-":
        return [(plain, Path.cwd()) for plain in documents(sys.stdin.read(), "standard input")]
    path = Path(name)
    try:
        content = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise BadInput(f"{name}: {reason}; name a job file, or - for standard input") from error
    return [(plain, path.resolve().parent) for plain in documents(content, name)]


def documents(content: str, source: str) -> list[dict[str, Any]]:
    try:
        found = [plain for plain in yaml.load_all(content, Loader=_Loader) if plain is not None]
    except BadInput as error:
        raise BadInput(f"{source}: {error}") from error
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise BadInput(f"{source}: {line}{error.problem}; mend the YAML") from error
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        problem = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise BadInput(f"{source}: {problem}; mend the YAML") from error
    if not found:
        raise BadInput(f"{source}: empty; write at least `command: …` and `accelerator: …`")
    for plain in found:
        if not isinstance(plain, dict):
            raise BadInput(f"{source}: each document must be a mapping of fields")
    return found


def with_overrides(plain: dict[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    """`--set env.LR=0.1 --set zones=[a,b]`: a dotted path, and a value written as in YAML."""
    changed = dict(plain)
    for setting in settings:
        path, equals, written = setting.partition("=")
        if not equals or not path:
            raise BadInput(f"--set {setting}: write path=value, such as --set env.LR=0.1")
        *folders, last = path.split(".")
        inner = changed
        for folder in folders:
            kept = inner.get(folder)
            if kept is not None and not isinstance(kept, dict):
                raise BadInput(f"--set {setting}: {folder} is not a mapping; set all of it")
            inner[folder] = inner = dict(kept or {})
        try:
            inner[last] = yaml.load(written, Loader=_Loader)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise BadInput(f"--set {setting}: the value is not YAML; put it in quotes") from error
    return changed
