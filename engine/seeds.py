"""Seeds by derivation: equal parts give equal seeds on every machine, in every process."""

from __future__ import annotations

import hashlib

import msgspec


def derive_seed(*parts: str | int | bytes) -> int:
    """A seed in [0, 2^62) from what it belongs to: never from names of files or from time."""
    return int.from_bytes(hashlib.sha256(msgspec.msgpack.encode(parts)).digest()[:8], "little") >> 2
