"""The trainer: one worker's part of a training, phase by phase.

Everything between two collectives can be repeated. When a collective fails, the plain values go back to the last mark
(`ElasticState`), where model and optimizer still are, and the phase continues from there in the next world. So every
change of `state.at` follows the collective that confirms it, and a mark (`check_host_updates`) follows the change.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch

from spark_elastic import clock
from spark_elastic.collective.group import waited
from spark_elastic.collective.operations import allreduce_, barrier, broadcast_
from spark_elastic.collective.operators import Max
from spark_elastic.collective.process import process
from spark_elastic.data.order.shares import Balancer, Shares
from spark_elastic.data.reader import Batch, BatchReader
from spark_elastic.elastic.handlers import Handlers, StateHandler
from spark_elastic.elastic.loop import run
from spark_elastic.elastic.mark import OptimizerSteps, StepCounter
from spark_elastic.errors import CheckpointError, HorovodInternalError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.training.engine import CallbackEvent, Engine, Measured, TrainingState, host_cores, threads_for
from spark_elastic.ml.training.reporting import EpochRows, Reporter, RunView, loss_and_metrics
from spark_elastic.ml.training.saving import CheckpointSchedule, ResultWriter, save_timeout_s
from spark_elastic.ml.training.spec import (
    HISTORY_FILE,
    STOPPED_ELSEWHERE,
    Diverged,
    Progress,
    Training,
    TrainingPhase,
    TrainingResult,
    add_sums,
)
from spark_elastic.reporting.progress import epoch_line
from spark_elastic.runs.checkpoints import SLOW_S
from spark_elastic.wire import worker_link
from spark_elastic.wire.worker_link import notify

log = logging.getLogger("spark_elastic.ml")

VALIDATION_TURN_BATCHES = 16  # between two reductions: the most that is repeated when a worker is lost
POLL_S = 0.5
"""Wait for this worker's files between two reductions at the end. Saving may take minutes, and the reductions show the
other workers meanwhile that this one is not stuck."""


class Trainer:
    """Runs the phases of a training in one worker: train, validate, epoch end, finish.

    `state.at` is the progress of the training, with the next phase; `view` shows it to callbacks and the reporter.
    `callback_states`, as one value of the elastic state, `handler_of`, `make_steps` and `values` are as of it.
    """

    def __init__(
        self,
        training: Training,
        engine: Engine,
        callbacks: Sequence[Callback],
        callback_states: Any,
        handler_of: Callable[[Any], StateHandler | None],
        make_steps: Callable[[Handlers, StepCounter], OptimizerSteps],
        **values: Any,
    ) -> None:
        self.training = training
        self.engine = engine
        self._checkpoints = CheckpointSchedule(training, engine, callbacks)
        values = {"model": engine.model, "optimizer": engine.optimizer, **values, "best": engine.best}
        values |= {"callbacks": callback_states, "at": self._checkpoints.first_progress()}
        self.state = state = TrainingState(handler_of, make_steps, values)
        state.engine = engine
        self.callbacks = list(callbacks)
        self.view = RunView(training, engine, state)
        link, decides_s = worker_link.current(), training.driver_decides_s
        self.reporter = None if link is None else Reporter(self.view, link)
        self.epoch_rows = None if link is None or decides_s is None else EpochRows(self.view, link, decides_s)
        self._caused_divergence = False
        self._readers: dict[str, BatchReader] = {}
        self._balancer: Balancer | None = None
        self.shares: Shares = None
        self._step_s = 0.0  # the time of the last step
        self._begun = False
        self._save_timeout_s = save_timeout_s(os.environ)
        self._result_writer: ResultWriter | None = None  # set once this worker was rank 0 at the end of the training
        self._phases = {
            TrainingPhase.TRAIN: self._train,
            TrainingPhase.VALIDATE: self._validate,
            TrainingPhase.EPOCH_END: self._end_epoch,
            TrainingPhase.FINISH: self._finish,
        }
        # Here and not in the first step, for which all the other workers would have to wait.
        self._reader("train").preload()

    def run(self) -> TrainingResult:
        @run
        def loop(state: TrainingState) -> TrainingResult:
            self.run_in_world()
            return self._result()

        try:
            return loop(self.state)
        finally:
            self.close()

    def run_in_world(self) -> None:
        """Continue from the present state to the end; called again in each new world."""
        world = process.require()
        self.view.rank, self.view.size = world.rank, world.size
        if self._begun and self.epoch_rows is not None:
            self.epoch_rows.resend()
        at = self.state.at
        if at.phase is TrainingPhase.DONE:
            return  # a worker was lost after the end, and this one took over the final state
        self.engine.use_threads(threads_for(self.training.num_threads, host_cores(), world.local_size))
        self.engine.worked_ns = 0  # it counts from the second step on
        self.view.timed = [0.0] * (world.size + 1)
        self._balancer = None
        if self.training.balance == "auto":
            self._balancer = Balancer(world.size, *self.engine.divided(self._batch_size))
        self._set_shares(None)
        self.view.clear_requests()
        if not self._begun:
            self._begun = True
            self._checkpoints.restart_clock()
            if self.reporter is not None:
                self.reporter.start()
            if self.epoch_rows is not None:
                self.epoch_rows.start()
            self.engine.seed_callbacks(CallbackEvent.FIT_BEGIN)
            for callback in self.callbacks:
                callback.on_fit_begin(self.view)
        while (phase := self.state.at.phase) is not TrainingPhase.DONE:
            self._phases[phase]()

    def _set_shares(self, shares: Shares) -> None:
        """Divide the batches by these shares from the next one on, as all workers do between the same two steps."""
        self.shares = shares
        self.engine.set_world(self.view.rank, self.view.size, shares)
        for reader in self._readers.values():
            reader.set_world(*self.engine.reader_world)

    def _limit_share(self, error: Exception) -> None:
        """Leave the world for one with equal shares, if this worker has too little memory for more than that."""
        rank, size, shares = self.view.rank, self.view.size, self.shares
        if shares is not None and shares[rank] > (equal := sum(shares) // size):
            self.engine.most = equal
            why = f"rank {rank} has too little memory for {shares[rank]} of {sum(shares)} parts of a batch"
            notify(f"{why}; from now on it takes no more than an equal share")
            raise HorovodInternalError(why) from error

    def _balance(self, measured: Measured) -> None:
        """Change the shares if the workers' times in the step before the last one say so."""
        change = None if self._balancer is None else self._balancer.observe(measured.worked_ns, measured.most)
        if change is not None:
            self._set_shares(change.shares)
            if self.view.rank == 0:
                notify(str(change))

    def close(self) -> None:
        if self._result_writer is not None:
            self._result_writer.close()
        if self.reporter is not None:
            self.reporter.close()
        for reader in self._readers.values():
            reader.close()
        self._checkpoints.writer.close()
        self.engine.close()

    def _result(self) -> TrainingResult:
        at, writer = self.state.at, self._result_writer
        return TrainingResult(
            history=at.history,
            steps=at.step,
            epochs=len(at.history),
            stopped=at.stopped,
            restored=at.best_epoch if self.view.wants_restore else None,
            diverged=at.diverged,
            caused_divergence=self._caused_divergence,
            unsaved=writer.unsaved if writer is not None and self.view.rank == 0 else {},
        )

    @property
    def _batch_size(self) -> int:
        return self.training.batch_size or (self.training.per_worker_batch_size or 1) * self.view.size

    def _reader(self, split: str) -> BatchReader:
        if split not in self._readers:
            training = self.training
            self._readers[split] = reader = BatchReader(
                training.dataset,
                split,
                batch_size=self._batch_size,
                seed=training.seed,
                shuffle=training.shuffle and split == "train",
                order=training.order if split == "train" else "auto",
                prefetch=training.prefetch,
                cache_dir=training.cache_dir,
                cache_bytes=training.cache_bytes,
            )
            reader.set_world(*self.engine.reader_world)
        return self._readers[split]

    def _train(self) -> None:
        state = self.state
        if state.at.began is None:
            if state.at.position == 0:
                self.engine.seed_callbacks(CallbackEvent.EPOCH_BEGIN, state.at.epoch)
                for callback in self.callbacks:
                    callback.on_epoch_begin(self.view)
            state.at = replace(state.at, began=clock.wall())
        self.engine.begin_steps()
        reader = self._reader("train")
        # Closed at once: the caller may keep the error of a failed step, and with its traceback this generator, whose
        # read-ahead threads would never end.
        with closing(reader.epoch(state.at.epoch, state.at.position, batch_size=self._batch_size)) as batches:
            for batch in self.engine.ahead(batches, reader.rows):
                self._step(batch, last=batch.stop >= reader.rows)
                if state.at.phase is not TrainingPhase.TRAIN:
                    return

    def _step(self, batch: Batch, last: bool) -> None:
        state, at, view = self.state, self.state.at, self.view
        if self.callbacks:
            self.engine.seed_callbacks(CallbackEvent.BATCH_BEGIN, at.epoch, at.position)
        for callback in self.callbacks:
            callback.on_batch_begin(view)
        began, waited_before, last_s = clock.monotonic(), waited.seconds, self._step_s
        try:
            measured = self.engine.step(batch, at, bool(view.stop_reason))
        except self.engine.memory_errors as error:
            self._limit_share(error)
            raise
        self._step_s = clock.monotonic() - began
        worked_s = self._step_s - waited.seconds + waited_before
        counts = batch.global_rows == self._batch_size and self.engine.balances
        self.engine.worked_ns = int(1e9 * worked_s) if counts else 0
        view.note_step(last_s, measured.worked_ns)
        self._balance(measured)
        loss = None if self.training.allow_nan_loss else self.engine.metrics.non_finite_loss(measured.sums)
        if loss is not None:  # all workers come here together, and no callback is called any more
            self._caused_divergence = self.engine.has_local_non_finite_loss()
            diverged = Diverged(at.step, at.epoch, loss)
            state.at = replace(at, phase=TrainingPhase.FINISH, serial=at.serial + 1, diverged=diverged)
            state.check_host_updates()
            return
        phase, stopped = TrainingPhase.TRAIN, at.stopped
        if measured.stop:
            stopped = view.stop_reason or STOPPED_ELSEWHERE
        if last or stopped:
            phase = TrainingPhase.VALIDATE if self.training.validates else TrainingPhase.EPOCH_END
        state.at = replace(
            at,
            phase=phase,
            position=batch.stop,
            step=at.step + 1,
            serial=at.serial + 1,
            sums=add_sums(at.sums, measured.sums),
            pieces=at.pieces + measured.pieces,
            stopped=stopped,
        )
        for callback in self.callbacks:
            callback.on_batch_end(view)
        self._checkpoints.after_step(view)
        state.check_host_updates()

    def _validate(self) -> None:
        state = self.state
        if state.at.val_position == 0:
            self.engine.share_buffers()
            self.engine.seed_callbacks(CallbackEvent.VALIDATION_BEGIN, state.at.epoch)
            for callback in self.callbacks:
                callback.on_validation_begin(self.view)
        self.engine.begin_validation(state.at)
        reader = self._reader("validation")
        with closing(reader.epoch(0, state.at.val_position, batch_size=self._batch_size)) as batches:
            while state.at.phase is TrainingPhase.VALIDATE:
                self._validate_turn(batches, reader.rows)

    def _validate_turn(self, epoch: Generator[Batch], rows: int) -> None:
        state, at = self.state, self.state.at
        position = at.val_position

        def batches() -> Generator[Batch]:
            nonlocal position
            for batch in itertools.islice(epoch, VALIDATION_TURN_BATCHES):
                yield batch
                position = batch.stop

        val_sums, pieces = self.engine.measure_together(batches(), at.val_sums)
        state.at = replace(
            at,
            phase=TrainingPhase.EPOCH_END if position >= rows else TrainingPhase.VALIDATE,
            serial=at.serial + 1,
            val_position=position,
            val_sums=val_sums,
            val_pieces=at.val_pieces + pieces,
        )
        state.check_host_updates()

    def _end_epoch(self) -> None:
        """Compute the epoch's row of the history, call the callbacks, and decide together whether to continue."""
        at, view, engine = self.state.at, self.view, self.engine
        if not at.val_sums.size:
            engine.share_buffers()
        logs, val_logs = self._epoch_logs(at)
        row = {**logs, **val_logs}
        engine.after_epoch(row)
        engine.seed_callbacks(CallbackEvent.EPOCH_END, at.epoch)
        for callback in self.callbacks:
            view.caller = callback
            if val_logs:
                callback.on_validation_end(view, val_logs)
            callback.on_epoch_end(view, row)
        engine.after_callbacks()
        if self.epoch_rows is not None and (reason := self.epoch_rows.ended(row)):
            view.stop(reason)
        # No worker continues before the callbacks of all have run, and all continue or stop alike.
        stop = allreduce_(torch.tensor([float(bool(view.stop_reason))]), op=Max)
        stopped = at.stopped
        if stop.item() and not stopped:
            stopped = view.stop_reason or STOPPED_ELSEWHERE
        if view.wants_best and engine.best is not None:
            engine.copy_weights(engine.model, engine.best)
        finished = bool(stopped) or at.epoch + 1 >= self.training.epochs
        self.state.at = Progress(
            phase=TrainingPhase.FINISH if finished else TrainingPhase.TRAIN,
            epoch=at.epoch + 1,
            step=at.step,
            serial=at.serial + 1,
            history=at.history.with_row(row, view.work()),
            stopped=stopped,
            best_epoch=at.epoch if view.wants_best else at.best_epoch,
        )
        view.timed = [0.0] * len(view.timed)
        self._checkpoints.after_epoch(view, finished)
        view.clear_requests()
        if view.rank == 0:
            self._show_epoch(at, row)
        self.state.check_host_updates()

    def _epoch_logs(self, at: Progress) -> tuple[dict[str, float], dict[str, float]]:
        """Return the values of training and of validation, computed of rank 0's sums: the same bits on all workers.

        All workers take rank 0's times of the steps, too.
        """
        now, count = clock.wall(), 2 + len(self.view.timed)
        times = [now - (at.began or now), now, *self.view.timed]
        facts = torch.tensor([*times, *at.sums, *at.val_sums], dtype=torch.float64)
        broadcast_(facts, 0)
        (seconds, ended, *self.view.timed), numbers = facts[:count].tolist(), facts[count:].numpy()
        train_sums, val_sums = numbers[: at.sums.size], numbers[at.sums.size :]
        logs = {
            "epoch": at.epoch,
            "steps": at.step,
            "rows": self.engine.metrics.rows(train_sums),
            "seconds": seconds,
            "ended": ended,
            "lr": self.engine.learning_rate,
            **self.engine.metrics.logs(train_sums, at.pieces),
        }
        return logs, self.engine.metrics.logs(val_sums, at.val_pieces, "val_") if at.val_sums.size else {}

    def _show_epoch(self, at: Progress, row: Mapping[str, float]) -> None:
        if math.isnan(row.get("loss", 0.0)) and not any(math.isnan(past.get("loss", 0.0)) for past in at.history):
            allowed = "the training continues because allow_nan_loss is set"
            why = allowed if self.training.allow_nan_loss else "the loss ignores the labels of all its rows"
            log.warning("the loss of epoch %d is NaN; %s", at.epoch + 1, why)
        if self.training.verbose and self.reporter is None:
            print(epoch_line(at.epoch, self.training.epochs, row["seconds"], loss_and_metrics(row)), flush=True)

    def _finish(self) -> None:
        """Write the model on the present rank 0, again if the previous one was lost, and wait for it on all workers."""
        state = self.state
        if state.at.diverged is None:
            self._finish_model()
        if state.at.diverged is None:
            if self.view.rank == 0 and self._result_writer is None:
                training, (name, model) = self.training, self.engine.model_file()
                files = {name: model, HISTORY_FILE: state.at.history.dumps().encode()}
                check = (lambda: None) if training.fence is None else training.fence.check
                before, timeout_s = self._drain_checkpoints, self._save_timeout_s
                self._result_writer = ResultWriter(
                    training.store, files, check, notify, before=before, timeout_s=timeout_s
                )
            self._wait_for_all()
        else:  # without a model; checkpoints that were written before stay
            if self.view.rank == 0:
                self._drain_checkpoints()
            barrier()
        state.at = replace(state.at, phase=TrainingPhase.DONE, serial=state.at.serial + 1)

    def _finish_model(self) -> None:
        """Call the callbacks, and give the model its final weights. A weight that is NaN ends without a model."""
        state, engine = self.state, self.engine
        engine.finish()
        engine.seed_callbacks(CallbackEvent.FIT_END, state.at.epoch)
        for callback in self.callbacks:
            callback.on_fit_end(self.view)
        if self.view.wants_restore and engine.best is not None and state.at.best_epoch is not None:
            engine.copy_weights(engine.best, engine.model)
        if not self.training.allow_nan_loss and engine.has_nan():  # the weights are the same on all workers
            state.at = replace(state.at, diverged=Diverged(state.at.step - 1, state.at.epoch - 1, None))

    def _drain_checkpoints(self) -> None:
        try:
            self._checkpoints.writer.drain(max(self._save_timeout_s, SLOW_S))
        except CheckpointError as error:  # the model is complete without it
            notify(str(error))

    def _wait_for_all(self) -> None:
        """Wait until the files are written and all workers have compared the checksums of the rows that they read."""
        waiting = True
        while waiting:
            done = self._result_writer is None or self._result_writer.is_done(POLL_S)
            timeout_s = POLL_S if done else 0.0
            done = all(reader.checked(timeout_s) for reader in self._readers.values()) and done
            waiting = bool(allreduce_(torch.tensor([float(not done)]), op=Max).item())
