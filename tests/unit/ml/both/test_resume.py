"""A training that ended early resumes from its last durable checkpoint, to the same result."""

import pytest

from spark_elastic.ml.training.spec import CheckpointPlan
from tests.nightly import by_night
from tests.unit.ml.in_worlds import EPOCHS, NEVER, At, checkpoints_in, end, stop_and_resume

VARIANTS = {
    "torch": [
        "dropout",
        "Adam with options by parameter",
        "a schedule by step",
        "a schedule by metric",
        "metrics with states",
    ],
    "keras": ["plain", "running means, dropout and slots"],
}
CASES = [(name, variant) for name, variants in VARIANTS.items() for variant in variants]


@pytest.mark.parametrize(
    ("framework", "variant"), by_night(CASES, but={*CASES} - {("keras", "plain")}), indirect=["framework"]
)
def test_training_cut_within_an_epoch_resumes_behind_its_last_row(framework, variant, data, tmp_path):
    trainings = framework.trainings

    def make():
        return trainings.settings_of(variant)

    settings = make()
    callbacks = [*settings.pop("callbacks", []), At("on_batch_end", NEVER, end)]
    whole = trainings.alone(trainings.make_training(data, tmp_path / "whole", callbacks=callbacks, **settings))
    expected = whole, trainings.weights(tmp_path / "whole")
    plan = CheckpointPlan(every_epochs=None)
    result, latest = stop_and_resume(trainings, data, tmp_path / "cut", "on_batch_end", 22, plan, make, every_steps=5)
    assert latest.step == 20
    assert (latest.epoch, latest.position) == (latest.step // 13, latest.step % 13 * 16)
    trainings.assert_as_undisturbed(result, tmp_path / "cut", expected)


@pytest.mark.parametrize(("event", "count"), [("on_validation_end", 2), ("on_epoch_end", 3), ("on_fit_end", 1)])
def test_training_cut_between_epochs_resumes_with_the_next(framework, event, count, data, tmp_path, undisturbed):
    result, latest = stop_and_resume(framework.trainings, data, tmp_path, event, count, CheckpointPlan(every_epochs=1))
    assert latest.position == 0
    framework.trainings.assert_as_undisturbed(result, tmp_path, undisturbed)


def test_more_epochs_than_before_continue_from_the_end(framework, data, tmp_path, undisturbed):
    trainings = framework.trainings
    trainings.alone(trainings.make_training(data, tmp_path, epochs=EPOCHS - 1))
    latest = checkpoints_in(tmp_path).latest()
    result = trainings.alone(trainings.make_training(data, tmp_path, resume_from=latest.name))
    trainings.assert_as_undisturbed(result, tmp_path, undisturbed)
