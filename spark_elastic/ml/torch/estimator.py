"""ElasticTorchEstimator: a PyTorch module, trained elastically on the rows of a DataFrame."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from spark_elastic.data.dataset import Dataset
from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml import params as to
from spark_elastic.ml.callbacks import Callback
from spark_elastic.ml.estimator import ElasticEstimator, TrialRun
from spark_elastic.ml.model import Fitted
from spark_elastic.ml.params import setting
from spark_elastic.ml.persistence import Codec
from spark_elastic.ml.torch import objective, serialization
from spark_elastic.ml.torch.dry_run import dry_run
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining
from spark_elastic.ml.torch.training import train
from spark_elastic.ml.trust import trusted_files


class ElasticTorchEstimator(ElasticEstimator):
    """Trains a `torch.nn.Module` on a DataFrame, in workers that may come and go, and returns an `ElasticTorchModel`.

    ::

        estimator = ElasticTorchEstimator(
            model=net, optimizer=torch.optim.Adam(net.parameters(), lr=1e-3), loss=nn.CrossEntropyLoss(),
            feature_cols=["features"], label_cols=["label"], batch_size=1024, epochs=10, validation=0.1,
            min_num_proc=2, max_num_proc=8,
        )
        model = estimator.fit(df)

    All settings are keywords, and Params of Spark ML: `print(estimator.explainParams())` lists them. The module that is
    given is not changed by `fit`.

    optimizer: an instance on the model's parameters, whose groups and their options are kept; a class; or a function
        of the list of parameters.
    loss: a module or function of (output, label); a list with one for each label.
    metrics: functions of (output, label) or torchmetrics metrics, by name.
    train_fn: (model, batch) -> loss or (loss, outputs), instead of loss, for models that are not trained as
        loss(model(inputs), label). `batch.inputs`, `batch.labels`, `batch.weights`, `batch["features_0"]`.

    Raises (fit):
        InvalidSettingsError, DataError, StoreError, CheckpointError: what has to be changed; no worker was started.
        UserFunctionError: your code raised in a worker. JobError: the job could not go on.
    """

    DECIDING = (*ElasticEstimator.DECIDING, "train_fn", "lr_scheduler", "scheduler_interval", "scheduler_monitor")

    train_fn: Any = setting(
        "train_fn",
        "(model, batch) -> loss, or (loss, outputs) for metrics; instead of loss. batch has inputs, labels, weights.",
        to.function,
    )
    lr_scheduler: Any = setting(
        "lr_scheduler",
        "a scheduler on the optimizer, or a function of the optimizer that returns one.",
        to.anything,
    )
    scheduler_interval: Any = setting(
        "scheduler_interval",
        "whether lr_scheduler steps after each 'epoch' or each 'step'.",
        to.one_of("epoch", "step"),
        default="epoch",
    )
    scheduler_monitor: Any = setting(
        "scheduler_monitor",
        "column of the history that a scheduler such as ReduceLROnPlateau follows. Default: 'val_loss', or 'loss'.",
        to.text,
    )

    @classmethod
    def _codec(cls) -> Codec:
        return serialization

    def _check_together(self) -> None:
        super()._check_together()
        if self._given("loss") is not None and self._given("train_fn") is not None:
            raise InvalidSettingsError(
                "loss and train_fn are both set; a train_fn computes its own loss, leave one out"
            )
        if self._given("loss_weights") is not None and self._given("train_fn") is not None:
            raise InvalidSettingsError("loss_weights are for losses; a train_fn adds its own up")
        for name in ("scheduler_monitor", "scheduler_interval"):
            if self.isSet(name) and self._given(name) is not None and self._given("lr_scheduler") is None:
                raise InvalidSettingsError(f"{name} is set, but there is no lr_scheduler")

    def _check_framework(self) -> None:
        model, optimizer = self._given("model"), self._given("optimizer")
        if not isinstance(model, torch.nn.Module):
            raise InvalidSettingsError(
                f"model must be a torch.nn.Module, not {model!r}" if model is not None else "model is not set"
            )
        if optimizer is None:
            raise InvalidSettingsError(
                "optimizer is not set: torch.optim.Adam(model.parameters(), lr=1e-3), for example"
            )
        if not (isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            raise InvalidSettingsError(
                f"optimizer must be a torch optimizer, its class, or a function of the parameters, not {optimizer!r}"
            )
        self._check_losses()
        self._check_optimizer(model, optimizer)
        for callback in self._callbacks():
            if not isinstance(callback, Callback):
                raise InvalidSettingsError(
                    f"callbacks must be a list of spark_elastic.ml.callbacks.Callback; {callback!r} is none"
                )
        if self._given("device") not in (None, "auto"):
            try:
                torch.device(self._given("device"))
            except RuntimeError as error:
                raise InvalidSettingsError(f"device={self._given('device')!r}: {error}") from None

    def _check_losses(self) -> None:
        loss, labels = self._given("loss"), self._given("label_cols")
        if loss is None and self._given("train_fn") is None:
            raise InvalidSettingsError("neither loss nor train_fn is set; give one of them")
        for each in loss if isinstance(loss, (list, tuple)) else [] if loss is None else [loss]:
            if not objective.is_loss(each):
                hint = f"; make one: {each.__name__}()" if isinstance(each, type) else ""
                raise InvalidSettingsError(
                    f"loss must be a module or a function of (output, label), not {each!r}{hint}"
                )
        if isinstance(loss, (list, tuple)) and labels and len(loss) != len(labels):
            raise InvalidSettingsError(f"{len(loss)} losses for {len(labels)} label_cols ({', '.join(labels)})")

    def _check_optimizer(self, model: torch.nn.Module, optimizer: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            return
        own = {id(parameter) for parameter in model.parameters()}
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise InvalidSettingsError(
                f"{len(foreign)} of the optimizer's parameters are not the model's: it was made for another module. "
                "Give a function of the parameters instead, which goes with any model: "
                f"lambda params: torch.optim.{type(optimizer).__name__}(params, lr={optimizer.defaults.get('lr')})"
            )
        scheduler = self._given("lr_scheduler")
        if getattr(scheduler, "optimizer", optimizer) is not optimizer:
            raise InvalidSettingsError(
                "lr_scheduler was made for another optimizer than the one that is set; give a function of the "
                "optimizer that returns a scheduler"
            )

    def _label_dtypes(self) -> list[str | None]:
        loss, labels = self._given("loss"), self._given("label_cols") or []
        each = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(labels)
        return [objective.label_dtype(one) for one in each]

    def _training(self, dataset: Dataset, run: Store, resume_from: str | None) -> TorchTraining:
        same = ("model", "optimizer", "loss", "loss_weights", "train_fn", "lr_scheduler", "scheduler_interval")
        return TorchTraining(
            **self._common_settings(dataset, run, resume_from),
            metrics=self._given("metrics") or {},
            scheduler_monitor=self._given("scheduler_monitor"),
            callbacks=self._callbacks(),
            **{name: self._given(name) for name in same},
        )

    def _try(self, training: TorchTraining) -> TrialRun:
        return dry_run(training, self._given("inference_fn"))

    def _train_fn(self) -> Callable[[Any], Any]:
        return train

    def _model_nbytes(self, training: TorchTraining) -> int:
        weights = training.model.state_dict().values()
        return sum(each.nbytes for each in weights if isinstance(each, torch.Tensor))

    def _fitted_model(
        self, training: TorchTraining, fitted: Fitted, trained: Callable[[str], bytes]
    ) -> ElasticTorchModel:
        model = ElasticTorchModel()
        module = copy.deepcopy(self._given("model")).cpu()
        with trusted_files():  # our own workers have written it
            values = serialization.from_bytes(trained(MODEL_FILE))
        model._attach(serialization.fill(module, values), fitted)
        return model
