"""Preferences of a user, kept on the server: settings, aliases, numbered folders, views.

Keys and meanings follow the `tpu` job manager that this program replaces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import tzinfo
from typing import Any
from zoneinfo import ZoneInfo

import msgspec

from tpufleet import schema
from tpufleet.errors import BadInput, invalid, must_be, unknown

SettingValue = bool | int | str
LOCAL_ZONE = "local"
MAX_ENTRIES = 1000  # of each kind
# Of entries: their names, and their values.
_NAME = schema.text(
    "name",
    r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}",
    example="lr",
    rule="letters, digits, _ . and -, at most 64",
)
_FOLDER_NUMBER = schema.text("folder", r"[1-9][0-9]?|100", example="1", rule="from 1 to 100")
_TEXT = schema.text("text", r"[^\0]{1,1000}", example="v5e-16", rule="1 to 1000 characters")
_VALUES = {
    "folders": schema.text("absolute path", r"/[^\0]{0,999}", example="/home/ada/project"),
    "config_aliases": schema.text("path", r"[\w.-]{1,1000}", example="config.training.lr"),
}
_ZONES = {"us": "America/New_York", "cn": "Asia/Shanghai"}


class Setting(msgspec.Struct, frozen=True):
    default: SettingValue
    description: str
    least: int = 0
    most: int = 0


SETTINGS: dict[str, Setting] = {
    "monitor_after_run": Setting(
        True, "`tpu run`, `resume` and `rerun` follow the job; false: as with --detach."
    ),
    "monitor_upd_time": Setting(5, "Seconds between two updates of `tpu jobs --watch`.", 1, 3600),
    "monitor_length": Setting(
        800, "Characters of the newest output in `tpu jobs --verbose`.", 0, 100_000
    ),
    "monitor_dir": Setting(True, "`tpu jobs --verbose` shows the folder of each job."),
    "monitor_tpu": Setting(True, "`tpu jobs` shows the TYPE column."),
    "monitor_verbose": Setting(False, "`tpu jobs --watch` is verbose."),
    "show_length": Setting(200, "Characters of a reason in `tpu jobs`.", 20, 10_000),
    "time_zone": Setting(
        LOCAL_ZONE, "Time zone of times that are shown: local, us, cn, or a name such as "
        "Europe/Berlin.",
    ),
}  # fmt: skip
DEFAULT_CONFIG_ALIASES: dict[str, str] = {
    "lr": "config.training.learning_rate",
    "bs": "config.training.batch_size",
    "ep": "config.training.num_epochs",
    "wd": "config.training.weight_decay",
    "b1": "config.training.adam_b1",
    "b2": "config.training.adam_b2",
    "ckpt": "config.training.checkpoint_per_epoch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preferences:
    owner: str
    settings: dict[str, SettingValue] = field(default_factory=dict)  # those that were set
    config_aliases: dict[str, str] = field(default_factory=dict)  # besides the default ones
    tpu_aliases: dict[str, str] = field(default_factory=dict)  # name → TPU type or pool
    folders: dict[str, str] = field(default_factory=dict)  # "1" to "100" → path
    views: dict[str, str] = field(default_factory=dict)  # name → query

    def setting(self, key: str) -> SettingValue:
        return self.settings.get(key, SETTINGS[key].default)

    @property
    def all_config_aliases(self) -> dict[str, str]:
        merged = {**DEFAULT_CONFIG_ALIASES, **self.config_aliases}
        return {name: path for name, path in merged.items() if path}


class PreferenceChanges(msgspec.Struct, frozen=True, kw_only=True):
    """Entries to set; None removes one."""

    settings: dict[str, SettingValue | None] = {}
    config_aliases: dict[str, str | None] = {}
    tpu_aliases: dict[str, str | None] = {}
    folders: dict[str, str | None] = {}
    views: dict[str, str | None] = {}
    reset_settings: bool = False  # before the others


def apply_changes(before: Preferences, changes: PreferenceChanges) -> Preferences:
    """BadInput names the entry and what is allowed."""
    settings = {} if changes.reset_settings else before.settings
    for key, value in changes.settings.items():
        settings = _merged(settings, {key: None if value is None else parse_setting(key, value)})
    kinds = ("config_aliases", "tpu_aliases", "folders", "views")
    merged = {}
    for kind in kinds:
        entries: Mapping[str, str | None] = getattr(changes, kind)
        for name, value in entries.items():
            _check_entry(kind, name, value)
        if kind == "config_aliases":  # an empty path hides a default alias
            entries = {
                name: "" if value is None and name in DEFAULT_CONFIG_ALIASES else value
                for name, value in entries.items()
            }
        merged[kind] = _merged(getattr(before, kind), entries)
        if len(merged[kind]) > MAX_ENTRIES:
            raise BadInput(f"{kind}: more than {MAX_ENTRIES} entries")
    return Preferences(owner=before.owner, settings=settings, **merged)


def _merged(before: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = {**before, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def _check_entry(kind: str, name: str, value: str | None) -> None:
    schema.check(_FOLDER_NUMBER if kind == "folders" else _NAME, name)
    if value is not None:
        schema.check(_VALUES.get(kind, _TEXT), value)


def parse_setting(key: str, value: SettingValue) -> SettingValue:
    """The value in the type of the setting; text is converted."""
    setting = SETTINGS.get(key)
    if setting is None:
        raise unknown("setting", key, SETTINGS)
    text = str(value).strip()
    if isinstance(setting.default, bool):
        if text.lower() in ("true", "false", "1", "0", "yes", "no"):
            return text.lower() in ("true", "1", "yes")
        expected = "true or false"
    elif isinstance(setting.default, int):
        if re.fullmatch(r"[0-9]{1,9}", text) and setting.least <= int(text) <= setting.most:
            return int(text)
        expected = f"from {setting.least} to {setting.most}"
    else:
        find_zone(text)
        return text
    raise must_be(expected, text, key)


def find_zone(name: str) -> tzinfo | None:
    """None: the zone of the machine that shows the time."""
    if name == LOCAL_ZONE:
        return None
    try:
        return ZoneInfo(_ZONES.get(name, name))
    except (ValueError, OSError, KeyError) as error:
        example = "local, us, cn or Europe/Berlin"
        raise invalid(name, "a time zone", example, "time_zone") from error
