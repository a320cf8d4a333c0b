"""What the user's preferences mean on the command line of `tpu run`."""

from __future__ import annotations

from pathlib import Path

from tpufleet.errors import BadInput, Unreachable
from tpufleet.model import topology
from tpufleet.model.preferences import Preferences
from tpufleet.views.cli import connection
from tpufleet.views.cli.preferences import find_folder

_PATH_PREFIX = "config"


def resolve(
    accelerator: str, command: tuple[str, ...], config_values: tuple[str, ...], folder: str | None
) -> tuple[str, tuple[str, ...], Path | None]:
    """The TPU type, the command and the folder that are meant. The server is asked only where an
    alias may be involved."""
    known_type = _is_type(accelerator)
    if known_type and not config_values and folder is None:
        return accelerator, command, None
    # A mistyped type must not start a server; aliases of a server that is stopped are not known.
    needs_preferences = bool(config_values) or folder is not None
    try:
        with connection.connect(start=needs_preferences) as client:
            preferences = client.preferences()
    except Unreachable:
        if needs_preferences:
            raise
        return accelerator, command, None
    if not known_type:
        accelerator = preferences.tpu_aliases.get(accelerator, accelerator)
    arguments = tuple(config_argument(preferences, pair) for pair in config_values)
    workdir = Path(find_folder(preferences, folder)) if folder is not None else None
    return accelerator, (*command, *arguments), workdir


def config_argument(preferences: Preferences, pair: str) -> str:
    """`lr=0.1` → `--config.training.learning_rate=0.1`. Everything after the first `=` is value."""
    key, equals, value = pair.partition("=")
    path = preferences.all_config_aliases.get(key, key)
    if not equals or not path.startswith(_PATH_PREFIX):
        known = ", ".join(sorted(preferences.all_config_aliases))
        raise BadInput(
            f"--config {pair}: write KEY=VALUE, where KEY is a path that starts with config, or "
            f"one of {known}; `tpu alias set {key or 'NAME'} PATH` adds one"
        )
    return f"--{path}={value}"


def _is_type(text: str) -> bool:
    try:
        topology.find(text)
    except BadInput:
        return False
    return True
