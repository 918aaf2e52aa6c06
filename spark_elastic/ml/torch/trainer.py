"""One worker's part of a training, phase by phase.

Between two collectives nothing is done that could not be done again: when one fails, the plain values go back to the
last resume point (`TorchState`), at which model and optimizer still stand, and the phase goes on from there in the next
world. So every change of `state.at` follows the collective that confirms it, and a resume point follows the change.
"""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

import spark_elastic.torch as hvd
from spark_elastic import clock
from spark_elastic.collective.objects import broadcast_tensors
from spark_elastic.core.permutation import derived_key
from spark_elastic.data.batch import Batch
from spark_elastic.data.reader import BatchReader
from spark_elastic.errors import CheckpointError, InvalidSettingsError, StoreError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.checkpoints import CheckpointWriter
from spark_elastic.ml.torch.batches import BatchMaker
from spark_elastic.ml.torch.cores import host_cores, threads_for
from spark_elastic.ml.torch.metrics import Piece, Tally
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.optimizers import Schedule
from spark_elastic.ml.torch.progress import Phase, Progress, added
from spark_elastic.ml.torch.run_view import RunView
from spark_elastic.ml.torch.single_rows import normalised_alone
from spark_elastic.ml.torch.snapshots import detached, snapshot, to_bytes
from spark_elastic.ml.torch.spec import HISTORY_FILE, MODEL_FILE, CheckpointPlan, TorchTraining

log = logging.getLogger("spark_elastic.ml")

TURN_BATCHES = 16
"""Batches of a validation between two reductions: what a kill costs at most, none of which was an applied step."""

WRITE_PAUSES_S = (0.5, 2.0)
"""Before what a whole training has come to is tried to be written again: a storage may be busy."""


class TrainingState(hvd.elastic.TorchState):
    """With turns: changes that count as progress without being a step, so that those who are ahead are followed."""

    model: torch.nn.Module
    optimizer: Any
    best: torch.nn.Module | None
    at: Progress

    def turn_done(self) -> None:
        """`at` has changed after a collective that some may have missed."""
        self._advance()
        self.check_host_updates()


class Trainer:
    """Does the phases of `state.at`. See `training.train` for how it is put together."""

    def __init__(
        self,
        training: TorchTraining,
        *,
        state: TrainingState,
        objective: Objective,
        tally: Tally,
        schedule: Schedule,
        callbacks: Sequence[Callback],
        maker: BatchMaker,
        writer: CheckpointWriter,
        settings: dict[str, Any],
        device: torch.device,
    ) -> None:
        self.training = training
        self.state = state
        self.model = state.model
        self.optimizer = state.optimizer
        self.best = state.best
        self.callbacks = list(callbacks)
        self.device = device
        self._objective = objective
        self._tally = tally
        self._schedule = schedule
        self._maker = maker
        self._writer = writer
        self._settings = settings
        self._plan = training.checkpoints or CheckpointPlan(every_epochs=None, keep=1)
        named = [(name, param, param.requires_grad) for name, param in self.model.named_parameters()]
        trained = {id(param) for group in self.optimizer.param_groups for param in group["params"]}
        self._named = named
        self._params = [param for _, param, requires_grad in named if requires_grad and id(param) in trained]
        self._others = [param for _, param, requires_grad in named if requires_grad and id(param) not in trained]
        """Of no optimizer: their gradients are each worker's own and must not add to anything."""
        self._buffers = list(self.model.buffers())
        self._on_batch_end = _overridden(self.callbacks, "on_batch_end")
        self._validates = training.validates
        self._readers: dict[str, BatchReader] = {}
        self._run = RunView(self)
        self._begun = False
        self.rank, self.size = 0, 1
        self._reader("train").bring()  # here, and not in the first step, for which all the others would wait
        self._last_checkpoint = clock.monotonic()

    # --- worlds -----------------------------------------------------------------------------------

    def go_on(self) -> None:
        """From wherever the state stands to the end; in each new world again.

        Raises: HorovodInternalError, HostsUpdatedInterrupt: for the elastic loop.
        """
        self.rank, self.size = hvd.rank(), hvd.size()
        threads = threads_for(self.training.num_threads, host_cores(), hvd.local_size())
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)
        self._run.forget()
        for reader in self._readers.values():
            reader.set_world(self.rank, self.size)
        if not self._begun:
            self._begun = True
            self._last_checkpoint = clock.monotonic()
            for callback in self.callbacks:
                callback.on_fit_begin(self._run)
        phases: dict[Phase, Callable[[], None]] = {
            Phase.TRAIN: self._train,
            Phase.VALIDATE: self._validate,
            Phase.EPOCH_END: self._end_epoch,
            Phase.FINISH: self._finish,
        }
        while self.state.at.phase is not Phase.DONE:
            phases[self.state.at.phase]()

    @property
    def batch_size(self) -> int:
        """Rows of a global batch in this world."""
        return self.training.batch_size or (self.training.per_worker_batch_size or 1) * self.size

    def close(self) -> None:
        for reader in self._readers.values():
            reader.close()
        self._writer.close()
        self.optimizer.detach()  # the model may be trained again in this process

    def _reader(self, split: str) -> BatchReader:
        if split not in self._readers:
            training = self.training
            self._readers[split] = BatchReader(
                training.dataset,
                split,
                batch_size=self.batch_size,
                rank=self.rank,
                size=self.size,
                seed=training.seed,
                shuffle=training.shuffle and split == "train",
                order=training.order if split == "train" else "auto",
                prefetch=training.prefetch,
                cache_dir=training.cache_dir,
                cache_bytes=training.cache_bytes,
            )
        return self._readers[split]

    # --- training ---------------------------------------------------------------------------------

    def _train(self) -> None:
        state = self.state
        if state.at.began is None:
            if state.at.position == 0:
                for callback in self.callbacks:
                    callback.on_epoch_begin(self._run)
            state.at = replace(state.at, began=clock.wall())
        self.model.train()
        reader = self._reader("train")
        batches = reader.epoch(state.at.epoch, state.at.position, batch_size=self.batch_size)
        with closing(batches):  # whoever keeps the error of a failed step must not keep the threads that read ahead
            for batch in batches:
                self._step(batch, last=batch.stop >= reader.rows)
                if state.at.phase is not Phase.TRAIN:
                    return

    def _step(self, batch: Batch, last: bool) -> None:
        at = self.state.at
        self._seed(at.epoch, batch.start)
        self._check_frozen()
        self.optimizer.zero_grad()
        for param in self._others:
            param.grad = None
        numbers, pieces = self._gradients(batch)
        self._apply()
        self._schedule.after_step()
        phase = Phase.TRAIN
        stopped = at.stopped
        if numbers[-1]:
            stopped = self._run.why or "a callback of another worker has asked for it"
        if last or stopped:
            phase = Phase.VALIDATE if self._validates else Phase.EPOCH_END
        self.state.at = replace(
            at,
            phase=phase,
            position=batch.stop,
            step=at.step + 1,
            serial=at.serial + 1,
            sums=added(at.sums, numbers[:-1].numpy()),
            pieces=at.pieces + pieces,
            stopped=stopped,
        )
        for call in self._on_batch_end:
            call(self._run)
        self._maybe_checkpoint()
        self.state.check_host_updates()

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

    def _gradients(self, batch: Batch) -> tuple[torch.Tensor, tuple[Piece, ...]]:
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
        numbers[-1] = bool(self._run.why)
        pieces: list[Piece] = []
        share = None
        for number, part in enumerate(parts):
            with normalised_alone(model, part.rows):
                measured = objective.measure(model, part)
            share = objective.share(measured, batch.global_rows, counts)
            pieces.append(tally.measure(measured, part.rows, numbers))
            if number < len(parts) - 1:
                share.backward()  # type: ignore[no-untyped-call]
        self.optimizer.carry(numbers)
        everyones = _gather(pieces) if tally.gathers else ()
        if share is not None:
            share.backward()  # type: ignore[no-untyped-call]
        return numbers, everyones

    def _apply(self) -> None:
        """The optimizer's step, with the gradients of all workers."""
        training, optimizer = self.training, self.optimizer
        if self.size == 1:
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
        key = derived_key(self.training.seed, epoch, position, self.rank)
        torch.default_generator.manual_seed(key >> 1)
        if self.device.type == "cuda":
            torch.cuda.manual_seed(key >> 1)

    # --- validation -------------------------------------------------------------------------------

    def _validate(self) -> None:
        state = self.state
        if state.at.val_position == 0:
            self._share_buffers()
        self.model.eval()
        reader = self._reader("validation")
        with closing(reader.epoch(0, state.at.val_position, batch_size=self.batch_size)) as batches:
            self._validate_turns(batches, reader.rows)

    def _validate_turns(self, batches: Iterator[Batch], rows: int) -> None:
        state = self.state
        while state.at.phase is Phase.VALIDATE:
            at = state.at
            numbers = torch.zeros(self._tally.width, dtype=torch.float64)
            pieces: list[Piece] = []
            position = at.val_position
            with torch.no_grad():
                for batch in itertools.islice(batches, TURN_BATCHES):
                    for part in self._maker.parts(batch):
                        measured = self._objective.measure(self.model, part)
                        pieces.append(self._tally.measure(measured, part.rows, numbers))
                    position = batch.stop
            hvd.allreduce_(numbers, op=hvd.Sum)
            everyones = _gather(pieces) if self._tally.gathers else ()
            state.at = replace(
                at,
                phase=Phase.EPOCH_END if position >= rows else Phase.VALIDATE,
                serial=at.serial + 1,
                val_position=position,
                val_sums=added(at.val_sums, numbers.numpy()),
                val_pieces=at.val_pieces + everyones,
            )
            state.turn_done()

    def _share_buffers(self) -> None:
        """Running means and the like are each worker's own while it trains; from here on all have those of rank 0."""
        if self.size > 1 and self._buffers:
            broadcast_tensors(self._buffers, 0)

    # --- the end of an epoch ----------------------------------------------------------------------

    def _end_epoch(self) -> None:
        at, run = self.state.at, self._run
        validated = bool(at.val_sums.size)
        if not validated:
            self._share_buffers()
        logs, val_logs = self._logs(at)
        self._schedule.after_epoch({**logs, **val_logs})
        row = {**logs, **val_logs}
        for callback in self.callbacks:
            run.caller = callback
            if val_logs:
                callback.on_validation_end(run, val_logs)
            callback.on_epoch_end(run, row)
        # Nobody goes on before all have been called, and all go on or stop alike.
        stop = hvd.allreduce_(torch.tensor([float(bool(run.why))]), op=hvd.Max)
        stopped = at.stopped
        if stop.item() and not stopped:
            stopped = run.why or "a callback of another worker has asked for it"
        if run.wants_best and self.best is not None:
            self.best.load_state_dict(self.model.state_dict())
        finished = bool(stopped) or at.epoch + 1 >= self.training.epochs
        self.state.at = Progress(
            phase=Phase.FINISH if finished else Phase.TRAIN,
            epoch=at.epoch + 1,
            step=at.step,
            serial=at.serial + 1,
            history=at.history.with_row(row),
            stopped=stopped,
            best_epoch=at.epoch if run.wants_best else at.best_epoch,
        )
        every = self._plan.every_epochs
        due = every is not None and ((at.epoch + 1) % every == 0 or finished)
        if due or run.wants_checkpoint:
            self._checkpoint(best_of=run.best_of)
        run.forget()
        if self.rank == 0 and math.isnan(row["loss"]) and not any(math.isnan(old["loss"]) for old in at.history):
            log.warning("the loss of epoch %d is not a number; training goes on", at.epoch + 1)
        if self.rank == 0 and self.training.verbose:
            print(_line(row, self.training.epochs), flush=True)
        self.state.turn_done()

    def _logs(self, at: Progress) -> tuple[dict[str, float], dict[str, float]]:
        """Of training and of validation; from the sums and the clock of rank 0, so that they are equal to the bit."""
        seconds = clock.wall() - (at.began or clock.wall())
        facts = torch.tensor([seconds, *at.sums, *at.val_sums], dtype=torch.float64)
        hvd.broadcast_(facts, 0)
        numbers = facts.numpy()
        train, validation = numbers[1 : 1 + at.sums.size], numbers[1 + at.sums.size :]
        logs = {
            "epoch": at.epoch,
            "steps": at.step,
            "rows": self._tally.rows(train),
            "seconds": float(numbers[0]),
            "lr": float(self.optimizer.param_groups[0]["lr"]),
            **self._tally.logs(train, at.pieces),
        }
        return logs, self._tally.logs(validation, at.val_pieces, "val_") if at.val_sums.size else {}

    # --- what lasts -------------------------------------------------------------------------------

    def _maybe_checkpoint(self) -> None:
        plan, run = self._plan, self._run
        if run.wants_checkpoint:
            run.wants_checkpoint = False
            self._checkpoint()
            return
        due = plan.every_steps is not None and self.state.at.step % plan.every_steps == 0
        if plan.every_seconds is not None and not due:
            due = clock.monotonic() - self._last_checkpoint >= plan.every_seconds
        if due:
            self._checkpoint(if_idle=True)

    def _checkpoint(self, best_of: Sequence[str] = (), if_idle: bool = False) -> None:
        """Copy the state and have it written. if_idle: not if the last ones are still being written."""
        if self.rank != 0 or (if_idle and self._writer.busy):
            return
        self._last_checkpoint = clock.monotonic()
        self._writer.submit(
            snapshot(
                self.state.at,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self._schedule.scheduler,
                best=self.best,
                callbacks=self.callbacks,
                settings=self._settings,
                best_of=best_of,
            )
        )
        if self.training.verbose > 1:
            print(f"a checkpoint of step {self.state.at.step} is being written", flush=True)

    def _finish(self) -> None:
        """Write the model. Who is rank 0 now does it, again if the last rank 0 is gone, and all wait for it."""
        state = self.state
        for callback in self.callbacks:
            callback.on_fit_end(self._run)
        if self._run.wants_restore and self.best is not None and state.at.best_epoch is not None:
            self.model.load_state_dict(self.best.state_dict())
        if self.rank == 0:
            self._write(MODEL_FILE, to_bytes(detached(self.model.state_dict(), "the model")))
            self._write(HISTORY_FILE, state.at.history.dumps().encode())
            try:
                self._writer.drain()
            except CheckpointError as error:  # the model is there; what is missing is only what it could go on from
                log.warning("%s", error)
        hvd.barrier()
        state.at = replace(state.at, phase=Phase.DONE, serial=state.at.serial + 1)

    def _write(self, file: str, data: bytes) -> None:
        """Raises: StoreError: the store would not have it, several times."""
        store = self.training.store
        for pause in WRITE_PAUSES_S:
            try:
                store.write_bytes(file, data)
                return
            except Exception as error:  # each kind of storage has its own
                log.warning("%s could not be written to %s and is tried again: %s", file, store.url, error)
                time.sleep(pause)
        try:
            store.write_bytes(file, data)
        except Exception as error:
            raise StoreError(f"the training is done, but {file} cannot be written to {store.url}: {error}") from error

    @property
    def restored(self) -> int | None:
        return self.state.at.best_epoch if self._run.wants_restore else None


def _gather(pieces: list[Piece]) -> tuple[Piece, ...]:
    return tuple(piece for everyones in hvd.allgather_object(pieces) for piece in everyones)


def _overridden(callbacks: Sequence[Callback], event: str) -> list[Callable[..., None]]:
    """The callbacks that do something at this event; most do nothing at every batch."""
    plain = getattr(Callback, event)
    return [call for call in (getattr(one, event) for one in callbacks) if getattr(call, "__func__", call) is not plain]


def _line(row: dict[str, float], epochs: int) -> str:
    values = [
        f"{name} {value:.4g}" for name, value in row.items() if name not in ("epoch", "steps", "rows", "seconds", "lr")
    ]
    return f"epoch {row['epoch'] + 1}/{epochs}  {'  '.join(values)}  {row['seconds']:.1f} s"
