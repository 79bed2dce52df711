"""The token of a Ray cluster, through Ray's own variables. Must be set before ray is imported."""

from __future__ import annotations

import os
from pathlib import Path


def show_token() -> tuple[bool, str]:
    """Have Ray present this host's token; (True if it has one to present, a sentence about it).

    Ray reads RAY_AUTH_MODE when imported. A cluster without tokens ignores it.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    copy = "copy ~/.ray/auth_token of the host that started the cluster there, or name its place in RAY_AUTH_TOKEN_PATH"
    if mode.lower() != "token":
        return False, f"RAY_AUTH_MODE={mode} shows none, and a cluster may demand it: set RAY_AUTH_MODE=token"
    has_variable = "RAY_AUTH_TOKEN" in os.environ
    if not has_variable and not path.is_file():
        return False, f"this host has none ({path}), and a cluster may demand it: {copy}"
    os.environ["RAY_AUTH_MODE"] = "token"
    source = "RAY_AUTH_TOKEN" if has_variable else path
    return True, f"the one of {source} is shown; where it is another cluster's, {copy}"
