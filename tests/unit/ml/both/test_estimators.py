"""Settings that the estimators of both frameworks have in common, and what each of them changes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from pyspark.ml.linalg import VectorUDT
from pyspark.sql.types import ArrayType, DoubleType, FloatType, StructField, StructType

from spark_elastic import Callback, LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import StoreError
from tests.unit.ml.test_damaged_files import SESSION, changed_metadata
from tests.unit.ml.torch.estimators import make_set

PAUSE_S = 0.05

SCHEMA = StructType([StructField("features_0", ArrayType(FloatType()))])


def scaled(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"] * 3}


CHANGES_THE_WEIGHTS: dict[str, dict[str, Any]] = {
    "loss_weights": {"loss_weights": [3.0]},
    "batch_size": {"batch_size": 48},
    "per_worker_batch_size": {"batch_size": None, "per_worker_batch_size": 48},
    "shuffle": {"shuffle": False},
    "seed": {"seed": 5},
    "transformation_fn": {"transformation_fn": scaled},
    "gradient_clip_norm": {"gradient_clip_norm": 0.01},
    "gradient_clip_value": {"gradient_clip_value": 0.001},
}


@pytest.fixture(scope="session")
def dataset(framework: Any, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_set(tmp_path_factory.mktemp("set"))


@pytest.fixture(scope="session")
def fit(framework: Any, dataset: Dataset) -> Any:
    """Train with changed settings; return the model and the estimator."""

    def fit(**changes: Any) -> tuple[Any, Any]:
        made = framework.estimators.estimator(**changes)
        return made.from_dataset_path(dataset), made

    return fit


@pytest.fixture(scope="session")
def plain(fit: Any) -> Any:
    return fit()[0]


def test_two_fits_with_the_same_settings_give_the_same_weights(framework: Any, fit: Any, plain: Any) -> None:
    again, _ = fit()
    assert framework.estimators.weights_of(again) == framework.estimators.weights_of(plain)
    assert again.history["loss"] == plain.history["loss"]


@pytest.mark.parametrize("name", CHANGES_THE_WEIGHTS)
def test_trained_weights_depend_on(name: str, framework: Any, fit: Any, plain: Any) -> None:
    changes = dict(CHANGES_THE_WEIGHTS[name])
    if name == "loss_weights" and framework.name == "torch":
        changes["loss"] = [framework.estimators.settings()["loss"]]
    model, _ = fit(**changes)
    assert framework.estimators.weights_of(model) != framework.estimators.weights_of(plain)


def test_shares_by_speed_are_a_setting_of_the_training(fit: Any) -> None:
    _, made = fit(balance="auto", epochs=1)
    assert made.training.balance == "auto"


class SlowWorker(Callback):
    """Makes each step of the last rank take `PAUSE_S` longer."""

    def on_fit_begin(self, run: Any) -> None:
        step, pause_s = run.engine.step, PAUSE_S if run.rank else 0.0

        def slowly(*args: Any) -> Any:
            time.sleep(pause_s)
            return step(*args)

        run.engine.step = slowly


def test_slow_worker_is_seen_in_the_history_also_after_save_and_resume(
    framework: Any, dataset: Dataset, tmp_path: Path
) -> None:
    here = framework.estimators.HereEstimator
    changes = {"num_proc": 2, "callbacks": [SlowWorker()], "checkpoint_dir": str(tmp_path / "runs"), "run_id": "a"}
    model = here.__bases__[-1](**framework.estimators.settings(**changes)).from_dataset_path(dataset)
    work = model.history.work
    assert [(row["epoch"], row["rank"]) for row in work] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    fast, slow = work[2:]
    assert slow["work_s"] > 5.9 * PAUSE_S, "six steps"
    assert fast["wait_s"] > slow["wait_s"]
    folder = str(tmp_path / "model")
    model.write().session(SESSION).save(folder)
    reader = type(model).read().session(SESSION)
    assert reader.load(folder).history.work == work
    changed_metadata(Path(folder), lambda about: about["facts"].pop("work"))
    assert reader.load(folder).history.work == (), "as 0.2.0 saved"
    resumed = here(**framework.estimators.settings(**changes, epochs=3)).from_dataset_path(dataset)
    assert (len(resumed.history), resumed.history.work) == (3, work), "the last epoch is of a world of one"


def test_verbose_prints_a_line_for_each_epoch(fit: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fit(verbose=1)
    assert capsys.readouterr().out.count("epoch ") == 2
    fit(verbose=0)
    assert capsys.readouterr().out == ""


def test_store_is_used_and_left_without_files(fit: Any, tmp_path: Path) -> None:
    _, made = fit(store=str(tmp_path / "place"), epochs=1)
    assert made.training.store.url.startswith(str(tmp_path / "place"))
    assert not [path for path in (tmp_path / "place").rglob("*") if path.is_file()]


def test_storage_options_are_given_to_the_filesystem(fit: Any) -> None:
    with pytest.raises(StoreError):
        fit(store="no-such-scheme://x", storage_options={"key": "a"})


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ({}, 4),
        ({"checkpoint_interval": 2}, 2),
        ({"keep_checkpoints": 2}, 2),
        ({"epochs": 5, "keep_checkpoints": 2}, 2),
        # the first epoch has the fewest steps, and the last is the newest
        ({"keep_checkpoints": 1, "checkpoint_best_of": "steps", "checkpoint_best_mode": "min"}, 2),
        ({"keep_checkpoints": 1, "checkpoint_best_of": "steps", "checkpoint_best_mode": "max"}, 1),
    ],
)
def test_checkpoints_are_written_and_kept_as_set(changes: dict[str, Any], left: int, fit: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 4, "keep_checkpoints": 9, **changes}
    fit(checkpoint_dir=tmp_path, run_id="a", **settings)
    assert len(list((tmp_path / "a").rglob("checkpoint.json"))) == left


def test_checkpoint_seconds_adds_checkpoints_within_an_epoch(fit: Any, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"epochs": 1, "keep_checkpoints": 99, "batch_size": 1}
    fit(checkpoint_dir=tmp_path, run_id="a", checkpoint_seconds=1e-6, **settings)
    assert len(list((tmp_path / "a").rglob("checkpoint.json"))) > 1


def test_fit_with_the_same_run_id_resumes_and_resume_false_starts_over(
    framework: Any, fit: Any, tmp_path: Path
) -> None:
    whole, _ = fit(epochs=4)
    fit(epochs=2, checkpoint_dir=tmp_path, run_id="a")
    model, resumed = fit(epochs=4, checkpoint_dir=tmp_path, run_id="a")
    assert resumed.training.resume_from is not None
    assert framework.estimators.weights_of(model) == framework.estimators.weights_of(whole)
    assert model.history["loss"] == whole.history["loss"]
    _, fresh = fit(epochs=4, checkpoint_dir=tmp_path, run_id="a", resume=False)
    assert fresh.training.resume_from is None


def test_numbers_of_workers_and_run_options_go_to_run(
    framework: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}

    def record(call: Any, observer: Any, lease: Any) -> Any:
        numbers = ("num_proc", "min_num_proc", "max_num_proc", "verbose", "status_port")
        names = (*numbers, "launcher", "elastic_timeout", "env")
        given.update({name: getattr(call, name) for name in names})
        raise RuntimeError("recorded")

    monkeypatch.setattr("spark_elastic.jobs.start.start", record)
    options = {"launcher": LocalLauncher(), "elastic_timeout": 7, "env": {"MINE": "1"}}
    numbers = {"num_proc": 3, "min_num_proc": 2, "max_num_proc": 4}
    estimator = framework.estimators.HereEstimator.__bases__[1]
    made = estimator(**framework.estimators.settings(**numbers, run_options=options, verbose=2, status_port=0))
    with pytest.raises(RuntimeError, match="recorded"):
        made.from_dataset_path(dataset)
    backend = {"KERAS_BACKEND": "tensorflow"} if framework.name == "keras" else {}
    assert given == {**numbers, **options, "env": {**backend, "MINE": "1"}, "verbose": 2, "status_port": 0}


def test_output_columns_have_the_chosen_names_and_types(plain: Any) -> None:
    def added(**changes: Any) -> dict[str, Any]:
        made = plain.copy({plain.getParam(name): value for name, value in changes.items()})
        return {field.name: field.dataType for field in made.transformSchema(SCHEMA).fields[1:]}

    of_classes = {"probability": VectorUDT(), "rawPrediction": VectorUDT()}
    assert added() == {"output": ArrayType(FloatType()), "prediction": DoubleType(), **of_classes}
    names = {"output_cols": ["logits"], "prediction_col": "class", "probability_col": "p", "raw_prediction_col": None}
    assert list(added(**names)) == ["logits", "class", "p"]
    none = dict.fromkeys(("prediction_col", "probability_col", "raw_prediction_col"))
    assert added(output_type="vector", **none) == {"output": VectorUDT()}
    assert added(**{**none, "output_cols": [], "probability_col": "p"}) == {"p": VectorUDT()}
    assert added(**{**none, "output_cols": [], "raw_prediction_col": "raw"}) == {"raw": VectorUDT()}
    assert list(added(output_cols=["probability"], raw_prediction_col="")) == ["probability", "prediction"]
    assert [column.rule for column in plain._added()] == ["", "argmax", "argmax", "argmax"]
    chosen = plain.copy({plain.prediction: "argmax_probability"})
    assert [column.rule for column in chosen._added()] == ["", *["argmax_probability"] * 3]


def test_settings_of_transform_go_with_the_model(fit: Any) -> None:
    model, _ = fit(inference_fn=scaled, transform_batch_size=7, transform_threads=2, transform_device="cpu", epochs=1)
    assert model._predictor().args[1:3] == ("cpu", 2)
    assert (model.getInferenceFn(), model.getTransformBatchSize()) == (scaled, 7)
