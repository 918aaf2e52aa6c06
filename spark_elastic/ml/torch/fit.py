"""TorchFit: the steps of a fit that are PyTorch's."""

from __future__ import annotations

from typing import Any

import torch

from spark_elastic.data.store import Store
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import Callback, check_kinds
from spark_elastic.ml.fingerprint import described
from spark_elastic.ml.fit import FitRun
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.model_function import FORM, Shapes, is_function, takes_shapes
from spark_elastic.ml.params import as_list
from spark_elastic.ml.torch import objective, serialization
from spark_elastic.ml.torch.building import initialize, input_shapes, lazy_names
from spark_elastic.ml.torch.dry_run import dry_run
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.model_step import ModelStep, model_step_of
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining, check_compiler, check_parameters
from spark_elastic.ml.torch.train import train
from spark_elastic.runs.trust import trusted_files
from spark_elastic.wire.pickling import round_trip


class TorchFit(FitRun[TorchTraining, ElasticTorchModel]):
    """One fit of a `torch.nn.Module`, or of what a function makes."""

    deciding = (*FitRun.deciding, "train_fn", "lr_scheduler", "scheduler_interval", "scheduler_monitor", "amp")
    train_fn = staticmethod(train)
    dry_run_fn = staticmethod(dry_run)
    _shapes: Shapes = ()  # of the model's inputs, for a function that makes the model

    def check_framework(self) -> None:
        model, optimizer = self.given("model"), self.given("optimizer")
        step = model_step_of(self.given("train_fn"))
        self._check_model(model, step)
        check_compiler(self.given("compile"))
        if optimizer is None and (step is None or not step.makes_optimizer):
            raise InvalidSettingsError(
                "optimizer is not set: torch.optim.Adam(model.parameters(), lr=1e-3), for example"
            )
        if not (optimizer is None or isinstance(optimizer, torch.optim.Optimizer) or callable(optimizer)):
            raise InvalidSettingsError(
                f"optimizer must be a torch optimizer, its class, or a function of the parameters, not {optimizer!r}"
            )
        loss, labels = self.given("loss"), self.given("label_cols")
        if loss is None and self.given("train_fn") is None:
            raise InvalidSettingsError("neither loss nor train_fn is set; give one of them")
        for each in as_list(loss):
            if isinstance(each, type) or not callable(each):
                hint = f"; make one: {each.__name__}()" if isinstance(each, type) else ""
                raise InvalidSettingsError(
                    f"loss must be a module or a function of (output, label), not {each!r}{hint}"
                )
            if self.given("amp") is not None and isinstance(each, torch.nn.BCELoss):
                raise InvalidSettingsError(
                    "torch refuses BCELoss under autocast on GPUs; leave the sigmoid out of the model and use "
                    "BCEWithLogitsLoss, or leave amp out"
                )
        if isinstance(loss, (list, tuple)) and labels and len(loss) != len(labels):
            raise InvalidSettingsError(f"{len(loss)} losses for {len(labels)} label_cols {labels!r}")
        self._virtual_workers()
        if isinstance(optimizer, torch.optim.Optimizer):
            if not isinstance(model, torch.nn.Module):
                raise InvalidSettingsError(
                    f"optimizer is an instance of {type(optimizer).__name__}, made for other parameters than those of "
                    "the model that a function makes; give its class, or a function of the parameters: "
                    f"lambda params: torch.optim.{type(optimizer).__name__}(params, "
                    f"lr={optimizer.defaults.get('lr')})"
                )
            check_parameters(optimizer, model)
            if getattr(self.given("lr_scheduler"), "optimizer", optimizer) is not optimizer:
                raise InvalidSettingsError(
                    "lr_scheduler was made for another optimizer than the one that is set; give a function of the "
                    "optimizer that returns a scheduler"
                )
        check_kinds(self.worker_callbacks(), (Callback,), "spark_elastic.ml.callbacks.Callback")
        if self.given("device") not in (None, "auto"):
            try:
                torch.device(self.given("device"))
            except RuntimeError as error:
                raise InvalidSettingsError(f"device={self.given('device')!r}: {error}") from None

    def _check_model(self, model: Any, step: ModelStep | None) -> None:
        if isinstance(model, torch.nn.Module):
            return
        if model is None:
            raise InvalidSettingsError("model is not set")
        if not is_function(model):
            raise InvalidSettingsError(
                f"model must be a torch.nn.Module, not {model!r}; or a function that returns one: {FORM}"
            )
        takes_shapes(model)  # raises if it takes more
        if step is not None and not step.takes_functions:
            raise InvalidSettingsError(
                f"model is a function, and {step.name} must be given as it is: a torch.nn.Module"
            )

    def label_dtypes(self) -> list[str | None]:
        loss, labels = self.given("loss"), self.given("label_cols") or []
        if (step := model_step_of(self.given("train_fn"))) is not None:
            return [step.label_dtype] * len(labels)
        each = list(loss) if isinstance(loss, (list, tuple)) else [loss] * len(labels)
        return [objective.label_dtype(one) for one in each]

    def _configured(self) -> dict[str, Any]:
        """Return the settings that the model decides now that the rows are known."""
        step, batch_size = model_step_of(self.given("train_fn")), self.batch_size()
        if step is None:
            return {}
        steps = None if batch_size is None else -(-self.dataset.rows("train") // batch_size)
        return step.configured(self.given("model"), self.given("epochs"), steps)

    def _virtual_workers(self) -> int | None:
        """Return the shards of each batch, None unless the training is to be exact; raise if no setting says it."""
        if self.given("consistency") != "exact":
            return None
        found = next(filter(None, map(self.given, ("virtual_workers", "max_num_proc", "num_proc"))), None)
        if found is None:
            raise InvalidSettingsError(
                "consistency='exact' needs virtual_workers, the number of shards of each batch: the present slots of "
                "the cluster must not decide it. Set virtual_workers, or max_num_proc"
            )
        return int(found)

    def identity(self) -> dict[str, Any]:
        configured = {name: each for name, each in self._configured().items() if name in self.deciding}
        configured.pop("train_fn", None)
        virtual = self._virtual_workers()
        return {
            **super().identity(),
            **({} if virtual is None else {"virtual_workers": virtual}),
            **{name: described(each) for name, each in configured.items()},
        }

    def dry_run(self) -> None:
        model = self.given("model")
        if not isinstance(model, torch.nn.Module):
            self._shapes = input_shapes(self.make_training(self.dataset.store))
        elif lazy_names(model):  # before anything describes the model or makes a copy of it
            initialize(self.make_training(self.dataset.store))
        super().dry_run()

    def make_training(self, store: Store, resume_from: str | None = None) -> TorchTraining:
        same = ("optimizer", "loss", "loss_weights", "train_fn", "lr_scheduler", "scheduler_interval", "amp", "compile")
        model = self.given("model")
        settings = {
            "model": model
            if isinstance(model, torch.nn.Module)
            else ModelFunction(model, self._shapes, self.given("seed")),
            **self.common_settings(store, resume_from),
            "metrics": self.given("metrics") or {},
            "virtual_workers": self._virtual_workers(),
            "generators": self.given("generators") or (),
            "scheduler_monitor": self.given("scheduler_monitor"),
            "callbacks": self.worker_callbacks(),
            **{name: self.given(name) for name in same},
        }
        return TorchTraining(**{**settings, **self._configured()})

    def fitted_model(self, fitted: Fitted) -> ElasticTorchModel:
        model, given = ElasticTorchModel(), self.training.model
        with trusted_files():  # written by the workers of this fit
            module = serialization.trained_copy(given, self.trained.read(MODEL_FILE))
        # a copy, because what the function refers to may change later, as in a notebook
        model._attach(module, fitted, round_trip(given) if isinstance(given, ModelFunction) else None)
        return model
