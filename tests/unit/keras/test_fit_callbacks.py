"""What the callbacks of `fit` remember when a world breaks or grows: real processes, real kills."""

import csv
import time
from pathlib import Path

import keras
import pytest

import spark_elastic.keras as hvd
from spark_elastic.errors import HorovodInternalError, HostsUpdatedInterrupt, UsageError
from spark_elastic.keras.elastic import ElasticCallback, ElasticDataset, KerasState
from tests.nightly import by_night
from tests.unit.keras.test_fit import BATCH, At, compiled, data
from tests.unit.keras.test_keras_state import Plain, numbers
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver, together

EPOCHS, PATIENCE = 20, 4
BATCHES = 10


def small():
    keras.utils.set_random_seed(7)
    layers = [keras.layers.Input((5,)), keras.layers.Dense(3)]
    return compiled(keras.Sequential(layers), hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)))


def ready(model=None):
    """Return a model, its state, and a dataset of that."""
    model = model or small()
    state = KerasState(model, batch=0, epoch=0)
    return model, state, ElasticDataset(*data(), state=state, batch_size=BATCH)


class Losses(keras.callbacks.Callback):
    """As many users write it: a list that begins anew with each training."""

    def on_train_begin(self, logs=None):
        self.rank = hvd.rank()
        self.epochs, self.batches = [], 0

    def on_train_batch_end(self, batch, logs=None):
        self.batches += 1

    def on_epoch_end(self, epoch, logs=None):
        self.epochs.append(epoch)


class Flat(keras.callbacks.Callback):
    """Has the loss be the same in every epoch."""

    def on_epoch_end(self, epoch, logs=None):
        logs["loss"] = 1.0


def train(folder, dies, made_anew, phase="begin", where="first"):
    hvd.init()
    model, state, dataset = ready()
    mine = dies.get(link().worker)
    file = Path(folder, "log.csv")

    def callbacks():
        own = [
            keras.callbacks.EarlyStopping("loss", patience=PATIENCE, min_delta=1e-6),
            keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=2, min_delta=1e-6),
            keras.callbacks.ModelCheckpoint(str(Path(folder, f"{link().worker}.keras")), "loss", save_best_only=True),
            Losses(),
        ]
        return own + ([keras.callbacks.CSVLogger(str(file))] if hvd.rank() == 0 else [])

    kept = callbacks()

    @hvd.elastic.run
    def loop(state):
        own = callbacks() if made_anew else kept
        first = [At(state, {mine: die}, phase)] if where == "first" else []
        last = [At(state, {mine: die}, phase)] if where == "last" else []
        average = hvd.callbacks.MetricAverageCallback()
        flat = Flat()
        everything = [*first, own[-1], flat, average, *own[:-1], ElasticCallback(state), *last]
        history = model.fit(dataset, initial_epoch=state.epoch, epochs=EPOCHS, verbose=0, callbacks=everything)
        return own, history

    own, history = loop(state)
    stopping, plateau, checkpoint, losses = own[:4]
    return {
        "place": (state.epoch, state.batch),
        "stopped": stopping.stopped_epoch,
        "rate": float(model.optimizer.learning_rate),
        "wait": (stopping.wait, plateau.wait),
        "best": checkpoint.best,
        "losses": (losses.epochs, losses.batches, losses.rank == hvd.rank()),
        "history": (history.epoch, len(history.history["loss"])),
    }


def rows_of(file):
    with open(file) as read:
        return list(csv.reader(read))


def check(results):
    for result in results:
        # the first epoch is the best; four more without a better one
        assert result["place"] == (PATIENCE + 1, 0)
        assert result["stopped"] == PATIENCE
        assert result["rate"] == pytest.approx(0.1 / 4)
        assert result["best"] == 1.0
        assert result["losses"] == (list(range(PATIENCE + 1)), BATCHES * (PATIENCE + 1), True)
        assert result["history"] == (list(range(PATIENCE + 1)), PATIENCE + 1)


IN_THE_MIDDLE = ("begin", "first", (3, 4), True)


@pytest.mark.parametrize(
    ("phase", "where", "at", "made_anew"),
    by_night(
        [
            IN_THE_MIDDLE,
            # the others wait in MetricAverageCallback, one has had callbacks before it
            ("epoch", "first", (2, BATCHES), False),
            ("epoch", "last", (3, 0), True),  # they have begun the next epoch
        ],
        but=[IN_THE_MIDDLE],
    ),
)
def test_callbacks_keep_their_memory_after_a_loss(tmp_path, made_anew, phase, where, at):
    results = together(train, str(tmp_path), {3: at}, made_anew, phase, where, count=3, left=2)
    check(results)
    written = rows_of(tmp_path / "log.csv")
    # the end of an epoch that was done again has its row twice
    assert list(dict.fromkeys(row[0] for row in written)) == ["epoch", *map(str, range(PATIENCE + 1))]


def decays():
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9)


def grow(unbuilt):
    hvd.init()
    model, state, dataset = ready(compiled(Plain(), hvd.DistributedOptimizer("adam")) if unbuilt else small())
    stopping = keras.callbacks.EarlyStopping("loss", patience=12, min_delta=1e-6, restore_best_weights=True)
    first = {}

    class Tells(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            tell("step", (state.epoch, hvd.size()))

        def on_epoch_begin(self, epoch, logs=None):
            assert state.epoch == epoch
            first.setdefault("wait", stopping.wait)
            first.setdefault("epoch", epoch)
            while epoch == 5 and hvd.size() == 2 and not link().updates_seen():
                time.sleep(0.01)  # the two would end without the newcomer

    @hvd.elastic.run
    def loop(state):
        callbacks = [Flat(), Tells(), stopping, decays(), ElasticCallback(state)]
        return model.fit(dataset, initial_epoch=state.epoch, epochs=10_000, verbose=0, callbacks=callbacks)

    history = loop(state)
    return {
        "numbers": numbers(model, model.optimizer),
        "rates": history.history["learning_rate"],
        "progress": state.progress,
        "first": first,
        "stopped": stopping.stopped_epoch,
        "wait": stopping.wait,
        "history": history.epoch,
        "best": [float(weights.sum()) for weights in stopping.best_weights],
    }


@pytest.mark.parametrize("unbuilt", by_night([False, True], but=[True]))
def test_a_newcomer_that_joins_during_an_epoch_gets_all_of_the_others(unbuilt):
    """The epoch's number, weights, an optimizer that it has not built, and the memory of callbacks."""
    with WorldDriver(start_with=2) as driver:
        driver.start(grow, unbuilt, count=2)
        driver.wait(lambda: any(epoch >= 2 for epoch, _ in driver.told("step")))
        driver.start(grow, unbuilt)
        results = driver.results(3)
        assert len(driver.worlds) == 2
    joined = results[2]["first"]
    assert joined["epoch"] >= 2
    assert joined["wait"] == joined["epoch"] - 1
    for result in results:
        assert result["stopped"] == result["wait"] == 12
        assert result["history"] == list(range(13))
        start = 0.001 if unbuilt else 0.1
        assert result["rates"] == pytest.approx([start * 0.9 ** (epoch + 1) for epoch in range(13)])
        for name in ("best", "numbers", "progress"):
            assert result[name] == results[0][name]


def leaves(state):
    """Has the loop be left at its next question, as for a world that changes."""

    def leave():
        del state.leave_if_updated
        raise HostsUpdatedInterrupt

    state.leave_if_updated = leave


def test_a_fit_stopped_by_a_callback_is_not_resumed(alone):
    model, state, dataset = ready()
    left, histories = [], []

    @hvd.elastic.run
    def loop(state):
        stopping = keras.callbacks.EarlyStopping("loss", patience=2, min_delta=1e-6)
        callbacks = [Flat(), stopping, ElasticCallback(state)]
        histories.append(model.fit(dataset, initial_epoch=state.epoch, epochs=9, verbose=0, callbacks=callbacks))
        if not left:
            left.append(state.epoch)
            raise HostsUpdatedInterrupt  # in a metric of one's own, say
        model.fit(*data(), epochs=2, verbose=0)

    loop(state)
    assert left == [3]
    assert state.epoch == 3
    assert [history.epoch for history in histories] == [[0, 1, 2]] * 2
    assert int(model.optimizer.iterations) == 3 * BATCHES + 2 * -(-90 // 32)


@pytest.mark.nightly
def test_a_second_fit_in_the_loop_begins_with_nothing_of_the_first(alone):
    model, state, dataset = ready()
    waits = []

    class Leaves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 4 and len(waits) == 1:
                leaves(state)

    @hvd.elastic.run
    def loop(state):
        for until in (3, 6):
            stopping = keras.callbacks.EarlyStopping("loss", patience=4, min_delta=1e-6)
            callbacks = [Flat(), stopping, ElasticCallback(state), Leaves()]
            model.fit(dataset, initial_epoch=state.epoch, epochs=until, verbose=0, callbacks=callbacks)
            waits.append(stopping.wait)

    loop(state)
    assert state.epoch == 6
    # the first; the first again, without an epoch; the second, which was left after two of its three epochs
    assert waits == [2, 0, 2]


@pytest.mark.nightly
@pytest.mark.parametrize(("counted_by", "lost"), [("fit", [2, 2]), ("fit", [0]), ("loop", [1])])
def test_code_between_fit_and_commit_runs_again_after_a_loss_there(alone, counted_by, lost):
    """One `fit` an epoch, whose loss is noted after it; `lost`: collectives of the code fail so often."""
    model = small()
    state = KerasState(model, batch=0, epoch=0, noted=[])
    dataset = ElasticDataset(*data(), state=state, batch_size=BATCH)
    to_come = list(lost)  # not kept by the state

    @hvd.elastic.run
    def loop(state):
        while state.epoch < 3:
            if counted_by == "fit":
                own = [ElasticCallback(state)]
                history = model.fit(
                    dataset, initial_epoch=state.epoch, epochs=state.epoch + 1, verbose=0, callbacks=own
                )
            else:
                own = [hvd.elastic.CommitStateCallback(state)]
                history = model.fit(*data(), batch_size=BATCH, epochs=1, verbose=0, callbacks=own)
            state.noted.append(len(history.history["loss"]))
            if to_come and to_come[0] == len(state.noted) - 1:
                to_come.pop(0)
                raise HorovodInternalError("a collective in a validation of one's own")
            if counted_by == "loop":
                state.epoch += 1
            state.commit()

    loop(state)
    assert not to_come
    assert (state.noted, state.epoch, state.batch) == ([1] * 3, 3, 0)
    assert int(model.optimizer.iterations) == 3 * -(-len(data()[0]) // BATCH)


class LeavesOnce(keras.callbacks.Callback):
    """Has the loop be left once in the second epoch: by a loss or for the next world, within it or at its end."""

    def __init__(self, state, how, at):
        super().__init__()
        self.state, self.at = state, at
        self.to_come = iter([how])  # an iterator is not restored after a loss

    def leave(self, at):
        if self.at == at and self.state.epoch == 1:
            how = next(self.to_come, None)
            if how == "loss":
                raise HorovodInternalError("a collective of this callback's own")
            if how == "change":
                leaves(self.state)

    def on_train_batch_end(self, batch, logs=None):
        if self.state.batch == 4:
            self.leave("batch")

    def on_epoch_end(self, epoch, logs=None):
        self.leave("epoch")


def trained_with(callbacks, how, at, epochs=4):
    """Return the History of a `fit` with callbacks that are made anew in each call of the loop, which is left once."""
    model, state, dataset = ready()
    once = LeavesOnce(state, how, at)

    @hvd.elastic.run
    def loop(state):
        own = [once, ElasticCallback(state), *callbacks(model)]
        return model.fit(dataset, initial_epoch=state.epoch, epochs=epochs, verbose=0, callbacks=own)

    history = loop(state)
    assert next(once.to_come, None) is None
    return history


LEFT = [("loss", "batch"), ("loss", "epoch"), ("change", "batch"), ("change", "epoch")]


class ShrinksEachBatch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        self.model.optimizer.learning_rate *= 0.99


@pytest.mark.nightly
@pytest.mark.parametrize("within_epochs", [False, True])
@pytest.mark.parametrize(("how", "at"), LEFT)
def test_a_rate_that_an_epoch_begins_with_decays_once_an_epoch(alone, how, at, within_epochs):
    def callbacks(model):
        return [decays(), ShrinksEachBatch()] if within_epochs else [decays()]

    plain = small().fit(*data(), batch_size=BATCH, shuffle=False, epochs=4, verbose=0, callbacks=callbacks(None))
    elastic = trained_with(callbacks, how, at)
    assert elastic.history["learning_rate"] == pytest.approx(plain.history["learning_rate"], rel=1e-5)


@pytest.mark.parametrize("name", ["BackupAndRestore", "SwapEMAWeights"])
def test_a_callback_that_would_load_other_weights_is_refused(alone, tmp_path, name):
    model = small()
    state = KerasState(model, batch=0, epoch=0)
    callback = getattr(keras.callbacks, name)(*[str(tmp_path)] * (name == "BackupAndRestore"))
    with pytest.raises(UsageError, match=name):
        model.fit(*data(), verbose=0, callbacks=[callback, ElasticCallback(state)])


class Tally(keras.callbacks.Callback):
    """A callback that says itself what is to be kept."""

    def on_train_begin(self, logs=None):
        self.rows, self.file = {"epochs": []}, iter(())

    def on_epoch_end(self, epoch, logs=None):
        self.rows["epochs"].append(epoch)

    def state_dict(self):
        return {"rows": self.rows}

    def load_state_dict(self, state):
        self.rows = state["rows"]


def test_the_state_dict_of_a_callback_is_kept_in_place_of_its_attributes(alone):
    model, state, dataset = ready()
    tallies = []

    class Leaves(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if len(tallies) == 1 and epoch == 1:
                leaves(state)

    @hvd.elastic.run
    def loop(state):
        tallies.append(Tally())
        callbacks = [tallies[-1], Leaves(), ElasticCallback(state)]
        return model.fit(dataset, initial_epoch=state.epoch, epochs=4, verbose=0, callbacks=callbacks)

    history = loop(state)
    assert len(tallies) == 2
    assert tallies[1].rows == {"epochs": [0, 1, 2, 3]}
    assert history.epoch == [0, 1, 2, 3]
