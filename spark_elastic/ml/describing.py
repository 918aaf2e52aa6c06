"""What a setting is, in words that are the same in another process: to tell a training from another one."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from types import CodeType
from typing import Any

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")


def described(value: Any) -> str:
    """Classes by name, functions by name and code with what they have captured, everything else by its repr."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(described, value))}]"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return f"partial({described(value.func)}, {described(value.args)}, {_ADDRESS.sub('', repr(value.keywords))})"
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        cells = [described(cell.cell_contents) for cell in value.__closure__ or ()]
        return f"{value.__qualname__} {digest([_code(code), cells, repr(value.__defaults__)])}"
    text = _ADDRESS.sub("", repr(value))
    # What the repr of a loss leaves out: label smoothing, reduction, ...
    attributes = {name: each for name, each in sorted(getattr(value, "__dict__", {}).items()) if _tells(name, each)}
    return f"{text} {attributes}" if attributes else text


def _tells(name: str, value: Any) -> bool:
    return name != "training" and not name.startswith("_") and isinstance(value, (bool, int, float, str))


def digest(value: Any) -> str:
    """8 hexadecimal digits of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _code(code: CodeType) -> list[Any]:
    constants = [_code(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]
