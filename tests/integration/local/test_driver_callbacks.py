"""Callbacks on the driver during real trainings whose workers are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spark_elastic
from spark_elastic import LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import JobCancelledError
from spark_elastic.ml.callbacks import Callback
from tests.integration.local.driver_fits import Killing, Pids, Watch, estimator
from tests.integration.processes import GONE_S, KEPT, MARK, OF_THIS_PROCESS, assert_gone, left_by_jobs, wait_until
from tests.leftovers import Before
from tests.unit.ml.torch.estimators import make_set


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("rows"))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = Before()
    os.environ[MARK] = OF_THIS_PROCESS
    yield
    del os.environ[MARK]
    assert_gone(left_by_jobs, GONE_S)
    before.assert_nothing_left()


@pytest.mark.nightly
def test_each_epoch_is_reported_once_although_rank_0_is_killed_while_it_asks(rows: Dataset, tmp_path: Path) -> None:
    callback = Killing(tmp_path, (1, 2), stop_at=3)
    model = estimator(Pids(tmp_path), callback, epochs=6, num_proc=3).from_dataset_path(rows)
    assert [row["epoch"] for row in callback.rows] == [0, 1, 2, 3]
    assert len(model.history) == 4, "the training ended after the epoch whose row was answered with a reason"
    for told, kept in zip(callback.rows, model.history, strict=True):
        assert {**told, "seconds": 0, "ended": 0} == {**kept, "seconds": 0, "ended": 0}
    assert callback.threads == {threading.current_thread().name}
    kinds = [change.kind for change in callback.changes]
    assert kinds[0] == "started"
    assert kinds.count("lost") == 2
    assert kinds[-1] == "finished"
    (result,) = callback.results
    assert (result.model, result.error, result.stopped) == (model, None, "enough")
    (run,) = callback.runs
    assert run.epochs == 6
    assert run.settings["batch_size"] == 16
    assert "checkpoint_dir" not in run.settings


class Slow(Watch):
    """Does not return from its first epoch until the training is over."""

    decides_within_s = 0.5

    def __init__(self, model_written: threading.Event) -> None:
        super().__init__()
        self.model_written = model_written

    def on_epoch_end(self, row: Any) -> Any:
        super().on_epoch_end(row)
        if row["epoch"] == 0:
            self.model_written.wait(60)


class Written(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, run: Any) -> None:
        (self.folder / f"end{run.rank}").touch()


@pytest.mark.nightly
def test_training_does_not_wait_for_a_hanging_callback_beyond_its_time(rows: Dataset, tmp_path: Path) -> None:
    over = threading.Event()

    def watch() -> None:
        wait_until((tmp_path / "end0").exists, 60, "the workers train to the end while the callback hangs")
        over.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    callback = Slow(over)
    start = time.monotonic()
    estimator(Written(tmp_path), callback, num_proc=1).from_dataset_path(rows)
    watcher.join()
    assert over.is_set()
    assert time.monotonic() - start < 60
    assert [row["epoch"] for row in callback.rows] == [0, 1, 2, 3], "rows that queued up come later"


def test_run_calls_callbacks_and_a_stop_cancels_the_job() -> None:
    class Stopping(Watch):
        def on_membership_change(self, change: Any) -> Any:
            super().on_membership_change(change)
            return "seen enough" if change.kind == "started" else None

    def work() -> int:
        import spark_elastic.torch as hvd

        hvd.init()
        return 7

    def sleep() -> None:
        import time

        import spark_elastic.torch as hvd

        hvd.init()
        time.sleep(300)

    watch, stopping = Watch(), Stopping()
    launcher = {"num_proc": 1, "verbose": 0, **KEPT}
    assert spark_elastic.run(work, launcher=LocalLauncher(), callbacks=[watch], **launcher) == [7]  # type: ignore[arg-type]
    assert watch.results[0].returned == [7]
    assert watch.runs[0].name.endswith("work")
    assert [change.kind for change in watch.changes][-1] == "finished"
    with pytest.raises(JobCancelledError, match="seen enough"):
        spark_elastic.run(sleep, launcher=LocalLauncher(), callbacks=stopping, **launcher)  # type: ignore[arg-type]
    assert isinstance(stopping.results[0].error, JobCancelledError)


@pytest.mark.nightly
def test_ctrl_c_ends_a_fit_whose_callback_hangs(rows: Dataset) -> None:
    class Hanging(Watch):
        def on_epoch_end(self, row: Any) -> Any:
            threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
            threading.Event().wait(120)

    callback = Hanging()
    with pytest.raises(KeyboardInterrupt):
        estimator(callback, num_proc=1).from_dataset_path(rows)
    assert isinstance(callback.results[0].error, KeyboardInterrupt)
