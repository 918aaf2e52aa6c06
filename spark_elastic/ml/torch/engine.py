"""The steps and measurements of a PyTorch module: `training.engine.Engine`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import torch

import spark_elastic.torch as hvd
from spark_elastic.collective.fused import without_rows
from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.data.order.permutation import derived_key
from spark_elastic.data.reader import Batch
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.torch.batch_norm import normalised_alone
from spark_elastic.ml.torch.batches import BatchMaker
from spark_elastic.ml.torch.metrics import Tally
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.optimizers import Schedule
from spark_elastic.ml.torch.serialization import detached, from_bytes, to_bytes
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining
from spark_elastic.ml.training.engine import Measured, gather_pieces
from spark_elastic.ml.training.progress import Piece, Progress, Sums
from spark_elastic.torch.sync_batch_norm import SyncBatchNorm

TENSORS = "state.pt"


class TorchEngine:
    """See `training.train` for how it is put together.

    optimizer: of `hvd.DistributedOptimizer`, with op=Sum. best: a copy of the model for the weights of the best epoch.
    """

    def __init__(
        self,
        training: TorchTraining,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        best: torch.nn.Module | None,
        objective: Objective,
        tally: Tally,
        schedule: Schedule,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.best = best
        self.gathers = tally.gathers
        self._training = training
        self._objective = objective
        self._tally = tally
        self._schedule = schedule
        self._device = device
        self._maker = BatchMaker(training, device)
        named = [(name, param, param.requires_grad) for name, param in model.named_parameters()]
        trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
        self._named = named
        self._params = [param for _, param, requires_grad in named if requires_grad and id(param) in trained]
        self._others = [param for _, param, requires_grad in named if requires_grad and id(param) not in trained]
        """Of no optimizer: their gradients are each worker's own and must not add to anything."""
        self._buffers = list(model.buffers())
        self._synchronised = [module for module in model.modules() if isinstance(module, SyncBatchNorm)]
        self._rank, self._size = 0, 1
        self._own_loss: float | None = None
        """Of this worker's rows of the last step, if it was no finite number."""

    @property
    def keeps_best(self) -> bool:
        return self.best is not None

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def enter(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def use_threads(self, count: int) -> None:
        if count != torch.get_num_threads():
            torch.set_num_threads(count)

    def feed(self, batches: Generator[Batch]) -> Generator[Batch]:
        return batches

    # --- steps ------------------------------------------------------------------------------------

    def begin_steps(self) -> None:
        self.model.train()

    def step(self, batch: Batch, at: Progress, stop: bool) -> Measured:
        self._seed(at.epoch, batch.start)
        self._check_frozen()
        self.optimizer.zero_grad()
        for param in self._others:
            param.grad = None
        numbers, pieces = self._gradients(batch, stop)
        self._apply()
        self._schedule.after_step()
        return Measured(numbers[:-1].numpy(), pieces, bool(numbers[-1]))

    def _check_frozen(self) -> None:
        """Raises: InvalidSettingsError: a parameter was frozen or thawed. Which are reduced was agreed on before; of
        others each worker would have gradients of its own.
        """
        for name, param, before in self._named:
            if param.requires_grad != before:
                raise InvalidSettingsError(
                    f"requires_grad of {name} was set to {param.requires_grad} during the training, which other and "
                    "later workers do not know of. Give it a param group of its own with lr=0, and change that lr in "
                    "a callback (run.optimizer.param_groups); or train twice, with the parameter frozen in one of them"
                )

    def _gradients(self, batch: Batch, stop: bool) -> tuple[torch.Tensor, tuple[Piece, ...]]:
        """Forward and backward. Returns what was measured of these rows, and the stop flag behind it: float64. They go
        with the gradients, so that the optimizer's step makes them the sums over all workers.
        """
        model, objective, tally = self.model, self._objective, self._tally
        parts = self._maker.parts(batch)
        counts: Sequence[float] = ()
        if objective.normalised:
            shares = torch.tensor(objective.counts(parts), dtype=torch.float64)
            counts = hvd.allreduce_(shares, op=hvd.Sum).tolist()
        numbers = torch.zeros(tally.width + 1, dtype=torch.float64)
        numbers[-1] = stop
        pieces: list[Piece] = []
        share = None
        passes = max(len(parts), self._passes_of_all(batch))
        for number in range(passes):
            if number < len(parts):
                part = parts[number]
                with normalised_alone(model, part.rows):
                    measured = objective.measure(model, part)
                share = objective.share(measured, batch.global_rows, counts)
                pieces.append(tally.measure(measured, part.rows, numbers))
            else:
                with without_rows():
                    measured = objective.measure(model, self._maker.stand_in())
                share = objective.share(measured, batch.global_rows, counts) * 0.0
            if number < passes - 1:
                share.backward()  # type: ignore[no-untyped-call]
        self._own_loss = tally.lost(numbers)
        self.optimizer.attach_scalars(numbers)
        everyones = gather_pieces(pieces) if tally.gathers else ()
        if share is not None:
            share.backward()  # type: ignore[no-untyped-call]
        return numbers, everyones

    def _passes_of_all(self, batch: Batch) -> int:
        """Return how often each worker has to call the model for this batch, whatever rows it has; 0: as it likes."""
        if not any(layer.takes_part for layer in self._synchronised):
            return 0
        return min(self._training.accumulation, -(-batch.global_rows // self._size))

    def _apply(self) -> None:
        """The optimizer's step, with the gradients of all workers."""
        training, optimizer = self._training, self.optimizer
        if self._size == 1:
            # With others, a parameter that has no gradient takes part with zeros; alone it must not be otherwise.
            for param in self._params:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
        if training.clip_norm is None and training.clip_value is None:
            optimizer.step()
            return
        optimizer.synchronize()
        if training.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._params, training.clip_norm)
        if training.clip_value is not None:
            torch.nn.utils.clip_grad_value_(self._params, training.clip_value)
        with optimizer.skip_synchronize():
            optimizer.step()

    def _seed(self, epoch: int, position: int) -> None:
        """The random numbers of a step are its own: the same if it is done again, or after a resume."""
        key = derived_key(self._training.seed, epoch, position, self._rank)
        torch.default_generator.manual_seed(key >> 1)
        if self._device.type == "cuda":
            torch.cuda.manual_seed(key >> 1)

    # --- measurements -----------------------------------------------------------------------------

    def begin_validation(self) -> None:
        self.model.eval()

    def measure(self, batches: Iterable[Batch]) -> tuple[Sums, list[Piece]]:
        numbers = torch.zeros(self._tally.width, dtype=torch.float64)
        pieces: list[Piece] = []
        with torch.no_grad():
            for batch in batches:
                for part in self._maker.parts(batch):
                    measured = self._objective.measure(self.model, part)
                    pieces.append(self._tally.measure(measured, part.rows, numbers))
        return numbers.numpy(), pieces

    def share_buffers(self) -> None:
        if self._size > 1 and self._buffers:
            broadcast_tensors(self._buffers, 0)

    def logs(self, sums: Sums, pieces: Sequence[Piece], prefix: str = "") -> dict[str, float]:
        return self._tally.logs(sums, pieces, prefix)

    def rows(self, sums: Sums) -> int:
        return self._tally.rows(sums)

    def non_finite_loss(self, sums: Sums) -> float | None:
        return self._tally.lost(sums)

    def has_local_non_finite_loss(self) -> bool:
        return self._own_loss is not None

    def has_nan(self) -> bool:
        return any(bool(param.detach().isnan().any()) for param in self._params)

    def live_logs(self, sums: Sums) -> dict[str, float]:
        return self._tally.told(sums)

    # --- ends -------------------------------------------------------------------------------------

    def after_epoch(self, row: Mapping[str, float]) -> None:
        self._schedule.after_epoch(row)

    def after_callbacks(self) -> None: ...

    def keep_best(self) -> None:
        assert self.best is not None
        self.best.load_state_dict(self.model.state_dict())

    def use_best(self) -> None:
        assert self.best is not None
        self.model.load_state_dict(self.best.state_dict())

    def finish(self) -> None: ...

    def model_file(self) -> tuple[str, bytes]:
        return MODEL_FILE, to_bytes(detached(self.model.state_dict(), "the model"))

    def copies(self, at: Progress) -> Callable[[], dict[str, bytes]]:
        """Raises: CheckpointError: the optimizer or the scheduler hold what cannot be written."""
        scheduler, best = self._schedule.scheduler, self.best
        tensors = {
            "model": detached(self.model.state_dict(), "the model"),
            "optimizer": detached(self.optimizer.state_dict(), "the optimizer"),
            "scheduler": None if scheduler is None else detached(scheduler.state_dict(), "the lr_scheduler"),
            "best": None if best is None or at.best_epoch is None else detached(best.state_dict(), "the best model"),
            "pieces": detached(at.pieces, "the metrics"),
            "val_pieces": detached(at.val_pieces, "the metrics"),
        }
        names = () if self._training.allow_nan_loss else tuple(name for name, _, trained in self._named if trained)

        def made() -> dict[str, bytes]:
            for name in names:
                if tensors["model"][name].isnan().any():  # the loss of the next step will be, and end the training
                    raise CheckpointError(f"{name} is NaN after step {at.step}")
            return {TENSORS: to_bytes(tensors)}

        return made

    def load(self, files: Mapping[str, bytes]) -> tuple[tuple[Piece, ...], tuple[Piece, ...]]:
        tensors = from_bytes(files[TENSORS])
        self.model.load_state_dict(tensors["model"])
        self.optimizer.load_state_dict(tensors["optimizer"])
        if self._schedule.scheduler is not None and tensors["scheduler"] is not None:
            self._schedule.scheduler.load_state_dict(tensors["scheduler"])
        if self.best is not None and tensors["best"] is not None:
            self.best.load_state_dict(tensors["best"])
        return tensors["pieces"], tensors["val_pieces"]

    def close(self) -> None:
        self.optimizer.detach()  # the model may be trained again in this process
