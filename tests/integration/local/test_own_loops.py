"""Users' own loops lose nothing and stay equal, wherever in them a worker dies."""

import pytest

from tests.integration.local import own_loops

PREIMPORT = ("torch", "torch._dynamo")
WAIT_S = 120


def survivors(start_job, function, *args):
    job = start_job(function, args, num_proc=3, min_num_proc=2, max_num_proc=3, preimport=PREIMPORT)
    results = job.result(WAIT_S)
    assert any(change.kind == "lost" for change in job.changes()), job.changes()
    return results


@pytest.mark.parametrize("what", ["schedule", "scale"])
def test_equal_steps_are_not_taken_for_equal_states(start_job, tmp_path, what):
    results = survivors(start_job, own_loops.one_is_late_and_one_dies, str(tmp_path), what)
    for weights, epoch, step, rate, scale, _ in results:
        assert (epoch, step) == (1, 12)
        first, second = sum(range(6)), sum(range(6, 12))
        factor = 0.5 if what == "schedule" else 1.0
        total = 1024 * (first + second * factor) if what == "schedule" else 1024 * first + 512 * second
        assert weights == [[-total] * own_loops.WIDTH]
        assert (rate, scale) == ((0.5, 1024.0) if what == "schedule" else (1.0, 512.0))


def test_gradients_that_are_applied_by_hand_are_applied_once(start_job, tmp_path):
    for weights in survivors(start_job, own_loops.gradients_applied_by_hand, str(tmp_path)):
        assert weights == [-20.0] * 6


@pytest.mark.parametrize(("style", "dies_at"), [("before", 1), ("before", 17), ("list", 18), ("after", 19)])
def test_each_batch_is_trained_on_once_wherever_the_loop_counts(start_job, tmp_path, style, dies_at):
    for weight, batch, counted, seen, steps in survivors(
        start_job, own_loops.counted_before_the_step, str(tmp_path), dies_at, style
    ):
        assert weight == -sum(range(1, 26))
        assert batch == (0 if style == "list" else 25)
        assert counted == (25 if style == "before" else 0)
        assert seen == (list(range(1, 26)) if style == "list" else [])
        assert steps == 25


def test_an_epoch_that_ends_before_the_first_step_of_a_call_teaches_nothing_wrong(start_job, tmp_path):
    job = start_job(
        own_loops.two_die_the_first_at_the_end_of_an_epoch,
        (str(tmp_path),),
        num_proc=3,
        min_num_proc=1,
        max_num_proc=3,
        preimport=PREIMPORT,
    )
    for weight, steps in job.result(WAIT_S):
        assert (weight, steps) == (-sum(range(12)), 12)
    assert (tmp_path / "second" / "killed").exists()


def test_rows_are_used_once_though_a_scaler_skips_steps(start_job, tmp_path):
    skipped = sum(range(1, 16)) + sum(range(31, 46))  # of three ranks, five rows each
    for weight in survivors(start_job, own_loops.a_scaler_skips_a_step, str(tmp_path)):
        assert weight == -(sum(range(1, 121)) - skipped)


@pytest.mark.parametrize(("kind", "weights"), [("one", (-606.0, -606.0)), ("gan", (-6.0, -660.0))])
def test_a_loop_that_makes_several_steps_before_it_counts_makes_none_twice(start_job, tmp_path, kind, weights):
    for result in survivors(start_job, own_loops.several_steps_before_the_loop_counts, str(tmp_path), kind):
        assert result == pytest.approx(weights)


def test_a_commit_between_two_passes_does_not_count_the_first_as_done(start_job, tmp_path):
    for weight, row in survivors(start_job, own_loops.committed_between_passes, str(tmp_path)):
        assert (weight, row) == (-sum(range(20)), 20)


def test_different_commits_of_a_state_without_an_optimizer_are_told_apart(start_job, tmp_path):
    for total, n, progress, versions in survivors(start_job, own_loops.commits_without_an_optimizer, str(tmp_path)):
        assert (total, n, progress) == (sum(range(10)), 10, 10)
        assert all(n == steps for n, steps in versions)
