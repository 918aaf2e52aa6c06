"""Do one step of a copy of the training on its first rows, on the driver, so that errors come before workers start."""

from __future__ import annotations

import contextlib
import copy
import logging
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import check_one_best
from spark_elastic.ml.model_function import FORM
from spark_elastic.ml.params import as_list
from spark_elastic.ml.torch.building import built, subject
from spark_elastic.ml.torch.engine import objective_of, single_row_norm
from spark_elastic.ml.torch.fidelity import differences
from spark_elastic.ml.torch.loss_checks import broadcast_is_an_error, check_losses, check_metrics
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.model import TorchPredictor
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.model_step import ForwardResult, LoggedName, ModelStep, StepPosition, TorchBatch
from spark_elastic.ml.torch.objective import BatchMaker, Objective, rule
from spark_elastic.ml.torch.serialization import changed_names, frozen_digests, trained_copy, weights_to_bytes
from spark_elastic.ml.torch.spec import LearningRateSchedule, TorchTraining, build_optimizer
from spark_elastic.ml.training import dry_run as common
from spark_elastic.ml.training.dry_run import DryRunResult, user_code
from spark_elastic.ml.training.engine import first_rows
from spark_elastic.reporting.history import FACTS
from spark_elastic.runs.tensors import detached
from spark_elastic.torch.elastic.state import note_step
from spark_elastic.torch.sync_batch_norm import is_batch_norm, unconverted

log = logging.getLogger("spark_elastic.ml")

_OF_TABLES = {
    "max_norm": "changes the weights of those rows of the table that a worker's share of a batch uses. Set no "
    "max_norm, and bound the rows of the table in a hook of the optimizer: register_step_post_hook",
    "scale_grad_by_freq": "divides gradients by how often a worker's share of a batch uses a row of the table. Leave "
    "it out",
}
"""Options of embeddings, and what they do."""
_GLOBAL_HOOKS = re.compile(r"_global_(optimizer_|forward_|backward_)(pre_|post_)?hooks$")


def dry_run(
    training: TorchTraining, inference_fn: Callable[[dict[str, Any]], Mapping[str, Any]] | None
) -> DryRunResult:
    """Do forward, loss, metrics, backward and an optimizer step on a copy; then call the model as `transform` does."""
    common.check_order(training)
    check_one_best(training.callbacks)
    generator = torch.random.get_rng_state()
    try:
        if isinstance(training.model, ModelFunction):
            given = copied = built(_copied(training))
            _check_parts(given)
        else:
            given = training
            _check_parts(given)
            copied = built(_copied(training))
        if training.sync_batch_norm:
            common.warn_of_local_batch_statistics(
                unconverted(given.model),
                "layers that are scripted, or whose class overrides forward, cannot be converted",
                "Use torch.nn.BatchNorm1d, 2d or 3d in a model that is not scripted, or set sync_batch_norm=False",
            )
        _check_copy(training, copied)
        batch = first_rows(copied, common.ROWS)
        result, found = _step(copied, batch)
        first = next(iter(as_list(training.loss)), None)
        with common.returned_model(type(copied.model).__name__):
            returned = trained_copy(training.model, weights_to_bytes(copied.model, copied.frozen or {})).eval()
        predictor = TorchPredictor(returned, "cpu")
        tried = common.try_transform(copied, batch, predictor, inference_fn, result.rule or rule(first))
        return replace(tried, settings={**found, "frozen": copied.frozen})
    finally:
        torch.random.set_rng_state(generator)


def _copied(training: TorchTraining) -> TorchTraining:
    """Return the training as a worker gets it. Raises NotPicklableError."""
    return common.round_trip_pickle(training, {"model": f"give a function that makes the model: {FORM}"})


def _step(training: TorchTraining, batch: Batch) -> tuple[ForwardResult, dict[str, Any]]:
    """Do one step; return the result of its forward pass, and the settings that only a step shows."""
    common.check_metric_names(training.metrics)
    model = training.model.cpu()
    optimizer = build_optimizer(training.optimizer, model)
    schedule = LearningRateSchedule(training, optimizer)
    objective = objective_of(training)
    parts = BatchMaker(training, torch.device("cpu")).parts(batch, 1)
    part = parts[0]
    versions = {name: param._version for name, param in model.named_parameters() if param.requires_grad}
    buffers = {name: value.clone() for name, value in _own_buffers(model).items()}
    with (
        user_code(subject(training), part.rows, part.tensors),
        single_row_norm(model, part.rows),
        broadcast_is_an_error(),
    ):
        objective.set_mode(model, True)
        objective.prepare(model, StepPosition())
        result = _kept(objective.forward(model, part))
        share = objective.share(result, part.rows, result.counts if objective.coupled else ())
    _check_forward_changes(training, objective, model, versions)
    moving = [name for name, value in _own_buffers(model).items() if not torch.equal(value, buffers.get(name, value))]
    validation = _validation(training, objective, part)
    logged = _logged(result, validation)
    metrics = TorchMetricAccumulator(objective, training.metrics, logged)
    seen = {**part.tensors, **{f"output {number}": value for number, value in enumerate(result.outputs)}}
    with user_code("the metrics", part.rows, seen), broadcast_is_an_error():
        sums = torch.zeros(metrics.width, dtype=torch.float64)
        piece = metrics.measure(result, part.rows, sums)
    check_metrics(training, objective, result, part.rows)
    common.warn_of_averaged_metrics(
        metrics.averaged, "a torchmetrics metric (torchmetrics.AUROC, ...), whose states are added up"
    )
    if not share.requires_grad:
        raise InvalidSettingsError(
            "the loss does not depend on any parameter that is trained: all of them are frozen (requires_grad=False), "
            "or the model or train_fn detaches its result"
        )
    with user_code("the backward pass", part.rows, seen), _gradients_at_once(model):
        share.backward()  # type: ignore[no-untyped-call]
    if training.virtual_workers is not None:
        for name, param in model.named_parameters():
            if param.grad is not None and param.grad.is_sparse:
                raise InvalidSettingsError(
                    f"the gradient of {name} is sparse, and consistency='exact' adds up dense gradients alone; use "
                    "sparse=False in torch.nn.Embedding, or consistency='trajectory'"
                )
    with common.optimizer_errors(optimizer, "parameters"):
        optimizer.step()
    for kept in optimizer.state.values():
        for name, value in kept.items():
            if isinstance(value, torch.Tensor) and value.is_sparse:
                raise InvalidSettingsError(
                    f"{name} in the state of {type(optimizer).__name__} is sparse, as the gradients are, and workers "
                    "copy dense states alone; use sparse=False in torch.nn.Embedding, torch.optim.SparseAdam, or SGD "
                    "without momentum"
                )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torchmetrics warns of a class that is missing in so few rows
            logs = metrics.logs(sums.numpy(), [piece])
            val_logs = None
            if validation is not None:
                val_sums = torch.zeros(metrics.width, dtype=torch.float64)
                val_logs = metrics.logs(val_sums.numpy(), [metrics.measure(validation, part.rows, val_sums)], "val_")
    except Exception as error:  # a metric may need more than the first rows
        log.info("the names of the history's columns are not known yet: %s", error)
    else:
        row = common.check_monitors(training, training.callbacks, logs, val_logs)
        schedule.after_step()
        schedule.after_epoch(row)
    moved = _moved_parameters(training, objective, model, part)
    check_losses(training, objective, part, result)
    if (moving := [*moving, *moved]) and part.rows > 1 and not training.loss_is_per_worker:
        _warn_of_buffers_by_rows(objective, model, BatchMaker(training, torch.device("cpu")).parts(batch, 2), moving)
    _check_writable(training, model, optimizer, schedule)
    return result, {"logged": logged, "paired": objective.paired, "moved": moved}


def _check_parts(training: TorchTraining) -> None:
    """Raise InvalidSettingsError for parts of model and loss that cannot be trained, and warn of those in eval mode."""
    for name, value in (*training.model.named_parameters(), *training.model.named_buffers()):
        if value.is_meta:
            raise InvalidSettingsError(
                f"{name} of the model is on the meta device, which holds no values to train; give a model on the CPU"
            )
    frozen = [name for name, each in training.model.named_modules() if not each.training]
    if training.model.training and frozen and not isinstance(training.train_fn, ModelStep):
        log.warning(
            "parts of the model are in eval mode, and stay in it: %s. Dropout does nothing there, and batch "
            "normalisation uses its running statistics. Call model.train() before fit if that is not meant",
            ", ".join([*frozen[:3], *["..."][: len(frozen) - 3]]),
        )
    for name, module in training.model.named_modules():
        for option, does in _OF_TABLES.items() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) else ():
            if getattr(module, option) and not training.loss_is_per_worker:
                raise InvalidSettingsError(
                    f"{name or 'the model'} is an {type(module).__name__} with {option}={getattr(module, option)}, "
                    f"which {does}; or set loss_is_per_worker=True to take it as it is: the result then depends on the "
                    "number of workers"
                )
    trained = {id(param) for param in training.model.parameters()}
    for loss in as_list(training.loss):
        own = loss.named_parameters() if isinstance(loss, nn.Module) else ()
        names = [name for name, param in own if param.requires_grad and id(param) not in trained]
        if names:
            raise InvalidSettingsError(
                f"the loss {type(loss).__name__} has parameters of its own ({', '.join(names[:3])}), which would not "
                "be trained: an estimator trains those of the model. Make the loss a module of the model, and give "
                "train_fn, which calls both; or set requires_grad=False"
            )


def _check_forward_changes(
    training: TorchTraining, objective: Objective, model: torch.nn.Module, versions: Mapping[str, int]
) -> None:
    """Raise InvalidSettingsError if forward changes trained parameters in place, by the rows that it is called with."""
    params = {name: param for name, param in model.named_parameters() if name in versions}
    changed = [name for name, param in params.items() if param._version > versions[name]]
    if not changed or training.loss_is_per_worker:
        return
    before = {name: params[name].detach().clone() for name in changed}
    rows = first_rows(training, common.rows_of_losses(4 * sum(map(torch.numel, params.values())), common.ROWS))
    with torch.no_grad():
        objective.forward(model, BatchMaker(training, torch.device("cpu")).parts(rows, 1)[0])
    if differing := [name for name, value in before.items() if not torch.equal(value, params[name])]:
        raise InvalidSettingsError(
            f"forward changes {', '.join(differing[:3])} of the model in place, as torch.nn.functional.embedding does "
            "with max_norm. Each worker would do so by its share of a batch, and its weights would differ from those "
            "of the others. Change them in a hook of the optimizer instead: register_step_post_hook"
        )


def _moved_parameters(
    training: TorchTraining, objective: Objective, model: torch.nn.Module, part: TorchBatch
) -> list[str]:
    """Return the names of frozen parameters that forward changes, as those of a momentum encoder.

    Raises InvalidSettingsError if the training is to be exact: a worker calls the model once for each of its shards.
    """
    if not (frozen := frozen_digests(model)):
        return []
    trained = [param.data for param in model.parameters() if param.requires_grad]
    for value in trained:  # an average that begins with the trained values changes when these have changed
        value.mul_(2.0)
    with contextlib.suppress(Exception), single_row_norm(model, part.rows):  # of other weights than the user's
        objective.forward(model, part)
    for value in trained:
        value.mul_(0.5)
    changed = changed_names(model, frozen)
    moved = [name for name, _ in model.named_parameters() if name in changed]
    if moved and training.virtual_workers is not None:
        raise InvalidSettingsError(
            f"forward changes {', '.join(moved[:3])} of the model, and with consistency='exact' a worker calls it once "
            "for each of its shards, whose number follows from the world. Change them in a hook of the optimizer "
            "instead: register_step_post_hook"
        )
    return moved


def _own_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the dense buffers of a model but those of batch normalisation, which `unconverted` returns."""
    modules = [(name, each) for name, each in model.named_modules() if not is_batch_norm(each)]
    return {
        f"{prefix}.{name}" if prefix else name: value
        for prefix, module in modules
        for name, value in module.named_buffers(recurse=False)
        if value.layout == torch.strided
    }


def _warn_of_buffers_by_rows(
    objective: Objective, model: torch.nn.Module, parts: Sequence[TorchBatch], names: Sequence[str]
) -> None:
    """Warn of buffers and frozen parameters, of those named, that parts of a batch would leave with other values."""
    params = {name: value for name, value in model.named_parameters() if name in names}
    tensors = {**params, **{name: value for name, value in model.named_buffers() if value.layout == torch.strided}}
    start = {name: value.detach().clone() for name, value in tensors.items()}
    generator = torch.random.get_rng_state()
    found = []
    for part in parts:
        torch.random.set_rng_state(generator)
        with torch.no_grad(), single_row_norm(model, part.rows):
            objective.forward(model, part)
        left = {**params, **dict(model.named_buffers())}
        found.append({name: left[name].detach().clone() for name in names})
        for name, value in start.items():
            left[name].data = value.clone()
    common.warn_of_local_batch_statistics(
        [name for name in names if not torch.equal(found[0][name], found[1][name])],
        "forward changes these buffers or frozen parameters by the rows that it is called with",
        "Set loss_is_per_worker=True",
    )


def _check_copy(training: TorchTraining, copied: TorchTraining) -> None:
    """Raise InvalidSettingsError if the workers would train something else than the given model and optimizer."""
    optimizer = training.optimizer
    for name, value in vars(optimizer).items() if isinstance(optimizer, torch.optim.Optimizer) else ():
        if callable(value) and hasattr(type(optimizer), name) and not hasattr(value, "_wrapped_by_lr_sched"):
            raise InvalidSettingsError(
                f"{name} of the optimizer ({type(optimizer).__name__}) was replaced by {value!r}, which the workers "
                "would not call; make a subclass that overrides it, or use register_step_pre_hook and "
                "register_step_post_hook"
            )
    for name in ("torch.nn.modules.module", "torch.optim.optimizer"):
        for kind, hooks in vars(sys.modules[name]).items():
            if _GLOBAL_HOOKS.match(kind) and any(hook is not note_step for hook in hooks.values()):
                raise InvalidSettingsError(
                    f"hooks are registered for all modules or optimizers ({name}.{kind}), and workers would not call "
                    "them; register them on the model or the optimizer, or remove them before fit"
                )
    names = ("optimizer", "loss") if isinstance(training.model, ModelFunction) else ("model", "optimizer", "loss")
    here, there = ({name: getattr(each, name) for name in names} for each in (training, copied))
    if lost := differences(here, there):
        raise InvalidSettingsError(
            f"what the workers get differs from what was given: {'; '.join(lost[:3])}. A __getstate__, __reduce__ or "
            "tensor class of your own leaves it out when it is pickled: keep it there, or set it in on_fit_begin of a "
            "callback, which runs in every worker"
        )


@contextlib.contextmanager
def _gradients_at_once(model: torch.nn.Module) -> Iterator[None]:
    """Raise InvalidSettingsError if a backward pass adds to the gradient of a parameter several times."""
    counts: Counter[str] = Counter()
    handles = [
        param.register_post_accumulate_grad_hook(lambda _, name=name: counts.update([name]))  # type: ignore[no-untyped-call]
        for name, param in model.named_parameters()
        if param.requires_grad
    ]
    yield
    for handle in handles:
        handle.remove()
    for name, count in counts.items():
        if count > 1:
            raise InvalidSettingsError(
                f"the backward pass adds to the gradient of {name} {count} times, and it is sent to the other workers "
                "after the first; torch.utils.checkpoint does so where several of its segments use a parameter: give "
                "it use_reentrant=False"
            )


def _validation(training: TorchTraining, objective: Objective, part: TorchBatch) -> ForwardResult | None:
    """Call the model as in a validation, where it may return something else; None without a validation."""
    if not training.validates:
        return None
    objective.set_mode(training.model, False)
    with user_code(f"{subject(training)} in validation", part.rows, part.tensors), torch.no_grad():
        objective.prepare(training.model, StepPosition(step=1))
        result = _kept(objective.forward(training.model, part))
    objective.set_mode(training.model, True)
    return result


def _kept(result: ForwardResult) -> ForwardResult:
    """Return the result with copies of the metrics that it logs, whose states the next call would reset."""
    return replace(result, logged={key: copy.deepcopy(value) for key, value in result.logged.items()})


def _logged(*results: ForwardResult | None) -> dict[LoggedName, Any]:
    """Return what the results log, as `TorchTraining.logged`; warn of names that are columns of every history."""
    found: dict[LoggedName, Any] = {}
    for key, logged in [pair for result in results if result is not None for pair in result.logged.items()]:
        if key.name in FACTS:
            log.warning("self.log(%r) is ignored: the history has a column of that name of its own", key.name)
        else:
            found[key] = None if isinstance(logged.value, float) else logged.value
    return found


def _check_writable(
    training: TorchTraining, model: torch.nn.Module, optimizer: torch.optim.Optimizer, schedule: LearningRateSchedule
) -> None:
    """Raise InvalidSettingsError if the model or a checkpoint could not be written."""
    try:
        detached(model.state_dict(), "the model", copy=False)
        common.check_callback_states(training.callbacks)
        if training.checkpoints is not None:
            detached(optimizer.state_dict(), "the optimizer", copy=False)
            if schedule.scheduler is not None:
                detached(schedule.scheduler.state_dict(), "the lr_scheduler", copy=False)
    except CheckpointError as error:
        raise InvalidSettingsError(f"the training's state cannot be written: {error}") from error
