"""A training's state as the contents of a durable checkpoint, and back."""

from __future__ import annotations

import io
import numbers
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.checkpoints import CheckpointFacts, Contents
from spark_elastic.ml.torch.progress import Progress

TENSORS = "state.pt"


def to_bytes(value: Any) -> bytes:
    """By `torch.save`; for `from_bytes`, or `torch.load(weights_only=True)`."""
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def from_bytes(data: bytes) -> Any:
    """Raises: CheckpointError: not tensors and plain values."""
    try:
        return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"not what torch.save has written of tensors and plain values: {error}") from error


def detached(value: Any, where: str, copy: bool = True) -> Any:
    """A copy on the CPU that later steps do not reach, of types that loading cannot run code with.

    copy: False: only look whether it can be done; what is returned shares the tensors.

    Raises: CheckpointError: there is something else in it; `where` says in what.
    """
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True) if copy else value
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, OrderedDict):
        return OrderedDict((key, detached(one, f"{where}.{key}", copy)) for key, one in value.items())
    if isinstance(value, Counter):  # of learning rate milestones
        return Counter({key: int(one) for key, one in value.items()})
    if isinstance(value, Mapping):
        return {key: detached(one, f"{where}.{key}", copy) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        copies = [detached(one, f"{where}[{at}]", copy) for at, one in enumerate(value)]
        return tuple(copies) if isinstance(value, tuple) else copies
    raise CheckpointError(
        f"{where} is of {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold: only "
        "tensors and plain values can be read back without running code"
    )


def callback_states(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    return [{"class": type(one).__qualname__, "state": dict(one.state_dict())} for one in callbacks]


def load_callback_states(callbacks: Sequence[Callback], states: Sequence[Mapping[str, Any]]) -> None:
    """Raises: CheckpointError: they were other callbacks."""
    have, had = [type(one).__qualname__ for one in callbacks], [state["class"] for state in states]
    if have != had:
        raise CheckpointError(f"the checkpoint was written with the callbacks {had}, and now there are {have}")
    for one, state in zip(callbacks, states, strict=True):
        one.load_state_dict(state["state"])


def snapshot(
    at: Progress,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    best: torch.nn.Module | None,
    callbacks: Sequence[Callback],
    settings: Mapping[str, Any],
    best_of: Sequence[str],
) -> Callable[[], Contents]:
    """Copies everything now; what it returns makes the bytes of it, on another thread.

    Raises: CheckpointError: the optimizer or the scheduler hold what cannot be written.
    """
    tensors = {
        "model": detached(model.state_dict(), "the model"),
        "optimizer": detached(optimizer.state_dict(), "the optimizer"),
        "scheduler": None if scheduler is None else detached(scheduler.state_dict(), "the lr_scheduler"),
        "best": None if best is None or at.best_epoch is None else detached(best.state_dict(), "the best model"),
        "pieces": detached(at.pieces, "the metrics"),
        "val_pieces": detached(at.val_pieces, "the metrics"),
    }
    document = {"at": at.to_json(), "callbacks": callback_states(callbacks), "settings": dict(settings)}
    facts = CheckpointFacts(f"{at.serial:012d}", at.step, at.epoch, at.position, tuple(best_of))
    return lambda: Contents(facts, document, {TENSORS: to_bytes(tensors)})


def restore(
    contents: Contents,
    *,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
    best: torch.nn.Module | None,
    callbacks: Sequence[Callback],
    settings: Mapping[str, Any],
) -> Progress:
    """Raises: CheckpointError: it belongs to another training, by what it says or by its shapes."""
    name = contents.facts.name
    had = contents.document["settings"]
    for key, value in settings.items():
        if had.get(key) != value:
            raise CheckpointError(
                f"checkpoint {name} was written with {key}={had.get(key)!r}, and now it is {value!r}; give another "
                "run_id to begin anew"
            )
    tensors = from_bytes(contents.files[TENSORS])
    try:
        at = Progress.from_json(contents.document["at"], tensors["pieces"], tensors["val_pieces"])
        model.load_state_dict(tensors["model"])
        optimizer.load_state_dict(tensors["optimizer"])
        if scheduler is not None and tensors["scheduler"] is not None:
            scheduler.load_state_dict(tensors["scheduler"])
        if best is not None and tensors["best"] is not None:
            best.load_state_dict(tensors["best"])
    except (KeyError, ValueError, RuntimeError, TypeError) as error:
        raise CheckpointError(f"checkpoint {name} is of another model or optimizer: {error}") from error
    load_callback_states(callbacks, contents.document["callbacks"])
    return at
