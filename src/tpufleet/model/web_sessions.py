"""Sessions of browsers that are logged in to the web page."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class WebSession:
    id: str
    user: str
    token_id: str  # whose rights it has; revoking that token ends it
    created_at: datetime
    expires_at: datetime
    browser: str = ""  # as it names itself
    address: str = ""  # that it logged in from
