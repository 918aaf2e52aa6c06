"""Messages as bytes: a line of JSON, the head, followed by the raw bytes of `payload` if the message has one.

A long head is compressed. No message is ever unpickled. Decoding checks the type of each field, so invalid bytes raise
`ProtocolError` and never reach the driver's state.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
import zlib
from typing import Any

from spark_elastic.errors import ProtocolError
from spark_elastic.wire.messages import Message

_SEPARATOR = b"\n"
_COMPRESS_FROM_BYTES = 4096
_COMPRESSED = b"\x78"  # first byte of zlib's format; a message that is not compressed begins with a brace
MAX_MESSAGE_BYTES = 64 * 2**20  # limit of a decompressed message


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    cls = type(message)
    fields = _values(message)
    fields["type"] = cls.__name__
    payload: bytes = getattr(message, "payload", b"")
    head = _to_json(fields).encode() + _SEPARATOR
    return (head if len(head) < _COMPRESS_FROM_BYTES else zlib.compress(head, 1)) + payload


@functools.cache
def _messages() -> dict[str, type[Message]]:
    return {cls.__name__: cls for cls in Message.__subclasses__()}


@functools.cache
def _types(cls: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields that are written as JSON, by name."""
    hints = typing.get_type_hints(cls)
    return {each.name: hints[each.name] for each in dataclasses.fields(cls) if each.name != "payload"}


def _values(value: Any) -> dict[str, Any]:
    cls: Any = type(value)
    return {name: getattr(value, name) for name in _types(cls)}


_to_json = json.JSONEncoder(separators=(",", ":"), default=_values).encode

_from_json = json.JSONDecoder().raw_decode


def decode(data: bytes) -> Message:
    """Return the message that `encode` made; raise ProtocolError for anything else."""
    if data.startswith(_COMPRESSED):
        stream = zlib.decompressobj()
        try:
            head = stream.decompress(data, MAX_MESSAGE_BYTES)
        except zlib.error as error:
            raise ProtocolError(f"a compressed message that is damaged: {error}") from None
        if not stream.eof:
            raise ProtocolError(f"a compressed message that is incomplete or longer than {MAX_MESSAGE_BYTES} bytes")
        separator, payload = head[-1:], stream.unused_data
    else:
        head, separator, payload = data.partition(_SEPARATOR)
    if separator != _SEPARATOR:
        raise ProtocolError("a frame without a message head")
    try:
        text = head.decode().rstrip()
        fields, end = _from_json(text)
        if end < len(text):
            raise ValueError(f"{len(text) - end} characters behind it")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a message head that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ProtocolError("a message head that is not an object")
    name = fields.pop("type", None)
    cls: type[Any] | None = _messages().get(name) if isinstance(name, str) else None
    if cls is None:
        raise ProtocolError(f"unknown message type {name!r:.80}")
    carries_payload = any(each.name == "payload" for each in dataclasses.fields(cls))
    if carries_payload and "payload" in fields:
        raise ProtocolError(f"{name}: payload in the head")
    if payload and not carries_payload:
        raise ProtocolError(f"{name}: {len(payload)} bytes behind a message that carries none")
    try:
        message: Message = _object(cls, fields, {"payload": payload} if carries_payload else {})
    except _Unexpected as error:
        raise ProtocolError(f"{name}{error}") from None
    return message


# --- values of JSON in the types of their fields; each function raises `_Unexpected` if they are others --------


class _Unexpected(Exception):
    """A value is not what its field takes: ": why", or ".field.part: why"."""


def _object(cls: Any, fields: Any, more: dict[str, Any]) -> Any:
    """Return a dataclass of a JSON object, which has to have just its fields, and of the values in `more`."""
    if type(fields) is not dict:
        raise _Unexpected(": expected an object")
    hints = _types(cls)
    if fields.keys() != hints.keys():
        missing, unknown = sorted(hints.keys() - fields.keys()), sorted(fields.keys() - hints.keys())
        raise _Unexpected(f": missing fields {missing}, unknown fields {unknown!s:.200}")
    values = dict(more)
    for name, value in fields.items():
        try:
            values[name] = _value(hints[name], value)
        except _Unexpected as error:
            raise _Unexpected(f".{name}{error}") from None
    try:
        return cls(**values)
    except ValueError as error:
        raise _Unexpected(f": {error}") from None


def _value(hint: Any, value: Any) -> Any:
    """Return a value in the type of its hint: a plain type, a dataclass, one of them or None, a tuple or a dict."""
    origin, of = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        (arm,) = (each for each in of if each is not type(None))
        return None if value is None else _value(arm, value)
    if origin is tuple:
        if type(value) is not list:
            raise _Unexpected(": expected a list")
        return tuple(_value(of[0], each) for each in value)
    if origin is dict:
        if type(value) is not dict:
            raise _Unexpected(": expected an object")
        return {key: _value(of[1], each) for key, each in value.items()}
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint), value, {})
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _Unexpected(": an integer that no float can hold") from None
    if type(value) is not hint:  # exact: a bool must not pass as an int
        raise _Unexpected(f": expected {hint.__name__}, got {type(value).__name__}")
    return value
