"""The progress bar of a job over time, and the log lines in its place."""

from __future__ import annotations

from spark_elastic.membership.reasons import Wait, WaitKind
from spark_elastic.reporting.progress import ProgressModel
from spark_elastic.wire.messages import EpochEnded, LiveProgress


def live(epoch: int, rows: int, phase: str = "train") -> LiveProgress:
    return LiveProgress(epoch, 3, phase, rows, 1000, {"loss": 0.5})


def training() -> ProgressModel:
    progress = ProgressModel()
    progress.world(4, 0.0)
    progress.live(live(0, 100), 1.0)
    progress.live(live(0, 200), 2.0)
    return progress


def test_each_epoch_has_one_line_even_if_it_is_reported_twice():
    progress = training()
    ended = EpochEnded(0, 3, 2.0, {"loss": 0.4})
    assert progress.epoch(ended, 3.0) == "epoch 1/3  loss 0.4  2.0 s"
    assert progress.epoch(ended, 3.1) is None


def test_late_message_of_a_lost_rank_0_does_not_turn_the_bar_back():
    progress = training()
    progress.live(live(1, 50), 3.0)
    progress.live(live(0, 990), 3.1)
    assert progress.view(3.2).title == "epoch 2/3"


def test_wait_replaces_the_bar_and_counts_down():
    progress = training()
    progress.wait(Wait(WaitKind.REPLACEMENTS, have=1, need=2, left_s=60), 63.0, 3.0)
    assert progress.view(3.1).waiting == ""  # it may be over before anybody could read it
    view = progress.view(5.0)
    assert (view.title, view.waiting, view.left_s) == (
        "epoch 1/3",
        "waiting for 1 of 2 workers, keeping the state",
        None,
    )
    assert progress.view(18.0).left_s == 45.0  # a quarter of the timeout has passed
    progress.world(2, 6.0)
    assert progress.view(6.0).waiting == ""


def test_wait_ends_with_what_is_known_of_the_cluster():
    progress = ProgressModel()
    progress.describe_cluster = lambda: "2 tasks pending, cluster has 2 slots free"
    progress.wait(Wait(WaitKind.MINIMUM, have=2, want=4, need=4, left_s=600), 600.0, 0.0)
    progress.look_at_cluster(1.5)
    assert progress.line(2.0, bar=False) == ("waiting for 2 of 4 workers: 2 tasks pending, cluster has 2 slots free")
    progress.look_at_cluster(200.0)
    assert progress.line(200.0, bar=False) == (
        "waiting for 2 of 4 workers: 2 tasks pending, cluster has 2 slots free; 400 s left"
    )


def test_users_own_loop_is_shown_by_its_steps():
    progress = ProgressModel()
    progress.world(2, 0.0)
    progress.steps(10, 1.0)
    assert progress.view(1.0) is None  # an estimator's training would be heard of soon
    progress.steps(60, 6.0)
    view = progress.view(6.0)
    assert (view.title, view.done, view.unit, view.rate) == ("training", 60, "steps", 10.0)


def test_healthy_start_is_a_line_at_once_without_a_timeout():
    progress = ProgressModel()
    progress.imports = "TensorFlow"
    progress.wait(Wait(WaitKind.MINIMUM, have=0, want=2, need=1, left_s=600), 600.0, 0.0)
    assert progress.line(0.0, bar=False) == "starting 2 workers (each imports TensorFlow, usually 5-20 s)"
    assert progress.line(29.0, bar=False) is None
    assert progress.line(30.0, bar=False) == "waiting for 2 of 2 workers (1 would do)"
    assert progress.view(150.0).left_s == 450.0


def test_the_timeout_of_a_start_counts_from_its_begin_though_workers_come_meanwhile():
    progress = ProgressModel()
    progress.wait(Wait(WaitKind.MINIMUM, have=0, want=3, need=3, left_s=100), 100.0, 0.0)
    progress.wait(Wait(WaitKind.MINIMUM, have=1, want=3, need=3, left_s=80), 100.0, 20.0)
    assert progress.view(24.0).left_s is None
    assert progress.view(26.0).left_s == 74.0
