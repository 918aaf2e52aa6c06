"""Durable checkpoints of a training: when they are due, what is in them, and going on from one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spark_elastic import clock
from spark_elastic.errors import CheckpointError
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.checkpoints import CheckpointFacts, Checkpoints, CheckpointWriter, Contents, name_of
from spark_elastic.ml.training.engine import Engine
from spark_elastic.ml.training.progress import Progress
from spark_elastic.ml.training.reporting import notify
from spark_elastic.ml.training.spec import CHECKPOINTS, CheckpointPlan, Training

if TYPE_CHECKING:
    from spark_elastic.ml.training.trainer import Trainer


class Lasting:
    """Has a training's checkpoints written by rank 0.

    settings: what must be the same for a training that goes on from them.
    """

    def __init__(self, training: Training, settings: Mapping[str, Any]) -> None:
        self._plan = training.checkpoints or CheckpointPlan(every_epochs=None, keep=1)
        self._verbose = training.verbose > 1
        self._settings = dict(settings)
        self.checkpoints = Checkpoints(training.store.sub(CHECKPOINTS), training.fence)
        self._writer = CheckpointWriter(self.checkpoints, self._plan.keep, notify)
        self.begin()

    def begin(self) -> None:
        """The training begins now, as far as time makes checkpoints due."""
        self._last = clock.monotonic()

    def after_step(self, trainer: Trainer) -> None:
        plan, run = self._plan, trainer.run
        if run.wants_checkpoint:
            run.wants_checkpoint = False
            self._write(trainer)
            return
        due = plan.every_steps is not None and trainer.state.at.step % plan.every_steps == 0
        if plan.every_seconds is not None and not due:
            due = clock.monotonic() - self._last >= plan.every_seconds
        if due and not self._writer.busy:  # one that comes while the last is still being written is left out
            self._write(trainer)

    def after_epoch(self, trainer: Trainer, finished: bool) -> None:
        """finished: it was the last one."""
        every = self._plan.every_epochs
        due = every is not None and (trainer.state.at.epoch % every == 0 or finished)
        if due or trainer.run.wants_checkpoint:
            self._write(trainer, trainer.run.best_of)

    def _write(self, trainer: Trainer, best_of: Sequence[str] = ()) -> None:
        """Copy the state and have it written. Raises: RunTakenError: another driver has the run."""
        if trainer.rank != 0:
            return
        if self._writer.fenced is not None:
            raise self._writer.fenced
        self._last = clock.monotonic()
        at = trainer.state.at
        make = trainer.engine.copies(at)
        document = {"at": at.to_json(), "callbacks": callback_states(trainer.callbacks), "settings": self._settings}
        token = self.checkpoints.token
        facts = CheckpointFacts(name_of(at.serial, token), at.step, at.epoch, at.position, tuple(best_of), token)
        self._writer.submit(lambda: Contents(facts, document, make()))
        if self._verbose:
            print(f"a checkpoint of step {at.step} is being written", flush=True)

    def drain(self) -> None:
        """Wait until all are written. Raises: CheckpointError: the last one could not be."""
        self._writer.drain()

    def close(self) -> None:
        self._writer.close()

    def restore(self, name: str, engine: Engine, callbacks: Sequence[Callback]) -> Progress:
        """Raises: CheckpointError: missing, damaged, or of another training by what it says or by its shapes."""
        contents = self.checkpoints.load(name)
        had = contents.document["settings"]
        for key, value in self._settings.items():
            if had.get(key) != value:
                raise CheckpointError(
                    f"checkpoint {name} was written with {key}={had.get(key)!r}, and now it is {value!r}; give another "
                    "run_id to begin anew"
                )
        try:
            at = Progress.from_json(contents.document["at"], *engine.load(contents.files))
        except CheckpointError:
            raise
        except (KeyError, ValueError, RuntimeError, TypeError) as error:
            raise CheckpointError(f"checkpoint {name} is of another model or optimizer: {error}") from error
        load_callback_states(callbacks, contents.document["callbacks"])
        return at


def callback_states(callbacks: Sequence[Callback]) -> list[dict[str, Any]]:
    return [{"class": _kind(one), "state": dict(one.state_dict())} for one in callbacks]


def load_callback_states(callbacks: Sequence[Callback], states: Sequence[Mapping[str, Any]]) -> None:
    """Raises: CheckpointError: they were other callbacks."""
    have, had = [_kind(one) for one in callbacks], [state["class"] for state in states]
    if have != had:
        raise CheckpointError(f"the checkpoint was written with the callbacks {had}, and now there are {have}")
    for one, state in zip(callbacks, states, strict=True):
        one.load_state_dict(state["state"])


def _kind(callback: Callback) -> str:
    """Its class; of one that stands for a framework's own callback, that of the other."""
    return type(getattr(callback, "wrapped", callback)).__qualname__
