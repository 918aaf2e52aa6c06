"""Describe a setting in words that are equal in every process, to see whether it decides a training as another does."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from types import CodeType, FunctionType
from typing import Any

from spark_elastic.redaction import redacted

_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
_PLAIN = (bool, int, float, str, type(None))
_DESCRIBED = (*_PLAIN, list, tuple, dict, set, frozenset, type, FunctionType, functools.partial)
_MAX_DEPTH = 6  # deeper than settings are nested; functions that refer to themselves would never end


def described(value: Any, *, buffers: bool = True, depth: int = 0) -> str:
    """Describe a setting: classes by name, functions by name and code, anything else by its repr and attributes."""
    if depth > _MAX_DEPTH:
        return type(value).__qualname__
    inner = functools.partial(described, buffers=buffers, depth=depth + 1)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(inner, value))}]"
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return f"{{{', '.join(sorted(map(inner, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {inner(each)}' for key, each in value.items())}}}"
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, functools.partial):
        return f"partial({inner(value.func)}, {inner(value.args)}, {inner(value.keywords)})"
    code = getattr(value, "__code__", None)
    if isinstance(code, CodeType):
        cells = [inner(cell.cell_contents) for cell in value.__closure__ or ()]
        used = {name: value.__globals__.get(name) for name in code.co_names}
        plain = inner({name: each for name, each in used.items() if isinstance(each, _PLAIN) and each is not None})
        return f"{value.__qualname__} {digest([_code(code), cells, inner(value.__defaults__), plain])}"
    if hasattr(value, "tolist"):  # the repr of an array leaves out its middle
        return f"{type(value).__qualname__} {digest(repr(value.tolist()))}"
    text = redacted(_ADDRESS.sub("", repr(value)))
    attributes = _attributes(value, buffers)
    return f"{text} {inner(attributes)}" if attributes else text


def digest(value: Any, digits: int = 8) -> str:
    """Return hexadecimal digits that identify plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:digits]


def _attributes(value: Any, buffers: bool) -> dict[str, Any]:
    """Return what the repr leaves out: label smoothing, the milestones of a schedule, the patience of a callback."""
    own = getattr(value, "__dict__", {})
    if "param_groups" in own:  # the repr of an optimizer has all but the weights
        return {}
    if "_modules" not in own:
        return {name: own[name] for name in sorted(own) if isinstance(own[name], _DESCRIBED)}
    found = {name: own[name] for name in sorted(own) if name[0] != "_" and isinstance(own[name], _DESCRIBED)}
    found.pop("training", None)
    if buffers:
        found |= {f"buffer {name}": each for name, each in own["_buffers"].items()}
        found |= {f"module {name}": _attributes(each, buffers) for name, each in own["_modules"].items()}
    return found


def _code(code: CodeType) -> list[Any]:
    constants = [_code(each) if isinstance(each, CodeType) else described(each) for each in code.co_consts]
    return [code.co_code.hex(), constants, list(code.co_names)]
