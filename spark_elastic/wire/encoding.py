"""Messages as bytes: a line of JSON, the head, followed by the raw bytes of `payload` if the message has one.

A long head is compressed. No message is ever unpickled. Decoding checks the type of each field, so invalid bytes raise
`ProtocolError` and never reach the driver's state. What is done for each field is determined once for each type of
message.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
import zlib
from collections.abc import Callable
from typing import Any

from spark_elastic.errors import ProtocolError
from spark_elastic.wire.messages import Message

_SEPARATOR = b"\n"
_COMPRESS_FROM_BYTES = 4096
_COMPRESSED = b"\x78"
"""First byte of zlib's format; a message that is not compressed begins with a brace."""
MAX_MESSAGE_BYTES = 64 * 2**20
"""Limit of a decompressed message."""

_Reader = Callable[[Any], Any]
"""Checks a value of JSON and returns it in its type; raises `_Unexpected`."""


def encode(message: Message) -> bytes:
    """Return a message as bytes."""
    cls = type(message)
    fields = _values(message)
    fields["type"] = cls.__name__
    payload: bytes = getattr(message, "payload", b"")
    head = _to_json(fields).encode() + _SEPARATOR
    return (head if len(head) < _COMPRESS_FROM_BYTES else zlib.compress(head, 1)) + payload


_PLAIN_FIELDS: dict[type[Any], tuple[str, ...]] = {}


def _plain_fields(cls: type[Any]) -> tuple[str, ...]:
    """Return the names of the fields that are written as JSON."""
    names = _PLAIN_FIELDS.get(cls)
    if names is None:
        names = _PLAIN_FIELDS[cls] = tuple(each.name for each in dataclasses.fields(cls) if each.name != "payload")
    return names


def _values(value: Any) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _plain_fields(type(value))}


_to_json = json.JSONEncoder(separators=(",", ":"), default=_values).encode

_from_json = json.JSONDecoder().raw_decode


def decode(data: bytes) -> Message:
    """Return the message that `encode` made.

    Raises:
        ProtocolError: the bytes are not a message, or a field is missing, unknown or of the wrong type.
    """
    if data.startswith(_COMPRESSED):
        head, payload = _decompressed(data)
        separator = head[-1:]
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
    reader = _readers().get(name) if isinstance(name, str) else None
    if reader is None:
        raise ProtocolError(f"unknown message type {name!r:.80}")
    try:
        return reader(fields, payload)
    except _Unexpected as error:
        raise ProtocolError(f"{name}{error.path}: {error.text}") from None


def _decompressed(data: bytes) -> tuple[bytes, bytes]:
    """Return the head, and the payload behind it."""
    stream = zlib.decompressobj()
    try:
        body = stream.decompress(data, MAX_MESSAGE_BYTES)
    except zlib.error as error:
        raise ProtocolError(f"a compressed message that is damaged: {error}") from None
    if not stream.eof:
        raise ProtocolError(f"a compressed message that is incomplete or longer than {MAX_MESSAGE_BYTES} bytes")
    return body, stream.unused_data


# --- how the values of each type are read -------------------------------------------------------------


class _Unexpected(Exception):
    """A value is not what its field takes."""

    def __init__(self, text: str, path: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.path = path  # of the field within the message, with a dot before each name

    def within(self, field: str) -> _Unexpected:
        return _Unexpected(self.text, f".{field}{self.path}")


@functools.cache
def _readers() -> dict[str, Callable[[dict[str, Any], bytes], Message]]:
    """Return by its name how each message is made of its fields and the bytes behind them."""
    return {cls.__name__: _message_reader(cls) for cls in Message.__subclasses__()}


def _message_reader(cls: type[Any]) -> Callable[[dict[str, Any], bytes], Message]:
    carries_payload = any(each.name == "payload" for each in dataclasses.fields(cls))
    read_fields = _fields_reader(cls)

    def read(fields: dict[str, Any], payload: bytes) -> Message:
        if carries_payload and "payload" in fields:
            raise _Unexpected("payload in the head")
        if payload and not carries_payload:
            raise _Unexpected(f"{len(payload)} bytes behind a message that carries none")
        values = read_fields(fields)
        if carries_payload:
            values["payload"] = payload
        try:
            return typing.cast(Message, cls(**values))
        except ValueError as error:
            raise _Unexpected(str(error)) from None

    return read


def _fields_reader(cls: type[Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a function that checks the fields of a dataclass, all of which have to be there, but no payload."""
    hints = typing.get_type_hints(cls)
    readers = {name: _reader(hints[name]) for name in _plain_fields(cls)}

    return lambda fields: _checked(fields, readers)


def _checked(fields: dict[str, Any], readers: dict[str, _Reader]) -> dict[str, Any]:
    """Return the values of the fields, each read by its reader. Raises `_Unexpected` unless they are just those."""
    names = readers.keys()
    if fields.keys() != names:
        missing, unknown = sorted(names - fields.keys()), sorted(fields.keys() - names)
        raise _Unexpected(f"missing fields {missing}, unknown fields {unknown!s:.200}")
    values = {}
    name = ""
    try:
        for name, value in fields.items():
            values[name] = readers[name](value)
    except _Unexpected as error:
        raise error.within(name) from None
    return values


def _reader(hint: Any) -> _Reader:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        (arm,) = (each for each in typing.get_args(hint) if each is not type(None))
        return _optional(_reader(arm))
    if origin is tuple:
        return _list(typing.get_args(hint)[0])
    if origin is dict:
        return _mapping(_reader(typing.get_args(hint)[1]))
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast("type[Any]", hint))
    return _float if hint is float else _exactly(hint)


def _optional(reader: _Reader) -> _Reader:
    return lambda value: None if value is None else reader(value)


def _list(hint: Any) -> _Reader:
    reader = _reader(hint)

    def read(value: Any) -> tuple[Any, ...]:
        if type(value) is not list:
            raise _Unexpected("expected a list")
        if hint in (int, str) and set(map(type, value)) <= {hint}:
            return tuple(value)
        return tuple(map(reader, value))

    return read


def _mapping(reader: _Reader) -> _Reader:
    def read(value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise _Unexpected("expected an object")
        return {key: reader(item) for key, item in value.items()}

    return read


def _object(cls: type[Any]) -> _Reader:
    read_fields = _fields_reader(cls)

    def read(value: Any) -> Any:
        if type(value) is not dict:
            raise _Unexpected("expected an object")
        try:
            return cls(**read_fields(value))
        except ValueError as error:
            raise _Unexpected(str(error)) from None

    return read


def _float(value: Any) -> float:
    if type(value) is float:
        return value
    if type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise _Unexpected("an integer that no float can hold") from None
    raise _Unexpected(f"expected float, got {type(value).__name__}")


def _exactly(kind: type[Any]) -> _Reader:
    def read(value: Any) -> Any:
        if type(value) is not kind:  # exact: a bool must not pass as an int
            raise _Unexpected(f"expected {kind.__name__}, got {type(value).__name__}")
        return value

    return read
