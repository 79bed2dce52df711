"""Seeds derived from names."""

from __future__ import annotations

import hashlib


def derive_seed(run_seed: int, *path: object) -> int:
    """Derive a 63-bit seed from the run's seed and names alone; advances no shared generator."""
    text = "\x1f".join([str(run_seed), *map(str, path)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
