"""Collectives on Python objects, and on many tensors at once."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from spark_elastic.collective.gloo import GlooGroup
from spark_elastic.collective.operations import allgather_async, outside_world
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import AuthenticationError, UsageError

_HEAD_BYTES = 16 * 1024
"""Size of the first message of an object: most fit into it, so one broadcast is enough."""
_SIZE_BYTES, _MAC_BYTES = 8, 32
_CHUNK_BYTES = 32 << 20


def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """The object of `root_rank`, pickled. Returns `obj` itself on the root, and before the elastic loop.

    Raises:
        HorovodInternalError: a peer is gone.
        AuthenticationError: what arrived was not sent by a worker of this job; it was not unpickled.
    """
    if outside_world():
        return obj
    group = process_set.group()
    if group is None:
        return obj
    if not 0 <= root_rank < group.size:
        raise UsageError(f"root_rank={root_rank} is not a rank of {process_set!r}, which has {group.size}")
    group.objects += 1
    if group.rank == root_rank:
        _send(group, _seal(cloudpickle.dumps(obj), group, root_rank))
        return obj
    return pickle.loads(_open(_receive(group, root_rank), group, root_rank))


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Every member's object, pickled, in rank order.

    Raises:
        HorovodInternalError: a peer is gone.
        AuthenticationError: see `broadcast_object`.
    """
    group = process_set.group()
    if group is None:
        return [obj]
    group.objects += 1
    sealed = _seal(cloudpickle.dumps(obj), group, group.rank)
    sizes = allgather_async(torch.tensor([len(sealed)]), process_set=process_set).wait().tolist()
    data = allgather_async(_tensor(sealed), process_set=process_set).wait()
    pieces = data.split(sizes)
    return [pickle.loads(_open(piece.numpy().tobytes(), group, rank)) for rank, piece in enumerate(pieces)]


def _mac(data: bytes, group: GlooGroup, sender: int) -> bytes:
    assert process.link is not None
    key = process.link.derive_key("objects")
    return hmac.digest(key, f"{group.round} {group.name} {group.objects} {sender} ".encode() + data, hashlib.sha256)


def _seal(data: bytes, group: GlooGroup, sender: int) -> bytes:
    return _mac(data, group, sender) + data


def _open(sealed: bytes, group: GlooGroup, sender: int) -> bytes:
    data = sealed[_MAC_BYTES:]
    if not hmac.compare_digest(sealed[:_MAC_BYTES], _mac(data, group, sender)):
        raise AuthenticationError(f"an object said to come from rank {sender} does not carry this job's seal")
    return data


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _send(group: GlooGroup, sealed: bytes) -> None:
    head = len(sealed).to_bytes(_SIZE_BYTES, "big") + sealed
    group.wait(group.broadcast(_tensor(head[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")), group.rank))
    if len(head) > _HEAD_BYTES:
        group.wait(group.broadcast(_tensor(head[_HEAD_BYTES:]), group.rank))


def _receive(group: GlooGroup, root: int) -> bytes:
    head = torch.empty(_HEAD_BYTES, dtype=torch.uint8)
    group.wait(group.broadcast(head, root))
    data = head.numpy().tobytes()
    size = int.from_bytes(data[:_SIZE_BYTES], "big")
    rest = size + _SIZE_BYTES - _HEAD_BYTES
    if rest <= 0:
        return data[_SIZE_BYTES : _SIZE_BYTES + size]
    tail = torch.empty(rest, dtype=torch.uint8)
    group.wait(group.broadcast(tail, root))
    return data[_SIZE_BYTES:] + tail.numpy().tobytes()


# --- many tensors at once -------------------------------------------------------------------------


def broadcast_tensors(tensors: Sequence[torch.Tensor], root: int, process_set: ProcessSet = global_process_set) -> None:
    """Overwrite each tensor with the root's, in few large messages. Types and shapes must be the same everywhere.

    Small tensors are packed into chunks of at most `_CHUNK_BYTES`; large ones travel alone, without a copy if they are
    contiguous.
    """
    group = process_set.group()
    if group is None:
        return
    chunk: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        plain = tensor.detach()
        size = plain.numel() * plain.element_size()
        if size >= _CHUNK_BYTES // 8:  # by size alone: members must cut the messages alike
            wire = plain.cpu().contiguous()
            group.wait(group.broadcast(wire.view(-1).view(torch.uint8), root))
            if wire.data_ptr() != plain.data_ptr():
                plain.copy_(wire)
            continue
        if filled + size > _CHUNK_BYTES and chunk:
            _broadcast_chunk(group, chunk, root)
            chunk, filled = [], 0
        chunk.append(plain)
        filled += size
    if chunk:
        _broadcast_chunk(group, chunk, root)


def _broadcast_chunk(group: GlooGroup, tensors: Sequence[torch.Tensor], root: int) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if not sum(sizes):
        return
    if group.rank == root:
        plain = [tensor.cpu().contiguous().reshape(-1) for tensor in tensors if tensor.numel()]
        flat = torch.cat([tensor.view(torch.uint8) for tensor in plain])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
    group.wait(group.broadcast(flat, root))
    if group.rank != root:
        for tensor, piece in zip(tensors, flat.split(sizes), strict=True):
            # a piece may start at any byte; a copy of its own is aligned for every type
            tensor.copy_(piece.clone().view(tensor.dtype).view(tensor.shape))
