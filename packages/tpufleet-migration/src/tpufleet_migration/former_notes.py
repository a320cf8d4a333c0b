"""Notes of a job from the config file in which the former job manager looked for them, and the
command that a folder runs by default."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

RUN_CONFIG = "configs/remote_run_config.yml"
FINETUNE_CONFIG = "configs/finetune_config.yml"  # if the first one says `finetune: true`


def find_notes(folder: Path) -> tuple[str, str] | None:
    """`wandb_notes` or `logging.wandb_notes` of the program in this folder, and the file."""
    file, config = RUN_CONFIG, _read(folder / RUN_CONFIG)
    if config.get("finetune") is True:
        file, config = FINETUNE_CONFIG, _read(folder / FINETUNE_CONFIG)
    logging = config.get("logging")
    below = logging.get("wandb_notes") if isinstance(logging, dict) else None
    notes = config.get("wandb_notes") or below
    return (notes.strip(), file) if isinstance(notes, str) and notes.strip() else None


def default_command(folder: Path) -> list[str] | None:
    """`command` of the config file, or else its main.py."""
    command = _read(folder / RUN_CONFIG).get("command")
    if isinstance(command, str) and command.strip():
        return shlex.split(command)
    return ["python", "main.py"] if (folder / "main.py").is_file() else None


def _read(file: Path) -> dict[str, Any]:
    """Empty when there is none. What is wrong with it is for the program to say."""
    if not file.is_file():
        return {}
    import yaml

    try:
        config = yaml.safe_load(file.read_text(errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return config if isinstance(config, dict) else {}
