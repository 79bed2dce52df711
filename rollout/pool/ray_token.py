"""Token of a Ray cluster, through Ray's own variables, which must be set before ray is imported."""

from __future__ import annotations

import os
from pathlib import Path


def show_token() -> tuple[bool, str]:
    """Have Ray present this host's token; return (True if there is one, a sentence about it).

    Ray reads RAY_AUTH_MODE at import. A cluster without tokens ignores the token.
    """
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    copy = "copy ~/.ray/auth_token there from the host that started the cluster, or set RAY_AUTH_TOKEN_PATH to its path"
    if mode.lower() != "token":
        return False, f"RAY_AUTH_MODE={mode} presents none, but the cluster may require one: set RAY_AUTH_MODE=token"
    has_variable = "RAY_AUTH_TOKEN" in os.environ
    if not has_variable and not path.is_file():
        return False, f"this host has none ({path}), but the cluster may require one: {copy}"
    os.environ["RAY_AUTH_MODE"] = "token"
    source = "RAY_AUTH_TOKEN" if has_variable else path
    return True, f"the one of {source} is presented; if it belongs to another cluster, {copy}"
