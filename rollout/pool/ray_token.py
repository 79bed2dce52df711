"""The token of a Ray cluster, through Ray's own variables. Must be set before ray is imported."""

from __future__ import annotations

import os
from pathlib import Path


def show_token() -> str:
    """Have Ray present this host's token, if it has one; returns a sentence about it.

    Ray reads RAY_AUTH_MODE when imported. A cluster without tokens ignores it.
    """
    is_there, sentence = token_here()
    if is_there:
        os.environ["RAY_AUTH_MODE"] = "token"
    return sentence


def token_here() -> tuple[bool, str]:
    """(True if this host has a token to present, a sentence about it)."""
    mode = os.environ.get("RAY_AUTH_MODE", "token")
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or "~/.ray/auth_token").expanduser()
    copy = "copy ~/.ray/auth_token of the host that started the cluster there, or name its place in RAY_AUTH_TOKEN_PATH"
    if mode.lower() != "token":
        return False, f"RAY_AUTH_MODE={mode} shows none, and a cluster may demand it: set RAY_AUTH_MODE=token"
    if "RAY_AUTH_TOKEN" in os.environ:
        return True, f"the one of RAY_AUTH_TOKEN is shown; where it is another cluster's, {copy}"
    if path.is_file():
        return True, f"the one in {path} is shown; where it is another cluster's, {copy}"
    return False, f"this host has none ({path}), and a cluster may demand it: {copy}"
