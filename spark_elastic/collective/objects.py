"""Collectives on Python objects, and broadcasts of many tensors at once."""

from __future__ import annotations

import hashlib
import hmac
import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import torch

from spark_elastic.collective import reduce
from spark_elastic.collective.calls import agree, describe_tensor
from spark_elastic.collective.group import Group, as_bytes
from spark_elastic.collective.operations import is_provisional
from spark_elastic.collective.process import process
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import AuthenticationError

_OBJECT, _LENGTH = "an object", "the length of an object"
_SIZE_BYTES, _MAC_BYTES = 8, 32
_CHUNK_BYTES = 32 << 20


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return the object of `root_rank`, sent as a pickle; `obj` itself on the root, and before the elastic loop.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the members have called another collective, or with another root.
        AuthenticationError: the message was not sent by a worker of this job; it was not unpickled.
    """
    if is_provisional():
        return obj
    group = process_set.group()
    root = process_set.set_rank_of(root_rank)
    if group is None:
        return obj
    agree(group, "broadcast_object", f"root_rank={root_rank}", name)
    group.objects += 1
    if group.rank != root:
        size = int.from_bytes(_received(_LENGTH, _SIZE_BYTES, group, root), "big")
        return pickle.loads(_received(_OBJECT, size, group, root))
    data = cloudpickle.dumps(obj)
    for kind, part in ((_LENGTH, len(data).to_bytes(_SIZE_BYTES, "big")), (_OBJECT, data)):
        group.wait(group.broadcast(_tensor(_signed(kind, part, group)), root))
    return obj


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """Return the objects of all members, sent as pickles, in rank order.

    Raises:
        HorovodInternalError: a peer is gone.
        MismatchError: the members have called another collective.
        AuthenticationError: a message was not sent by a worker of this job; it was not unpickled.
    """
    group = process_set.group()
    if group is None:
        return [obj]
    agree(group, "allgather_object", name=name)
    group.objects += 1
    data = cloudpickle.dumps(obj)
    mine = _tensor(_signed(_LENGTH, len(data).to_bytes(_SIZE_BYTES, "big"), group))
    lengths = mine.new_empty((group.size, len(mine)))
    group.wait(group.allgather(lengths.view(-1), mine))
    sizes = [int.from_bytes(_verified(_LENGTH, row, group, rank), "big") for rank, row in enumerate(lengths)]
    longest = max(sizes) + _MAC_BYTES
    everyone = mine.new_empty((group.size, longest))
    group.wait(group.allgather(everyone.view(-1), _tensor(_signed(_OBJECT, data, group).ljust(longest, b"\0"))))
    return [
        pickle.loads(_verified(_OBJECT, row[: size + _MAC_BYTES], group, rank))
        for rank, (row, size) in enumerate(zip(everyone, sizes, strict=True))
    ]


def _mac(purpose: str, about: str, data: bytes) -> bytes:
    assert process.link is not None
    return hmac.digest(process.link.derive_key(purpose), f"{about} ".encode() + data, hashlib.sha256)


def sign(purpose: str, about: str, data: bytes) -> bytes:
    """Return `data` behind a MAC of it and of `about`, which only workers of this job can make."""
    return _mac(purpose, about, data) + data


def verify(purpose: str, about: str, message: bytes, what: str) -> bytes:
    """Return the data of a message of `sign`; raise AuthenticationError if `what` comes from no worker of this job."""
    data = message[_MAC_BYTES:]
    if not hmac.compare_digest(message[:_MAC_BYTES], _mac(purpose, about, data)):
        raise AuthenticationError(
            f"{what} was not sent by a worker of this job (its MAC is wrong); nothing was unpickled"
        )
    return data


def _signed(kind: str, data: bytes, group: Group) -> bytes:
    return sign("objects", f"{group.round} {group.name} {group.objects} {group.rank} {kind}", data)


def _verified(kind: str, message: torch.Tensor, group: Group, sender: int) -> bytes:
    """Return the data of a signed message. Receivers allocate memory only for lengths from a worker of this job."""
    about = f"{group.round} {group.name} {group.objects} {sender} {kind}"
    what = f"{kind} said to come from rank {sender}"
    return verify("objects", about, message.numpy().tobytes(), what)


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _received(kind: str, size: int, group: Group, root: int) -> bytes:
    message = torch.empty(_MAC_BYTES + size, dtype=torch.uint8, device="cpu")
    group.wait(group.broadcast(message, root))
    return _verified(kind, message, group, root)


# --- many tensors at once -------------------------------------------------------------------------


def broadcast_tensors(
    tensors: Sequence[torch.Tensor], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite each tensor with that of `root_rank`, in few large messages.

    Small tensors are packed into chunks of at most `_CHUNK_BYTES`. Each large one is sent separately, without a copy if
    it is contiguous. NCCL sends those that all members have on their GPUs, and leaves them as they are if a peer is
    lost; others go through the hosts' memory.
    Raises MismatchError if types or shapes differ between members.
    """
    group = process_set.group()
    root = process_set.set_rank_of(root_rank)
    if group is None:
        return
    plain = [tensor.detach() for tensor in tensors]
    on_gpu = [reduce.is_on_gpu(tensor) for tensor in plain]
    gpus = {tensor.device for tensor, there in zip(plain, on_gpu, strict=True) if there}
    about = f"root_rank={root_rank}: {'; '.join(map(describe_tensor, tensors))}"
    by_nccl = group.may_use_nccl(gpus)
    alike = agree(group, "broadcast_tensors", about, detail=f"{by_nccl}: {on_gpu}")
    if alike and by_nccl and group.uses_nccl(device := gpus.pop()):
        _broadcast_on(device, group, [tensor for tensor, there in zip(plain, on_gpu, strict=True) if there], root, True)
        plain = [tensor for tensor, there in zip(plain, on_gpu, strict=True) if not there]
    _broadcast_on(torch.device("cpu"), group, plain, root, False)


def _broadcast_on(
    device: torch.device, group: Group, tensors: Sequence[torch.Tensor], root: int, by_nccl: bool
) -> None:
    """Send the tensors from this device of the root to those of the others."""
    chunk: list[torch.Tensor] = []
    filled = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if size >= _CHUNK_BYTES // 8:  # decided by size alone, so that all members divide the tensors in the same way
            wire = tensor.to(device).contiguous()
            if by_nccl and group.rank != root:  # an abort leaves garbage, and a survivor's own tensor may be right
                wire = torch.empty_like(wire)
            group.wait(group.broadcast(as_bytes(wire), root, by_nccl))
            if wire.data_ptr() != tensor.data_ptr():
                tensor.copy_(wire)
            continue
        if filled + size > _CHUNK_BYTES and chunk:
            _broadcast_chunk(device, group, chunk, root, by_nccl)
            chunk, filled = [], 0
        chunk.append(tensor)
        filled += size
    if chunk:
        _broadcast_chunk(device, group, chunk, root, by_nccl)


def _broadcast_chunk(
    device: torch.device, group: Group, tensors: Sequence[torch.Tensor], root: int, by_nccl: bool
) -> None:
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    if not sum(sizes):
        return
    if group.rank == root:
        flat = torch.cat([as_bytes(tensor.to(device).contiguous()) for tensor in tensors])
    else:
        flat = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
    group.wait(group.broadcast(flat, root, by_nccl))
    if group.rank != root:
        for tensor, part in zip(tensors, flat.split(sizes), strict=True):
            # a part may start at any byte; a copy is aligned for every type
            tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))
