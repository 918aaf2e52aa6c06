"""Redaction: texts and settings without the credentials in them, for all that leaves the process in the clear.

Standard library only, as `errors`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

MARK = "***"
ALL_SECRET = ("storage_options", "env")  # settings each of whose values may be a credential

_NAMES = (
    r"passw(?:or)?d|passphrase|pwd|secret|credentials?|signature|token(?!i[zs]|s(?![a-z]))|jwt"
    r"|(?:access|account|api|private|shared|sas|signing|encryption)[-_.]?key"
)
_SUFFIX = r"(?:[-_.]?id|[-_.]?key)?(?:\.[\w.-]{1,80}\.windows\.net)?"  # fs.s3a.secret.key, fs.azure.account.key.a.…
_SECRET_NAME = re.compile(rf"(?:{_NAMES})s?{_SUFFIX}$|^(?:key|sig|sas|auth|authorization)$", re.IGNORECASE)
_USERINFO = re.compile(
    # a password may hold "/", "?" and "@", so it ends at the last "@"; a port (":8080/") is no password
    r"(?<=://)(?P<user>[^\s/?#:]*:(?!\d{1,5}(?:[/?#\s]|$))\S*|[^\s/?#:]*)@"
)
_CONTAINERS = ("abfs://", "abfss://", "wasb://", "wasbs://")  # schemes whose addresses begin with `container@account`
_QUERY = re.compile(
    rf"(?P<name>[?&;#](?:[^=&;#\s'\"]*(?:{_NAMES}|pass|auth|x-amz-|x-goog-)[^=&;#\s'\"]*|key|sig|sas|code)=)[^&;#\s'\"]+",
    re.IGNORECASE,
)
_ORACLE = re.compile(r"(?P<name>\bjdbc:oracle:\w+:)[^\s/@:]{1,200}/\S{1,200}@", re.IGNORECASE)
"""`jdbc:oracle:thin:user/password@host`, whose password has no name and no `//` before it."""
_ASSIGNED = re.compile(
    rf"(?P<name>(?<![\w.-])[\w.-]*(?:{_NAMES}){_SUFFIX}(?:=|['\"]\s*:\s*|:[ \t]+)"
    rf"|(?<![\w.-])--[\w.-]*(?:{_NAMES}){_SUFFIX}[ \t]+(?!-)|\bauthorization\b['\"]?\s*[:=]\s*['\"]?\w+ )"
    r"(?!\*{3}|(?:None|True|False|str|bytes|int)\b)(?:'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|[^\s,;'\"(){}\[\]&]+)",
    re.IGNORECASE,
)
"""`AccountKey=...;`, `password=...`, `PASSWORD: ...`, `--password ...`, `"token": "..."`; not `max_tokens=100`."""


def redacted(text: object) -> str:
    """Return a text with `***` in place of the credentials in its addresses, queries and connection strings."""
    text = _USERINFO.sub(_without_user, str(text))
    if "=" in text or ":" in text or "--" in text:
        text = _ORACLE.sub(rf"\g<name>{MARK}@", text)
        text = _QUERY.sub(rf"\g<name>{MARK}", text)
        text = _ASSIGNED.sub(rf"\g<name>{MARK}", text)
    return text


def _without_user(found: re.Match[str]) -> str:
    if ":" not in found["user"] and found.string[: found.start()].lower().endswith(_CONTAINERS):
        return found[0]
    return f"{MARK}@"


def is_secret(name: object, value: object) -> bool:
    """Return whether an entry of a mapping is a credential, by its name."""
    return not isinstance(value, bool | int | float | None) and _SECRET_NAME.search(str(name)) is not None


def without_secrets(name: str, value: Any) -> tuple[Any, list[str]]:
    """Return a setting without credentials, and the names of what was left out: the setting, or entries of it."""
    if name in ALL_SECRET:
        return None, [name]
    if name == "run_options" and isinstance(value, Mapping):
        left_out = [
            key for key, each in value.items() if key in ALL_SECRET or is_secret(key, each) or _has_secrets(each)
        ]
        kept = {key: each for key, each in value.items() if key not in left_out}
        return kept, [f"{name}[{key!r}]" for key in left_out]
    return (None, [name]) if _has_secrets(value) else (value, [])


def _has_secrets(value: Any) -> bool:
    """Return whether a text, or one within a list or mapping, has credentials in it."""
    if isinstance(value, Mapping):
        return any(map(_has_secrets, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_has_secrets, value))
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and redacted(text) != text


def first_line(error: Exception, named: bool = False) -> str:
    """Return the first line of an error's text, at most 200 characters, after its type's name or in place of none."""
    name, lines = type(error).__name__, redacted(error).strip().splitlines()
    return f"{name}: {lines[0][:200]}" if lines and named else lines[0][:200] if lines else name
