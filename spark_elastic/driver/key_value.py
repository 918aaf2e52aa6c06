"""The key-value store under Gloo's rendezvous: one space a round, gone with the round."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from spark_elastic.errors import ProtocolError

MAX_ROUND_BYTES = 64 * 2**20
"""Gloo needs some 200 bytes a pair of ranks; this bounds what a broken worker can pile up."""


class RoundKeyValues:
    """Values by key for the newest round; requests wait until all their keys are there."""

    def __init__(self) -> None:
        self._round = 0
        self._values: dict[str, bytes] = {}
        self._bytes = 0
        self._waiting: list[tuple[tuple[str, ...], Callable[[list[bytes]], None]]] = []

    def begin(self, round: int) -> None:
        """Forget the round before, with everything that waited in it."""
        self._round = round
        self._values.clear()
        self._waiting.clear()
        self._bytes = 0

    def set(self, round: int, key: str, value: bytes) -> None:
        """Raises: ProtocolError: more than `MAX_ROUND_BYTES` in one round."""
        if round != self._round:
            return  # a late writer of a round that is over
        self._bytes += len(key) + len(value) - len(self._values.get(key, b""))
        if self._bytes > MAX_ROUND_BYTES:
            raise ProtocolError(f"round {round} stored more than {MAX_ROUND_BYTES} bytes of rendezvous data")
        self._values[key] = value
        still = []
        for keys, answer in self._waiting:
            if all(k in self._values for k in keys):
                answer([self._values[k] for k in keys])
            else:
                still.append((keys, answer))
        self._waiting = still

    def get(self, round: int, keys: Sequence[str], answer: Callable[[list[bytes]], None]) -> None:
        """Call `answer` with the values in order, now or when the last one arrives; never if the round ends first."""
        if round != self._round:
            return
        if all(k in self._values for k in keys):
            answer([self._values[k] for k in keys])
        else:
            self._waiting.append((tuple(keys), answer))
