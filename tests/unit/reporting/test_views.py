"""The texts of bars and log lines."""

import pytest

from spark_elastic.membership.reasons import Wait, WaitKind, reported, wait_in_words, wait_on_bar
from spark_elastic.reporting.progress import Speed, View, plain_line, right_of_bar
from spark_elastic.reporting.screens import as_html, as_text, layout

TRAINING = View("epoch 3/10", 12_000, 60_000, "rows", {"loss": 0.31234, "accuracy": 0.91}, 4, 12_345.6)


def test_narrow_terminal_shows_loss_workers_and_time_left_first():
    assert right_of_bar(TRAINING, 48) == "12k/60k rows  loss 0.3123  4 workers  0:04 left"
    assert right_of_bar(TRAINING, 22) == "loss 0.3123  4 workers"


@pytest.mark.parametrize("width", [0, 1, 20, 40, 79, 80, 200])
@pytest.mark.parametrize(
    "view",
    [
        TRAINING,
        View("epoch 3/10", waiting="waiting for 2 of 4 slots: 2 tasks pending, cluster has 2 slots free", left_s=599.6),
        View("", waiting="waiting for {braces}"),
        View("training", 1234, 0, "steps", {}, 4, 52.1),
    ],
)
def test_no_line_is_longer_than_the_terminal(view, width):
    assert len(right_of_bar(view, width)) <= width


@pytest.mark.parametrize("width", [40, 79, 200])
def test_line_with_its_bar_fits_the_terminal(width):
    pytest.importorskip("tqdm")
    from tqdm.std import tqdm

    line = tqdm.format_meter(12_000, 60_000, 1.0, ncols=width, bar_format=layout(TRAINING, width))
    assert len(line) <= width
    assert line.startswith("epoch 3/10  20% |")


def test_wait_names_what_is_missing_and_the_time_that_is_left():
    words = wait_on_bar(Wait(WaitKind.MINIMUM, have=2, want=4, need=4, left_s=600))
    view = View("", waiting=f"{words}: 2 tasks pending, cluster has 2 slots free", left_s=599.7)
    assert plain_line(view) == "waiting for 2 of 4 workers: 2 tasks pending, cluster has 2 slots free; 600 s left"
    assert layout(view, 60).endswith("...; 600 s left")


def test_wait_names_why_slots_are_missing():
    full = reported("No space left on device")
    wait = Wait(WaitKind.MINIMUM, have=1, want=2, need=2, left_s=9, missing=(full, full))
    missing = "launches ended before their agent joined: No space left on device"
    assert wait_on_bar(wait) == f"waiting for 1 of 2 workers; {missing}"
    assert wait_in_words(wait) == f"1 of 2 workers ready; waiting up to 9 s for at least 2; {missing}"


def test_notebook_output_is_the_same_as_text_and_as_html():
    assert as_text(TRAINING).startswith("epoch 3/10  20%  12k/60k rows")
    assert '<progress max="1" value="0.2000"' in as_html(TRAINING)
    assert "<b>" not in as_html(View("<b>", 1, 2))


def test_speed_forgets_a_pause_and_starts_over_with_the_next_epoch():
    speed = Speed()
    for second in range(4):
        speed.note(float(second), 100 * second)
    assert speed.rate == pytest.approx(100)
    for second in range(60, 70):
        speed.note(float(second), 100 * second)
    assert speed.rate == pytest.approx(100)
    speed.note(70.0, 10)
    assert speed.rate is None
