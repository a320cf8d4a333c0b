"""Options that other distributions add to `tpu extract`: entry-point group
`tpufleet.extract.options`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import click

from tpufleet.entry_points import registered


@dataclass(frozen=True, kw_only=True, slots=True)
class OptionPlugin:
    """Other spellings of options, and options of `plan` that stand for ours."""

    spelling: Callable[[str], str]  # the name that is meant, without its hyphens
    plan_options: Sequence[click.Option]
    apply: Callable[[dict[str, Any]], None]  # replaces those options of `plan` by ours


@cache
def option_plugins() -> tuple[OptionPlugin, ...]:
    return registered("tpufleet.extract.options")


def normalize_option(name: str) -> str:
    for plugin in option_plugins():
        name = plugin.spelling(name)
    return name
