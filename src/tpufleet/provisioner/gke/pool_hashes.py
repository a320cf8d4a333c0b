"""Hashes of node pool requests, to detect that a pod requires a different pool. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH_PREFIX = "v2-"  # upstream's hashes have no prefix, and cover fewer fields
_SAFE = "bcdfghjklmnpqrstvwxz2456789"  # Kubernetes' rand.SafeEncodeString alphabet


def pool_hash(request: Mapping[str, Any], locations: object) -> str:
    """Of everything in the request except the chosen location."""
    fixed = {key: value for key, value in request.items() if key not in ("name", "locations")}
    # The capacity kind is part of the location, and the spot taint follows from it.
    location_fields = ("spot", "flexStart", "taints")
    config = {key: value for key, value in request["config"].items() if key not in location_fields}
    text = json.dumps([fixed | {"config": config}, locations], sort_keys=True, default=str)
    return HASH_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]


def legacy_hash(request: Mapping[str, Any]) -> str:
    """As upstream writes it: FNV-32a of the JSON that Go produces."""
    config = request["config"]
    kept = {
        key: config[key]
        for key in ("labels", "machineType", "reservationAffinity", "spot")
        if config.get(key)
    }
    if "labels" in kept:
        kept["labels"] = dict(sorted(kept["labels"].items()))
    text = json.dumps({"config": kept}, separators=(",", ":"))
    value = 2166136261
    for byte in text.encode():
        value = ((value ^ byte) * 16777619) & 0xFFFFFFFF
    return "".join(_SAFE[byte % len(_SAFE)] for byte in str(value).encode())


def hash_matches(written: str | None, current: str, legacy: str) -> bool:
    """A pool without a hash predates hashes and is accepted as it is."""
    if not written:
        return True
    return written == (current if written.startswith(HASH_PREFIX) else legacy)
