"""How settings behave as keywords, as Params, and when they are wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from spark_elastic import ElasticKerasEstimator, ElasticTorchEstimator
from spark_elastic.errors import InvalidSettingsError


@pytest.mark.parametrize("kind", [ElasticTorchEstimator, ElasticKerasEstimator])
def test_none_given_is_none_set_and_stays_so_in_copies(kind: Any) -> None:
    estimator = kind(status_port=None, batch_size=None, prediction_col=None)
    for each in (estimator, estimator.copy(), kind().setParams(status_port=None), kind().setStatusPort(None)):
        assert each.getStatusPort() is None
    assert estimator.getPredictionCol() == ""
    assert kind().copy({kind().status_port: None}).getStatusPort() == "auto", "a Param of another estimator"
    other = kind(status_port=0)
    assert other.copy({other.status_port: None}).getStatusPort() is None
    for name in (each.name for each in other.params if each.default is not None):
        if name != "status_port" and not name.endswith(("prediction_col", "probability_col")):
            with pytest.raises(InvalidSettingsError, match=f"{name} must be"):
                kind(**{name: None})


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("batchSize", "snake_case here, 'batch_size'"),
        ("featuresCol", "here it is 'feature_cols'"),
        ("random_seed", "here it is 'seed'"),
        ("batch_sise", "did you mean 'batch_size'"),
        ("EPOCHS", "did you mean 'epochs'"),
        ("Seed", "did you mean 'seed'"),
        ("zzz", "it has accumulation_steps, allow_nan_loss, amp, balance"),
    ],
)
def test_unknown_name_is_reported_with_the_right_one(name: str, hint: str) -> None:
    with pytest.raises(InvalidSettingsError, match=hint):
        ElasticTorchEstimator(**{name: 1})


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, not 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number, not 2.5"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"epochs": True}, "epochs must be a whole number, not True"),
        ({"validation": 1.0}, "fraction between 0 and 1 .* not 1.0"),
        ({"validation": 0}, "leave it out"),
        ({"validation": [0.1]}, "fraction of the rows, or the name of a boolean column"),
        ({"feature_cols": []}, "feature_cols must name at least one column"),
        ({"feature_cols": ["a", "a"]}, "feature_cols names a more than once"),
        ({"feature_cols": ["a", ["b"]]}, "mixes names and lists"),
        ({"input_shapes": 3}, "list of shapes"),
        ({"input_shapes": [3, None]}, "list of shapes"),
        ({"input_shapes": [(0,)]}, r"input_shapes\[0\] must be at least 1"),
        ({"metrics": [len]}, "metrics must be a dict with names as keys"),
        ({"gradient_clip_norm": 0}, "a number above 0"),
        ({"gradient_clip_value": float("nan")}, "a number above 0"),
        ({"gradient_compression": "int8"}, "'none', 'fp16', 'bf16'"),
        ({"shuffle": "yes"}, "shuffle must be True or False"),
        ({"loss_weights": ["a"]}, r"loss_weights\[0\] must be a number"),
        ({"transformation_fn": 3}, "transformation_fn must be a function"),
        ({"run_options": {"start_timout": 3}}, "did you mean 'start_timeout'"),
        ({"device": "gpu"}, "did you mean 'cuda'"),
        ({"device": "GPU:1"}, "did you mean 'cuda:1'"),
        ({"data_options": {"batch": 3}}, "data_options takes no 'batch'"),
        ({"output_type": "list"}, "'array', 'vector'"),
        ({"prediction": "softmax"}, "'argmax', 'value'"),
        ({"checkpoint_dir": 3}, "a path or a URI"),
        ({"store": 3}, "store must be a path, a URI or a Store"),
    ],
)
def test_impossible_value_is_refused_with_the_possible_ones(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        ElasticTorchEstimator(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"batch_size": 8, "per_worker_batch_size": 4}, "contradict each other"),
        ({"loss": [len, len], "loss_weights": [1.0]}, "1 loss_weights for 2 losses"),
        ({"loss": len, "train_fn": len}, "loss and train_fn are both set"),
        ({"train_fn": len, "loss_weights": [1.0]}, "loss_weights are for losses"),
        ({"min_num_proc": 3, "max_num_proc": 2}, "min_num_proc=3 is larger than max_num_proc=2"),
        ({"num_proc": 1, "min_num_proc": 2}, "min_num_proc=2 is larger than num_proc=1"),
        ({"checkpoint_interval": 2}, "checkpoint_interval=2 without checkpoint_dir"),
        ({"keep_checkpoints": 2}, "keep_checkpoints=2 without checkpoint_dir"),
        ({"checkpoint_best_of": "loss"}, "checkpoint_best_of='loss' without checkpoint_dir"),
        ({"checkpoint_dir": "/x", "checkpoint_best_mode": "max"}, "without checkpoint_best_of"),
        ({"resume": False}, "resume=False without run_id"),
        ({"scheduler_interval": "step"}, "scheduler_interval is set, but there is no lr_scheduler"),
        *(
            ({"run_id": name, "checkpoint_dir": "/tmp"}, "run_id must be")
            for name in ("../evil", "/a/b", "..", "", "a b")
        ),
        ({"run_id": "a"}, "run_id='a' without checkpoint_dir"),
        ({"checkpoint_seconds": 3}, "checkpoint_seconds=3.0 without checkpoint_dir"),
        ({"scheduler_monitor": "loss"}, "no lr_scheduler"),
        ({"output_cols": ["a"], "prediction_col": "a"}, "'a' would be 2 of the output columns"),
        ({"prediction_col": "probability"}, "'probability' would be 2 of the output columns"),
        (
            {"output_cols": [], "prediction_col": None, "probability_col": None, "raw_prediction_col": None},
            "nothing to add",
        ),
        ({"missing": "drop"}, "missing must be 'error', 'skip' or a number, not 'drop'"),
        ({"missing": float("nan")}, "missing must be 'error', 'skip' or a number, not nan"),
        ({"on_interrupt": "stop"}, "on_interrupt must be one of 'raise', 'return', not 'stop'"),
        ({"label_cols": ["a", ["b"]]}, "label_cols mixes names and lists of names"),
    ],
)
def test_settings_that_contradict_one_another_are_refused_at_once(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidSettingsError, match=said):
        ElasticTorchEstimator(**settings)


def test_a_wrong_value_set_through_spark_ml_keeps_its_error() -> None:
    estimator = ElasticTorchEstimator()
    with pytest.raises(InvalidSettingsError, match="epochs must be at least 1"):
        estimator.set(estimator.epochs, 0)


def test_numpy_numbers_become_python_numbers() -> None:
    estimator = ElasticTorchEstimator(batch_size=np.int64(8), validation=np.float32(0.5), shuffle=np.bool_(False))
    values = [estimator.getBatchSize(), estimator.getValidation(), estimator.getShuffle()]
    assert [type(value) for value in values] == [int, float, bool]


def test_a_copy_has_its_own_settings_and_the_same_uid() -> None:
    estimator = ElasticTorchEstimator(epochs=2, batch_size=8)
    copied = estimator.copy({estimator.epochs: 5})
    assert (estimator.getEpochs(), copied.getEpochs(), copied.getBatchSize()) == (2, 5, 8)
    assert copied.uid == estimator.uid
    with pytest.raises(InvalidSettingsError, match="contradict"):
        estimator.copy({estimator.per_worker_batch_size: 4})
    copied._resetUid("other")
    assert estimator.epochs.parent == estimator.uid
    assert copied.getEpochs() == 5


def test_set_params_sets_several_at_once_and_checks_them_together() -> None:
    estimator = ElasticTorchEstimator(batch_size=8, epochs=2)
    assert estimator.setBatchSize(64) is estimator
    assert "current: 64" in estimator.explainParam("batch_size")
    assert estimator.setParams(batch_size=None, per_worker_batch_size=4) is estimator
    assert (estimator.getBatchSize(), estimator.getPerWorkerBatchSize(), estimator.getEpochs()) == (None, 4, 2)
    with pytest.raises(InvalidSettingsError, match="contradict"):
        estimator.setParams(batch_size=8)
    with pytest.raises(InvalidSettingsError, match="did you mean 'epochs'"):
        estimator.setParams(epoch=8)  # type: ignore[call-arg]
    for positional in (estimator.setParams, ElasticTorchEstimator):
        with pytest.raises(TypeError, match="positional"):
            positional(8)  # type: ignore[misc]


@pytest.mark.parametrize("settings", [{"epochs": -1}, {"epoch": 1}, {"batch_size": 4, "per_worker_batch_size": 2}])
def test_error_of_a_constructor_shows_one_frame_of_this_package(settings: dict[str, Any]) -> None:
    for call in (ElasticTorchEstimator, ElasticTorchEstimator().setParams):
        with pytest.raises(InvalidSettingsError) as caught:
            call(**settings)
        assert [each.path.name for each in caught.traceback[1:]] == ["user_frames.py"]
