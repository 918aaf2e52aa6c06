"""LightningModules in an estimator, beside Lightning's own Trainer."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedulers

from spark_elastic import ElasticTorchEstimator, LocalLauncher
from spark_elastic.data.dataset import Dataset
from spark_elastic.data.reader import BatchReader
from spark_elastic.errors import CheckpointError, DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import EarlyStopping
from spark_elastic.ml.torch.lightning import LightningStep, settings_of
from spark_elastic.ml.torch.model_step import StepPosition
from tests.unit.ml.torch.estimators import HereEstimator, weights_of

pl = pytest.importorskip("lightning.pytorch")
from tests.unit.ml.torch.lightning_modules import Classifier, Measured, trained_by_lightning  # noqa: E402

HERE: dict[str, Any] = {"num_proc": 1, "run_options": {"launcher": LocalLauncher()}, "verbose": 0, "batch_size": 20}


@pytest.fixture
def warnings_of(caplog: pytest.LogCaptureFixture) -> Any:
    caplog.set_level(logging.WARNING, "spark_elastic.ml")
    return lambda: [record.getMessage() for record in caplog.records]


def rows_of(dataset: Dataset, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    with BatchReader(dataset, split, batch_size=1000, shuffle=False) as reader:
        batch = next(iter(reader.epoch(0)))
        return torch.tensor(batch.tensors["features_0"]), torch.tensor(batch.tensors["label_0"])


def fitted(module: Any, dataset: Dataset, **changes: Any) -> Any:
    return HereEstimator.from_lightning(module, **{**HERE, **changes}).from_dataset_path(dataset)


# --- the same as Lightning's Trainer --------------------------------------------------------------


@pytest.mark.parametrize("parts", [1, 3])
def test_history_and_weights_are_those_of_lightnings_trainer(parts: int, dataset: Dataset) -> None:
    module = Measured()
    before = copy.deepcopy(module.state_dict())
    model = fitted(module, dataset, epochs=3, shuffle=False, accumulation_steps=parts)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items()), "the user's own"
    assert (module._trainer, "log" in module.__dict__) == (None, False)
    reference = Measured()
    expected = trained_by_lightning(
        reference, rows_of(dataset, "train"), rows_of(dataset, "validation"), batch_size=20, epochs=3
    )
    columns = {"accuracy", "train_loss", "place", "shared", "begun", "even", "val_loss", "val_accuracy", "val_auc"}
    columns |= {"val_MulticlassPrecision", "val_MulticlassRecall", "val_place", "lr"}
    for row, wanted in zip(model.history, expected, strict=True):
        assert row["loss"] == pytest.approx(row["train_loss"], rel=1e-6)
        for name in columns:
            assert row[name] == pytest.approx(wanted[name], rel=1e-5), name
    trained = [number for value in reference.state_dict().values() for number in value.reshape(-1).tolist()]
    assert weights_of(model) == pytest.approx(trained, abs=1e-6)
    assert dict(model.module.hparams) == {"lr": 0.1, "width": 8}


def test_a_common_name_of_both_steps_gets_a_prefix_in_validation(dataset: Dataset) -> None:
    class Common(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y = batch
            loss = F.cross_entropy(self(x), y)
            self.log("loss", loss)
            self.log("ce", loss)
            return loss

        validation_step = training_step

    history = fitted(Common(), dataset, shuffle=False).history
    assert [name for name in history.names if "loss" in name or "ce" in name] == ["loss", "ce", "val_loss", "val_ce"]
    assert history["loss"] == history["ce"]
    assert history["val_loss"] == history["val_ce"] != history["loss"]


def test_without_values_from_validation_there_is_no_column_of_it(dataset: Dataset) -> None:
    class Silent(Classifier):
        def validation_step(self, batch: Any) -> None:
            assert not torch.is_grad_enabled()

    assert "val_loss" not in fitted(Silent(), dataset).history.names
    with pytest.raises(InvalidSettingsError, match="val_loss"):
        fitted(Silent(), dataset, callbacks=[EarlyStopping("val_loss")])


def test_values_of_later_steps_and_of_own_columns_are_ignored_with_a_warning(
    dataset: Dataset, warnings_of: Any
) -> None:
    class Late(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if batch_idx == 2:
                self.log("late", 1.0)
            self.log("lr", 7.0)
            self.log("twice", 1.0)
            self.log("twice", 3.0)
            return super().training_step(batch, batch_idx)

    history = fitted(Late(), dataset, epochs=2).history
    assert "late" not in history.names
    assert history["lr"] == [0.1, 0.1]
    assert history["twice"] == [2.0, 2.0]
    told = [text.split(" is ignored")[0] for text in warnings_of() if "is ignored" in text]
    assert told == ["self.log('lr')", "self.log('late')"]


# --- settings -------------------------------------------------------------------------------------


def test_methods_that_are_not_called_are_named_once(warnings_of: Any) -> None:
    class Hooked(Classifier):
        def on_validation_epoch_end(self) -> None: ...
        def configure_callbacks(self) -> Any: ...
        def setup(self, stage: str) -> None: ...
        def on_train_epoch_start(self) -> None: ...

    ElasticTorchEstimator.from_lightning(Hooked())
    (told,) = warnings_of()
    assert told.startswith("Hooked overrides configure_callbacks, on_validation_epoch_end, setup, which this training")


class Manual(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Clipping(Classifier):
    def configure_gradient_clipping(self, *args: Any, **options: Any) -> None: ...


class Unfinished(pl.LightningModule):
    def training_step(self, batch: Any) -> Any: ...


@pytest.mark.parametrize(
    ("module", "changes", "words"),
    [
        (nn.Linear(1, 1), {}, "needs a LightningModule"),
        (Classifier, {}, "needs a LightningModule"),
        (Manual(), {}, "automatic_optimization=False"),
        (Clipping(), {}, "overrides configure_gradient_clipping"),
        (Unfinished(), {}, "has no configure_optimizers"),
        (Classifier(), {"optimizer": torch.optim.SGD}, "optimizer is set, but the LightningModule decides it"),
        (Classifier(), {"scheduler_interval": "step"}, "scheduler_interval is set"),
        (Classifier(), {"loss": nn.MSELoss()}, "loss is set"),
        (Classifier(), {"compile": True}, "compile is set, but the LightningModule decides it"),
        (Classifier(), {"model": nn.Linear(1, 1)}, "model follows from"),
        (Classifier(), {"epoch": 3}, "epochs"),
    ],
)
def test_what_cannot_be_trained_is_refused_with_a_reason(module: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettingsError, match=words):
        ElasticTorchEstimator.from_lightning(module, **changes)


def step_that(**steps: Any) -> Any:
    """Return a Classifier whose steps do something else; each is a function of (module, batch)."""
    methods = {name: lambda self, batch, batch_idx, step=step: step(self, batch) for name, step in steps.items()}
    return type("Odd", (Classifier,), methods)()


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        (lambda module, batch: module.net(batch[0]), DataError, "must return a loss of one value"),
        (lambda module, batch: module.log("a", torch.ones(2)), InvalidSettingsError, r"not Tensor of shape \[2\]"),
        (lambda module, batch: module.log("a", 1, reduce_fx="max"), InvalidSettingsError, "reduce_fx='max'"),
        (lambda module, batch: module.log("a", Measured().accuracy), InvalidSettingsError, "not an attribute"),
        (lambda module, batch: module.trainer.datamodule, DataError, "self.trainer.datamodule does not exist"),
        (lambda module, batch: module.optimizers(), DataError, "self.trainer"),
    ],
)
def test_what_a_step_cannot_do_is_an_error_before_any_worker_starts(
    step: Any, error: type[Exception], words: str, dataset: Dataset
) -> None:
    with pytest.raises(error, match=words):
        fitted(step_that(training_step=step), dataset)


def test_a_validation_needs_a_validation_step(dataset: Dataset) -> None:
    class Blind(Classifier):
        validation_step = pl.LightningModule.validation_step

    with pytest.raises(InvalidSettingsError, match="Blind has no validation_step"):
        fitted(Blind(), dataset)


def test_the_number_of_steps_is_unknown_with_a_batch_for_each_worker(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match="set batch_size instead"):
        fitted(Measured(), dataset, batch_size=None, per_worker_batch_size=20)


# --- configure_optimizers -------------------------------------------------------------------------

PARAMETERS = [nn.Parameter(torch.zeros(1))]


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD(PARAMETERS, lr=1.0)


def halving(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.StepLR(optimizer, 1, 0.5)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return schedulers.ReduceLROnPlateau(optimizer)


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (lambda o: o, {}),
        (lambda o: [o], {}),
        (lambda o: ([o], [halving(o)]), {"scheduler_interval": "epoch"}),
        (lambda o: [{"optimizer": o, "lr_scheduler": halving(o)}], {"scheduler_interval": "epoch"}),
        (lambda o: ([o], [{"scheduler": halving(o), "interval": "step"}]), {"scheduler_interval": "step"}),
        (
            lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "monitor": "x", "strict": True}},
            {"scheduler_interval": "epoch", "scheduler_monitor": "x"},
        ),
    ],
)
def test_every_form_of_optimizers_is_understood(make: Any, wanted: dict[str, Any]) -> None:
    optimizer = sgd()
    found = settings_of(make(optimizer), 5)
    assert found.pop("optimizer") is optimizer
    schedule = found.pop("lr_scheduler", None)
    assert schedule is None or schedule.optimizer is optimizer
    assert found == wanted
    assert (schedule is None) == (wanted == {})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda o: [o, sgd()], "2 optimizers"),
        (lambda o: ([o], [halving(o), halving(o)]), "2 schedulers"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "intervall": "step"}}, "'intervall'"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "interval": "batch"}}, "'batch'"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": halving(o), "frequency": 0}}, "not 0"),
        (lambda o: {"optimizer": o, "lr_scheduler": {"scheduler": plateau(o), "frequency": 2}}, "ReduceLROnPlateau"),
    ],
)
def test_optimizers_that_cannot_be_used_are_refused_with_a_reason(make: Any, words: str) -> None:
    with pytest.raises(InvalidSettingsError, match=words):
        settings_of(make(sgd()), 5)


def test_frequency_counts_the_steps_of_each_epoch_as_lightning_does(dataset: Dataset) -> None:
    class Often(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            options = {"scheduler": halving(optimizer), "interval": "step", "frequency": 2}
            return {"optimizer": optimizer, "lr_scheduler": options}

    rates = fitted(Often(), dataset, epochs=2, shuffle=False).history["lr"]  # five steps an epoch
    rows = rows_of(dataset, "train"), rows_of(dataset, "validation")
    expected = trained_by_lightning(Often(), *rows, batch_size=20, epochs=2)
    assert rates == [row["lr"] for row in expected] == [0.25, 0.0625]


# --- checkpoints and transform --------------------------------------------------------------------


def test_a_training_resumes_with_its_schedule_and_its_logged_values(dataset: Dataset, tmp_path: Any) -> None:
    class Warm(Classifier):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams["lr"])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": halving(optimizer), "frequency": 2}}

    places = {"checkpoint_dir": str(tmp_path), "run_id": "a"}
    fitted(Warm(), dataset, epochs=1, **places)
    resumed = fitted(Warm(), dataset, epochs=3, **places)
    whole = fitted(Warm(), dataset, epochs=3)
    for name in ("train_loss", "val_loss", "lr"):
        assert resumed.history[name] == pytest.approx(whole.history[name], rel=1e-6)
    with pytest.raises(CheckpointError, match="optimizer was"):
        fitted(Warm(lr=0.3), dataset, epochs=4, **places)


# --- interrupted epochs ---------------------------------------------------------------------------


class Growing(Classifier):
    """Changes a buffer, a mode and an attribute when an epoch starts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("scale", torch.ones(1))
        self.begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.norm.eval()
        self.scale *= 2
        self.begun.append(self.current_epoch)


def test_start_of_an_epoch_is_repeated_with_its_first_step() -> None:
    module, step = Growing().train(), LightningStep()
    before = copy.deepcopy(module.state_dict())
    step.prepare(module, StepPosition(epoch=1, step=5))
    module.load_state_dict(before)  # as the training does after an interrupted step
    step.prepare(module, StepPosition(epoch=1, step=5))
    step.prepare(module, StepPosition(epoch=1, step=6, index=1))
    assert module.scale == 2


def test_worker_that_joins_in_an_epoch_keeps_the_tensors_that_it_got() -> None:
    module, step = Growing().train(), LightningStep()
    module.scale.fill_(4)
    for index in (3, 4):
        step.prepare(module, StepPosition(epoch=1, step=5 + index, index=index))
    assert module.scale == 4
    assert module.begun == [1]
    assert not module.norm.training


def test_frozen_normalisation_is_as_in_lightning(dataset: Dataset) -> None:
    class Frozen(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6).eval()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(self.norm(x))

    model = fitted(Frozen(), dataset, epochs=2, shuffle=False)
    rows = rows_of(dataset, "train"), rows_of(dataset, "validation")
    expected = trained_by_lightning(Frozen(), *rows, batch_size=20, epochs=2)
    assert model.history["val_loss"] == pytest.approx([row["val_loss"] for row in expected], rel=1e-5)
    assert model.module.norm.num_batches_tracked == 0


def test_attributes_of_configure_optimizers_reach_steps_and_fitted_module(dataset: Dataset) -> None:
    class Planned(Classifier):
        def configure_optimizers(self) -> Any:
            self.total = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("total", self.total)
            return super().training_step(batch, batch_idx)

        def predict_step(self, batch: Any) -> Any:
            return {"probability": self(batch).softmax(1) * self.total}

    module = Planned()
    model = fitted(module, dataset, epochs=2)
    (probability,) = model._predictor()()({"features_0": torch.zeros(4, 6)})
    assert probability.sum(1) == pytest.approx([10.0] * 4)
    assert model.history["total"] == [10, 10]
    assert model.module.total == 10
    assert not hasattr(module, "total")
