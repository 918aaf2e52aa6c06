"""Training a PyTorch module in a worker: its steps, its measurements, and putting the trainer together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

import spark_elastic.torch as hvd
from spark_elastic.collective.batch_statistics import without_rows
from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.data.order.permutation import derived_key
from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.params import as_list
from spark_elastic.ml.preparation import LABEL, WEIGHT
from spark_elastic.ml.torch.fidelity import hooks_of
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.model_step import READ_AT_ONCE, ForwardResult, ModelStep, StepPosition, TorchBatch
from spark_elastic.ml.torch.objective import BatchesAhead, BatchMaker, Objective
from spark_elastic.ml.torch.serialization import load_state, state_of, weights_to_bytes
from spark_elastic.ml.torch.spec import MODEL_FILE, LearningRateSchedule, TorchTraining, build_optimizer
from spark_elastic.ml.training.engine import Engine, Measured, gather_pieces
from spark_elastic.ml.training.spec import Piece, Progress, Sums
from spark_elastic.runs.tensors import detached, from_bytes, to_bytes
from spark_elastic.task.freed_memory import return_freed_memory
from spark_elastic.torch.sync_batch_norm import SyncBatchNorm
from spark_elastic.wire.pickling import round_trip

log = logging.getLogger("spark_elastic.ml")

TENSORS = "state.pt"  # the file of a checkpoint with all tensors


class TorchEngine(Engine):
    """The `Engine` of one module: moves the module to the device, and makes its optimizer, losses and metrics."""

    metrics: TorchMetricAccumulator

    def __init__(self, training: TorchTraining, keeps_best: bool) -> None:
        self._device = hvd.device(training.device)
        best = copy_of_model(training).to(self._device) if keeps_best else None
        for param in () if best is None else best.parameters():  # a scripted module has no requires_grad_()
            param.requires_grad_(False)
        model = training.model.to(self._device)
        self._uncompile = compile_model(training, model)
        if training.sync_batch_norm:
            SyncBatchNorm.convert_sync_batchnorm(model)
            for layer in model.modules():
                if isinstance(layer, SyncBatchNorm):
                    layer.single_value_is_normalised = True  # by running statistics, as in `single_row_norm`
        optimizer = build_optimizer(training.optimizer, model)
        self.schedule = LearningRateSchedule(training, optimizer)
        self._hooks = GradientHooks(model)
        self.scaler = torch.amp.GradScaler(self._device.type) if training.amp == "fp16" else None
        if self.scaler is not None:  # creates its scale, which a worker without rows in its first batch needs as well
            self.scaler.scale(torch.zeros((), device=self._device))
        self._objective = objective_of(training, self._device)
        metrics = TorchMetricAccumulator(self._objective, training.metrics, training.logged)
        self._maker = BatchMaker(training, self._device)
        self._named = [(name, param, param.requires_grad) for name, param in model.named_parameters()]
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        named = [(name, param) for name, param, _ in self._named if id(param) in trained]
        super().__init__(training, model, self._reducing(training, model, optimizer, named), best, metrics)
        self.gathers = metrics.gathers
        with_grad = [param for _, param, requires_grad in self._named if requires_grad]
        self._params = [param for param in with_grad if id(param) in trained]
        self._others = [param for param in with_grad if id(param) not in trained]
        """Parameters of no optimizer. Their gradients differ between workers and must not accumulate."""
        self._frozen = training.frozen or {}  # what no file of the training needs as long as it is unchanged
        self.moved = [param for name, param, _ in self._named if name in training.moved]
        self._buffers = list(model.buffers())
        self._synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
        self.has_own_statistics = any(
            isinstance(each, _BatchNorm) and not isinstance(each, SyncBatchNorm) for each in model.modules()
        )
        self.balances = self._device.type == "cpu"
        self._validated = Progress()  # the progress of the training at the last `begin_validation`
        self._ahead: BatchesAhead | None = None
        self._own_numbers = torch.zeros(0)  # what this worker's rows have added to the sums of the last step

    def _reducing(self, training: TorchTraining, model: torch.nn.Module, optimizer: Any, named: Any) -> Any:
        """Return the optimizer whose steps use the gradients of all workers; `named` are its parameters by name."""
        return hvd.DistributedOptimizer(
            optimizer,
            named_parameters=named,
            compression=getattr(hvd.Compression, training.gradient_compression),
            backward_passes_per_step=training.accumulation_steps,
            op=hvd.Sum,
        )

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def use_threads(self, count: int) -> None:
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    def begin_steps(self) -> None:
        self._objective.set_mode(self.model, True)

    def ahead(self, batches: Iterator[Batch], rows: int) -> Iterator[Batch]:
        # the user's function may draw random numbers, of which each step has its own
        if self._device.type in READ_AT_ONCE or self._training.transformation_fn is not None:
            return batches
        self._ahead = BatchesAhead(batches, rows, self._maker)
        return self._ahead

    def step(self, batch: Batch, at: Progress, stop: bool) -> Measured:
        self._seed(at.epoch, batch.start)
        self._check_frozen()
        begun = int(at.history[-1]["steps"]) if at.history else 0
        self._objective.prepare(self.model, self._position(at, at.step - begun))
        self.optimizer.zero_grad()
        for param in self._others:
            param.grad = None
        numbers, pieces = self._gradients(batch, at, stop)
        self._apply(numbers, batch.global_rows)
        self.schedule.after_step()
        return self._measured(numbers.numpy(), pieces)

    def _check_frozen(self) -> None:
        """Raise InvalidSettingsError if a parameter was frozen or unfrozen: those to reduce were agreed on before."""
        for name, param, before in self._named:
            if param.requires_grad != before:
                raise InvalidSettingsError(
                    f"requires_grad of {name} was set to {param.requires_grad} during the training, which other and "
                    "later workers do not know of. Give the parameter a param group of its own with lr=0, and change "
                    "that lr in a callback (run.optimizer.param_groups); or train twice, with the parameter frozen in "
                    "one of them"
                )

    def _gradients(self, batch: Batch, at: Progress, stop: bool) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """Run forward and backward over the parts of a batch, and reduce the gradients.

        Returns the sums and votes of all workers, and the metric states that were gathered.
        """
        objective, metrics = self._objective, self.metrics
        ahead = self._ahead
        parts = self._maker.parts(batch) if ahead is None else ahead.parts(batch)
        votes = torch.tensor(self._votes(stop), dtype=torch.float64)
        numbers = torch.zeros(metrics.width + len(votes), dtype=torch.float64)
        own = self._sums(len(numbers))
        own[metrics.width :].copy_(votes, non_blocking=True)
        pieces: list[Piece] = []
        counts: Sequence[float] = ()
        share = None
        missing = max(0, self._passes(batch.global_rows) - len(parts))
        # Every worker makes the same number of forward passes: layers may have a state that each of them changes. With
        # synchronised layers, which have collectives, there are backward passes too.
        without = missing if any(layer.takes_part for layer in self._synchronised) else 0
        for _ in range(missing - without):
            self._forward(parts, -1)
        passes = without + len(parts)
        results: Iterable[ForwardResult] = (self._forward(parts, number - without) for number in range(passes))
        if objective.coupled:
            results = list(results)
            table = [torch.tensor([*map(float, each.counts)], dtype=torch.float64) for each in results[without:]]
            counts = hvd.allreduce_(sum(table, torch.zeros(len(objective), dtype=torch.float64)), op=hvd.Sum).tolist()
        for number, result in enumerate(results):
            share = objective.share(result, batch.global_rows, counts)
            if number < without:
                share = share * 0.0
            else:
                pieces.append(metrics.measure(result, parts[number - without].rows, own))
            if number < passes - 1:
                with without_rows() if number < without else nullcontext():
                    self._backward(share)
        self._own_numbers = own
        self.optimizer.attach_scalars(own, numbers)
        all_pieces = gather_pieces(pieces) if metrics.gathers else ()
        if ahead is not None:  # the GPU computes what it has been given; afterwards this thread waits for it
            ahead.fetch(batch)
        if share is not None:
            with nullcontext() if parts else without_rows():
                self._backward(share)
        self.optimizer.synchronize()
        return numbers, all_pieces

    def _sums(self, width: int) -> torch.Tensor:
        """Return zeros for sums over rows; on a GPU, they are read at the end of a step or of a validation."""
        device = "cpu" if self._device.type in READ_AT_ONCE else self._device
        return torch.zeros(width, dtype=torch.float64, device=device)

    def _backward(self, share: torch.Tensor) -> None:
        (share if self.scaler is None else self.scaler.scale(share)).backward()  # type: ignore[no-untyped-call]

    def _forward(self, parts: Sequence[TorchBatch], number: int) -> ForwardResult:
        """Run the forward pass of a part; below 0, of the first row without counting it."""
        if number < 0:
            with without_rows(), single_row_norm(self.model, 1):
                return self._objective.forward(self.model, self._maker.first_row)
        with single_row_norm(self.model, parts[number].rows):
            return self._objective.forward(self.model, parts[number])

    def _apply(self, numbers: torch.Tensor, global_rows: int) -> None:
        """Scale and clip the reduced gradients, and do the optimizer's step."""
        training = self._training
        counts = numbers[1 : self.metrics.rows_position : 2].tolist()
        if (scale := self._objective.scale(counts, global_rows)) != 1.0:
            for param in self._params:
                if param.grad is not None:
                    param.grad.mul_(scale)
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        self._hooks.call()
        clip_gradients(self._params, training.gradient_clip_norm, training.gradient_clip_value)
        self.updating = True
        # the gradients are reduced, also those of an exact training, whose optimizer is the user's
        with getattr(self.optimizer, "skip_synchronize", nullcontext)():
            if self.scaler is None:
                self.optimizer.step()
            else:  # without a step if a gradient is not finite, which all workers see alike
                self.scaler.step(self.optimizer)
                self.scaler.update()
        self.updating = False

    def _seed(self, epoch: int, position: int) -> None:
        """Seed a step's random numbers by (seed, epoch, position, rank), so that a repeated step draws the same."""
        key = derived_key(self._training.seed, epoch, position, self._rank)
        torch.default_generator.manual_seed(key >> 1)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(key >> 1)

    def begin_validation(self, at: Progress) -> None:
        self._objective.set_mode(self.model, False)
        self._validated = at

    def measure(self, batches: Iterable[Batch]) -> tuple[Sums, list[Piece]]:
        numbers = self._sums(self.metrics.width)
        pieces: list[Piece] = []
        at, training = self._validated, self._training
        global_rows = training.batch_size or (training.per_worker_batch_size or 1) * self._size
        with torch.no_grad():
            for batch in batches:
                index = batch.start // global_rows
                self._objective.prepare(self.model, self._position(at, index))
                for part in self._maker.parts(batch):
                    result = self._objective.forward(self.model, part)
                    pieces.append(self.metrics.measure(result, part.rows, numbers))
        return numbers.cpu().numpy(), pieces

    def _position(self, at: Progress, index: int) -> StepPosition:
        return StepPosition(at.epoch, at.step, index, self._rank, self._size, hvd.local_rank())

    def share_buffers(self) -> None:
        if self._size > 1 and self._buffers:
            broadcast_tensors(self._buffers, 0)

    def has_local_non_finite_loss(self) -> bool:
        return self.metrics.non_finite_loss(self._own_numbers.cpu().numpy()) is not None

    def has_nan(self) -> bool:
        return any(bool(param.detach().isnan().any()) for param in self._params)

    def after_epoch(self, row: Mapping[str, float]) -> None:
        self.schedule.after_epoch(row)

    def copy_weights(self, source: torch.nn.Module, target: torch.nn.Module) -> None:
        load_state(target, state_of(source))

    def finish(self) -> None:
        self.optimizer.detach()
        for param in self.model.parameters():  # views of buckets, which are as large as the file of the model
            param.grad = None
        return_freed_memory()

    def model_file(self) -> tuple[str, bytes]:
        return MODEL_FILE, weights_to_bytes(self.model, self._frozen)

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        # `detached` and `encode` raise CheckpointError if something cannot be written, or a parameter is NaN.
        scheduler, best, frozen = self.schedule.scheduler, self.best, self._frozen
        tensors = {
            "model": state_of(self.model, frozen=frozen),
            "optimizer": detached(self.optimizer.state_dict(), "the optimizer"),
            "scheduler": None if scheduler is None else detached(scheduler.state_dict(), "the lr_scheduler"),
            "scaler": None if self.scaler is None else detached(self.scaler.state_dict(), "the GradScaler"),
            "best": None if best is None or at.best_epoch is None else state_of(best, "the best model", frozen=frozen),
            "pieces": detached(at.pieces, "the metrics"),
            "val_pieces": detached(at.val_pieces, "the metrics"),
        }
        names = () if self._training.allow_nan_loss else tuple(name for name, _, trained in self._named if trained)

        def encode() -> dict[str, bytes]:
            for name in names:
                if tensors["model"][name].isnan().any():  # the next step's loss will be NaN too and end the training
                    raise CheckpointError(f"{name} is NaN after step {at.step}")
            return {TENSORS: to_bytes(tensors)}

        return encode

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        tensors = from_bytes(files[TENSORS])
        load_state(self.model, tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        if self.schedule.scheduler is not None and tensors["scheduler"] is not None:
            self.schedule.scheduler.load_state_dict(tensors["scheduler"])
        if self.scaler is not None and tensors.get("scaler") is not None:
            self.scaler.load_state_dict(tensors["scaler"])
        if self.best is not None and tensors["best"] is not None:
            load_state(self.best, tensors["best"])
        return tensors["pieces"], tensors["val_pieces"]

    def close(self) -> None:
        self._hooks.put_back()
        self._uncompile()
        self._uncompile = lambda: None
        self.optimizer.detach()  # the model may be trained again in this process


def compile_model(training: TorchTraining, model: torch.nn.Module) -> Callable[[], object]:
    """Compile the model in place, if that is asked for; return a function that undoes it.

    Its class and the names in its state_dict stay the same. `Module.compile` would not do: it compiles nothing of a
    torch.nn.Sequential of torch's own layers.
    """
    if not training.compile:
        return lambda: None
    module = training.train_fn.compiled(model) if isinstance(training.train_fn, ModelStep) else model
    undo = partial(setattr, module, "forward", module.forward)
    if "forward" not in vars(module):
        undo = partial(delattr, module, "forward")
    backend: Any = {} if training.compile is True else {"backend": training.compile}
    module.forward = torch.compile(module.forward, **backend)
    return undo


def copy_of_model(training: TorchTraining) -> torch.nn.Module:
    """Return a copy of the model: pickled and loaded, or made by its function if it was given as one."""
    if training.made_by is None:
        return round_trip(training.model)  # type: ignore[no-any-return]
    copied = training.made_by()
    load_state(copied, state_of(training.model, copy=False))
    return copied


@contextmanager
def single_row_norm(model: torch.nn.Module, rows: int) -> Iterator[None]:
    """Let batch normalisation use its running statistics for one value per channel, without updating them.

    One value has no variance, so torch raises, and a worker's share of a batch can be a single row in one world only.
    """

    def choose_mode(norm: torch.nn.Module, args: tuple[Any, ...]) -> None:
        norm.training = args[0].numel() > args[0].shape[1]

    modules = model.modules() if rows == 1 else ()
    norms = [each for each in modules if isinstance(each, _BatchNorm) and each.training]
    norms = [each for each in norms if not (isinstance(each, SyncBatchNorm) and each.takes_part)]
    handles = [each.register_forward_pre_hook(choose_mode) for each in norms if each.running_mean is not None]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for each in norms:
            each.training = True


def clip_gradients(params: Iterable[torch.Tensor], norm: float | None, value: float | None) -> None:
    """Bound the norm of all gradients together, then each of their values, in place; a sparse gradient's by entries."""
    clipped = []
    for param in params:
        if param.grad is not None and param.grad.is_sparse:  # torch clips dense gradients alone
            param.grad = param.grad.coalesce()
            entries = param.grad.values()
            param = torch.empty_like(entries)
            param.grad = entries
        clipped.append(param)
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(clipped, norm)
    if value is not None:
        torch.nn.utils.clip_grad_value_(clipped, value)


class GradientHooks:
    """The user's hooks of parameters, called with reduced gradients; torch would call them with those of a share."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._hooks = [(param, *hooks) for param in model.parameters() if any(hooks := hooks_of(param))]
        for param, *_ in self._hooks:
            _set_hooks(param, None, None)

    @torch.no_grad()
    def call(self) -> None:
        """Call the hooks of all parameters that have a gradient, in the order of torch."""
        for param, of_gradient, of_param in self._hooks:
            if param.grad is None:
                continue
            for hook in list(of_gradient.values()):
                changed = hook(param.grad)
                param.grad = param.grad if changed is None else changed
            for hook in list(of_param.values()):
                hook(param)

    def put_back(self) -> None:
        for param, *hooks in self._hooks:
            _set_hooks(param, *hooks)
        self._hooks = []


def _set_hooks(param: Any, of_gradient: Any, of_param: Any) -> None:
    param._backward_hooks, param._post_accumulate_grad_hooks = of_gradient or None, of_param or None


def objective_of(training: TorchTraining, device: torch.device | None = None) -> Objective:
    """Build the losses of a training; move their tensors, such as class weights, to the device, if one is given."""
    if device is not None:
        for loss in as_list(training.loss):
            if isinstance(loss, torch.nn.Module):
                loss.to(device)
    names = {field.name for field in training.dataset.layout.fields}
    return Objective(
        training.loss,
        training.train_fn,
        labels=sum(name.startswith(LABEL) for name in names),
        weighted=WEIGHT in names,
        loss_weights=training.loss_weights,
        paired=training.paired,
        precision=_precision(training.amp, device),
    )


def _precision(amp: str | None, device: torch.device | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the context of a forward pass and its losses; without a device, of a dry run, full precision.

    A dry run compares losses, closer than half precision allows.
    """
    if amp is None or device is None:
        return nullcontext
    return partial(torch.autocast, device.type, torch.float16 if amp == "fp16" else torch.bfloat16)
