"""Hashes of node pool requests, to recognise a request that was changed. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

HASH_PREFIX = "v2-"  # upstream's hashes have no prefix, and cover fewer fields


def pool_hash(request: Mapping[str, Any], locations: object) -> str:
    """Of everything in the request except the chosen location."""
    fixed = {key: value for key, value in request.items() if key not in ("name", "locations")}
    # The capacity kind is part of the location, and the spot taint follows from it.
    location_fields = ("spot", "flexStart", "taints")
    config = {key: value for key, value in request["config"].items() if key not in location_fields}
    text = json.dumps([fixed | {"config": config}, locations], sort_keys=True, default=str)
    return HASH_PREFIX + hashlib.sha256(text.encode()).hexdigest()[:16]
