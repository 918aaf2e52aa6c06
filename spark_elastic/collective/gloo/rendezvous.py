"""Rendezvous through the driver: the stores of PyTorch by which Gloo and NCCL connect the members of a group."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch.distributed as dist

from spark_elastic.wire.worker_link import WorkerLink

CONNECT_TIMEOUT_S = 20.0
"""The time limit for the members of a new world to connect; all of them are waiting when it is published."""


class LinkStore(dist.Store):  # type: ignore[misc, name-defined]
    """One group's keys of one round in the driver's key-value store, as a store of PyTorch."""

    def __init__(self, link: WorkerLink, round: int, prefix: str) -> None:
        super().__init__()
        self._link, self._round, self._prefix = link, round, prefix
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._link.kv_set(self._round, self._prefix + key, bytes(value))

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        timeout_s = timeout.total_seconds() if timeout else CONNECT_TIMEOUT_S
        for key in keys:
            if key not in self._values:
                self._values[key] = self._link.kv_get(self._round, self._prefix + key, timeout_s)

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)


def compact(address: bytes) -> str:
    """Return Gloo's address as text: its 8-byte numbers grow by one, so their differences compress well."""
    differences = np.frombuffer(address, np.uint8).copy()
    differences[8:] -= differences[:-8].copy()
    return base64.b64encode(zlib.compress(differences.tobytes())).decode()


def restore(text: str) -> bytes:
    """Return the address that `compact` has made the text of."""
    differences = zlib.decompress(base64.b64decode(text))
    rows = np.frombuffer(differences + bytes(-len(differences) % 8), np.uint8).reshape(-1, 8)
    return rows.cumsum(axis=0, dtype=np.uint8).tobytes()[: len(differences)]


class AddressExchange(dist.Store):  # type: ignore[misc, name-defined]
    """The store through which the members of one group exchange their addresses.

    Each member sends its own to the driver, which answers all of them with one table once it has all addresses. `kind`
    is that of the device that its tensors may be on, "cpu" or "gpu"; `note` is a text for the other members.
    """

    def __init__(self, link: WorkerLink, round: int, name: str, rank: int, size: int, kind: str, note: str) -> None:
        super().__init__()
        self._link = link
        self._round, self._name, self._rank, self._size = round, name, rank, size
        self._kind, self._note = kind, note
        self._own = ""
        self.table: list[tuple[str, str, bytes]] = []
        """Each member's kind, note and address, by rank; empty before they were exchanged."""
        self.error: BaseException | None = None
        """The link's error. Gloo converts exceptions of the store and loses their type, so it is kept here."""

    def set(self, key: str, value: Any) -> None:
        self._own = json.dumps([self._kind, self._note, compact(bytes(value))])

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.table[int(key.removeprefix("0/"))][2]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        if self.table:
            return
        try:
            found = self._link.gather(self._round, self._name, self._rank, self._size, self._own, CONNECT_TIMEOUT_S)
        except BaseException as error:
            self.error = error
            raise
        self.table = [(kind, note, restore(address)) for kind, note, address in map(json.loads, found)]

    def check(self, keys: list[str]) -> bool:
        return bool(self.table)
