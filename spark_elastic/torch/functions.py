"""Set up a worker: its device, and the broadcast of models and optimizers from one rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from spark_elastic.collective.devices import choose_device, device_info, device_setting
from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.collective.operations import outside_world
from spark_elastic.collective.process import local_rank
from spark_elastic.collective.process_sets import ProcessSet, global_process_set
from spark_elastic.errors import UsageError

log = logging.getLogger("spark_elastic.torch")


def device(asked: str | None = None) -> torch.device:
    """Return the device to put the model and its batches on; if it is a GPU, make it this process's current one.

    Call this once, before the elastic loop, and keep the result: if workers see GPUs of other workers too, it depends
    on the local rank, which changes with the world.

    Args:
        asked: "auto", "cpu", "cuda" or "cuda:N"; by default the `device` of `spark_elastic.run`, or "auto".

    Raises:
        InvalidSettingsError: there is no such device here; the message has the remedy.
        NotInitializedError: `init` has not been called.
    """
    chosen = choose_device(device_setting() if asked is None else asked, device_info(), local_rank())
    log.info("this worker computes on %s: %s", chosen.device, chosen.reason)
    found = torch.device(chosen.device)
    if found.type == "cuda":
        torch.cuda.set_device(found)
    return found


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite the tensors of a `state_dict()`, `named_parameters()` or a list of tensors with those of `root_rank`.

    Raises:
        UsageError: `params` is something else.
    """
    if outside_world():
        return
    values: list[Any]
    if isinstance(params, Mapping):
        values = [params[key] for key in sorted(params)]
    elif isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        values = [item[1] if isinstance(item, tuple) else item for item in params]
    else:
        raise UsageError(f"broadcast_parameters takes a dict or a list of tensors, not {type(params).__name__}")
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    broadcast_tensors(tensors, root_rank, process_set)


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer,
    root_rank: int,
    model: torch.nn.Module | None = None,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Overwrite the state and the options (such as the learning rate) of an optimizer with those of `root_rank`.

    The state of an optimizer that has made no step yet is created. If the root's optimizer has made no step either,
    parameters without a gradient get one of zeros, as with Horovod.

    Args:
        optimizer: the optimizer to change.
        root_rank: the rank to copy from.
        model: the model, to find the parameters with sparse gradients.
        process_set: the processes that take part.
    """
    from spark_elastic.elastic.handlers import take_over
    from spark_elastic.torch.elastic.handlers import OptimizerStateHandler

    if outside_world():
        return
    handlers = {"optimizer": OptimizerStateHandler(optimizer)}
    if take_over(handlers, root_rank, extra=not optimizer.state, process_set=process_set):
        _set_zero_gradients(optimizer, model)


def _set_zero_gradients(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
    embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    layers = () if model is None else (module for module in model.modules() if isinstance(module, embeddings))
    sparse = {id(layer.weight) for layer in layers if layer.sparse}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                zeros = torch.zeros_like(parameter, requires_grad=False)
                wants_sparse = isinstance(optimizer, torch.optim.SparseAdam) or id(parameter) in sparse
                parameter.grad = zeros.to_sparse(1) if wants_sparse else zeros
