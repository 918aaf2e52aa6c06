"""JSON documents with a checksum of their own, so that a changed one is never taken for what was written."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"
"""The field that holds it: CRC-32 of all others, as `json.dumps` writes them with sorted keys and no spaces."""


def dumps(document: Mapping[str, Any]) -> bytes:
    """Encode a document of plain values, with its checksum as its last field."""
    plain = json.loads(json.dumps(dict(document)))  # tuples and keys as they will be read
    return json.dumps({**plain, CHECKSUM: _checksum(plain)}, indent=1).encode()


def loads(text: bytes, known: frozenset[str]) -> dict[str, Any]:
    """Decode a document, without its checksum.

    Args:
        known: fields that it may have. One without a checksum, of an earlier version, is taken as it is; but not one
            whose checksum has lost its name.
    Raises: ValueError: not JSON, no object, or not what was written.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(document, dict):
        raise ValueError(f"not JSON of an object, but of a {type(document).__name__}")
    if CHECKSUM in document:
        expected = document.pop(CHECKSUM)
        found = _checksum(document)
        if found != expected:
            raise ValueError(f"its fields have the checksum {found}, and {CHECKSUM} says {expected!r:.40}")
    if unknown := sorted(document.keys() - known):
        raise ValueError(f"it has a field {unknown[0]!r:.40}, which this version does not know")
    return document


def _checksum(document: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(document, sort_keys=True, separators=(",", ":")).encode())
