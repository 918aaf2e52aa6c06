"""The dry run on the driver: errors before any worker starts, and the outputs that the fitted model gets."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import DataError, DatasetError, InvalidSettingsError, NotPicklableError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback, EarlyStopping
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.serving import Serving
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_net, settings, weights_of


def wrong_net() -> nn.Module:
    return nn.Linear(5, 3)


def detached(model: nn.Module, batch: Any) -> torch.Tensor:
    return model(*batch.inputs).detach().mean()


def by_class(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).float()


def no_label(columns: dict[str, Any]) -> dict[str, Any]:
    return {"features_0": columns["features_0"]}


OTHER: dict[str, Any] = {"optimizer": torch.optim.SGD}
TWO_BEST = [BestCheckpoint("loss"), BestCheckpoint("val_loss")]


def scheduler_of_another() -> dict[str, Any]:
    net = make_net()
    first, second = (torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(2))
    return {"model": net, "optimizer": first, "lr_scheduler": torch.optim.lr_scheduler.StepLR(second, 1)}


def expanded() -> nn.Module:
    net = nn.Linear(6, 3)
    net.weight = nn.Parameter(torch.zeros(3, 1).expand(3, 6))
    return net


class Locked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(6, 3)
        self.lock = threading.Lock()


def locked_loss() -> Any:
    lock = threading.Lock()

    def loss(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        with lock:
            return cross_entropy(output, label)

    return loss


def plateau(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def stepped(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1)


class Odd(Callback):
    def state_dict(self) -> dict[str, Any]:
        return {"seen": {1, 2}}


class Odder(nn.Linear):
    """A layer with a state that only a pickle can hold."""

    def __init__(self) -> None:
        super().__init__(6, 3)

    def get_extra_state(self) -> Any:
        return {"seen": {1, 2}}

    def set_extra_state(self, state: Any) -> None: ...


def table(**options: Any) -> nn.Module:
    return nn.Sequential(WordsOf(), nn.EmbeddingBag(7, 3, **options))


class WordsOf(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.abs() * 4).long() % 7


class Segments(nn.Module):
    """A layer in two segments whose activations are computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.twice, x.requires_grad_(), use_reentrant=True)
        return self.last(x)


def tracked() -> nn.Module:
    norm = nn.InstanceNorm1d(1, track_running_stats=True)
    return nn.Sequential(nn.Unflatten(1, (1, 6)), norm, nn.Flatten())


class Centred(nn.Linear):
    """A layer that keeps a moving mean of its rows, or of random numbers that are the same for any rows."""

    def __init__(self, of_rows: bool) -> None:
        super().__init__(6, 6)
        self.of_rows = of_rows
        self.register_buffer("moving", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.moving = 0.9 * self.moving + 0.1 * (x.detach().mean(0) if self.of_rows else torch.rand(6))
        return super().forward(x)


class Graph(nn.Linear):
    """A layer with a sparse buffer, which stays as it is."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.register_buffer("edges", torch.eye(6).to_sparse(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward((self.edges @ x.T).T)


def second_output(model: Any, batch: Any) -> Any:
    """A loss of a model with another output in training, which is not there in a validation."""
    assert model.training, "no second output"
    return cross_entropy(model(batch.inputs[0]), batch.labels[0])


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"model": table(max_norm=0.5), **OTHER}, InvalidSettingsError, "1 is an EmbeddingBag with max_norm=0.5"),
        ({"model": table(scale_grad_by_freq=True), **OTHER}, InvalidSettingsError, "with scale_grad_by_freq=True"),
        ({"model": table(sparse=True), "optimizer": momentum}, InvalidSettingsError, "in the state of SGD is sparse"),
        ({"model": Segments(), **OTHER}, InvalidSettingsError, r"gradient of twice.* 2 times.* use_reentrant=False"),
        ({"loss": None, "train_fn": second_output}, DataError, "in validation .*no second output"),
        ({"model": wrong_net()}, DataError, r"cannot deal with the first 4 rows: .*features_0 float32 \[4, 6\]"),
        ({"loss": nn.BCELoss()}, DataError, r"label_0 int64 \[4\]"),
        ({"metrics": {"a": lambda output, label: 1 / 0}}, DataError, r"the metrics cannot .* division by zero"),
        ({"metrics": {"loss": by_class}}, InvalidSettingsError, "cannot be called 'loss'"),
        ({"metrics": {"a": 3}}, InvalidSettingsError, "the metric a is neither"),
        ({"loss": None, "train_fn": detached}, InvalidSettingsError, "does not depend on any parameter"),
        ({"model": make_net().requires_grad_(False)}, InvalidSettingsError, "does not depend on any parameter"),
        (scheduler_of_another(), InvalidSettingsError, "made for another optimizer"),
        ({"loss": [nn.CrossEntropyLoss()] * 2}, InvalidSettingsError, "2 losses were given for 1 labels"),
        ({"optimizer": torch.optim.LBFGS}, InvalidSettingsError, "LBFGS"),
        ({"optimizer": lambda params: 3}, InvalidSettingsError, "it gave int"),
        ({"model": make_net().to("meta")}, InvalidSettingsError, r"0\.weight of the model is on the meta device"),
        ({"model": expanded(), "optimizer": torch.optim.SGD}, InvalidSettingsError, "SGD cannot change"),
        ({"model": Locked()}, NotPicklableError, r"model \(Locked\) cannot be sent .*lock"),
        ({"loss": locked_loss()}, NotPicklableError, "loss.*function .* → .*cannot be sent .*lock"),
        ({"loss": nn.MSELoss(), "model": nn.Linear(6, 4), **OTHER}, DataError, r"MSELoss needs .*\[4, 4\]"),
        ({"callbacks": [EarlyStopping("f1")]}, InvalidSettingsError, "no 'f1' to monitor; there are epoch"),
        ({"lr_scheduler": plateau, "scheduler_monitor": "f1"}, InvalidSettingsError, "scheduler_monitor='f1' is not"),
        ({"lr_scheduler": plateau, "scheduler_interval": "step"}, InvalidSettingsError, "with ReduceLROnPlateau"),
        ({"lr_scheduler": stepped, "scheduler_monitor": "loss"}, InvalidSettingsError, "which follows no value"),
        ({"callbacks": [Odd()]}, InvalidSettingsError, r"state_dict\(\) of Odd must return values that JSON can hold"),
        ({"model": Odder(), **OTHER}, InvalidSettingsError, "_extra_state.* which a checkpoint cannot hold"),
        ({"callbacks": TWO_BEST}, InvalidSettingsError, "by loss min and by val_loss min"),
        ({"data_options": {"order": "lanes"}, "shuffle": False}, InvalidSettingsError, "lanes. shuffles rows"),
        ({"transformation_fn": lambda columns: {}}, DataError, "returned no label_0, but nothing"),
        ({"transformation_fn": no_label}, DataError, "returned no label_0, but features_0"),
    ],
)
def test_misfit_is_reported_with_names_types_and_shapes(
    changes: dict[str, Any], error: Any, said: str, dataset: Dataset
) -> None:
    made = estimator(**changes)
    with pytest.raises(error, match=f"(?s){said}"):
        made.from_dataset_path(dataset)
    assert not hasattr(made, "training"), "no job was started"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": None}, "model is not set"),
        ({"model": 3, "optimizer": torch.optim.SGD}, "model must be a torch.nn.Module, not 3"),
        ({"optimizer": None}, "optimizer is not set"),
        ({"optimizer": 3}, "optimizer must be a torch optimizer"),
        ({"loss": None}, "neither loss nor train_fn"),
        ({"loss": nn.CrossEntropyLoss}, r"make one: CrossEntropyLoss\(\)"),
        ({"callbacks": [len]}, "callbacks must be a list of"),
        ({"num_proc": None}, "set num_proc"),
        ({"run_options": {"elastic_timeout": -1}}, "elastic_timeout must be a positive number"),
        ({"optimizer": torch.optim.SGD(make_net().parameters(), lr=0.5)}, "4 of .* lr=0.5.* Parameters of a loss"),
    ],
)
def test_settings_are_checked_before_anything_is_read(changes: dict[str, Any], said: str, dataset: Dataset) -> None:
    given = settings()
    given.update(changes)
    with pytest.raises(InvalidSettingsError, match=said):
        HereEstimator(**given).from_dataset_path(dataset)


def test_dataset_without_the_tensors_of_an_estimator_is_refused(tmp_path: Any) -> None:
    other = pack({"x": torch.zeros(3, 2).numpy()}, tmp_path)
    with pytest.raises(DatasetError, match=r"has the tensors \['x'\]"):
        estimator().from_dataset_path(other)


@pytest.mark.parametrize(
    ("loss", "last", "rule"),
    [
        (nn.CrossEntropyLoss(), 3, "argmax"),
        (cross_entropy, 3, "argmax"),
        (lambda output, label: nn.functional.mse_loss(output[:, 0], label.float()), 3, None),
        (lambda output, label: nn.functional.mse_loss(output[:, 0], label.float()), 1, "value"),
    ],
)
def test_the_rule_of_the_prediction_follows_from_the_loss_and_the_output(
    loss: Any, last: int, rule: str | None, dataset: Dataset
) -> None:
    net = nn.Linear(6, last)
    model = estimator(model=net, optimizer=torch.optim.SGD, loss=loss, epochs=1).from_dataset_path(dataset)
    count = 0 if rule is None else 1 if rule == "value" else 3  # with probability and rawPrediction
    assert [column.rule for column in model._added() if column.made != "raw"] == [rule] * count


def through_a_column(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "features_0": columns["features_0"][:, :5]}


def test_model_that_needs_transformation_fn_fails_in_transform_only(dataset: Dataset) -> None:
    chosen: dict[str, Any] = {"model": nn.Linear(5, 3), "optimizer": torch.optim.SGD, "epochs": 1}
    model = estimator(**chosen, transformation_fn=through_a_column).from_dataset_path(dataset)
    with pytest.raises(InvalidSettingsError, match="transform does so through inference_fn"):
        model._added()
    model = estimator(**chosen, transformation_fn=through_a_column, inference_fn=through_a_column).from_dataset_path(
        dataset
    )
    assert [column.name for column in model._added()] == ["output", *OF_CLASSES]


OF_CLASSES = ["prediction", "probability", "rawPrediction"]


class Recurrent(nn.Module):
    """Returns its values for each row, and what has another first axis, as chosen by `kind`."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.lstm, self.head = nn.LSTM(6, 5, num_layers=4, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        out, state = self.lstm(x[:, None, :])
        logits = self.head(out[:, -1])
        made: dict[str, Any] = {
            "states": (logits, state),
            "one state": (logits, state[0]),  # [layers, rows, values], with as many layers as there are first rows
            "a dict": {"logits": logits, "nothing": None, "loss": logits.mean(), "probabilities": logits.softmax(1)},
            "a state first": (state[0], logits),
            "a spectrum": (logits, torch.fft.fft(logits)),  # which no column holds
        }
        return made[self.kind]


@pytest.mark.parametrize(
    ("kind", "taken", "columns"),
    [
        ("states", (0,), ["output", *OF_CLASSES]),
        ("one state", (0,), ["output", *OF_CLASSES]),
        ("a dict", (0, 3), ["output_0", "output_1", *OF_CLASSES]),
        ("a state first", (1,), ["output"]),
        ("a spectrum", (0,), ["output", *OF_CLASSES]),
    ],
)
def test_outputs_without_a_value_for_each_row_are_left_out_of_transform(
    kind: str, taken: tuple[int, ...], columns: list[str], dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    chosen: dict[str, Any] = {"metrics": {"right": (0, by_class)}}
    if kind == "a state first":
        chosen = {"loss": None, "train_fn": of_second}
    chosen |= {"model": Recurrent(kind), "optimizer": torch.optim.SGD, "epochs": 1}
    model = estimator(**chosen).from_dataset_path(dataset)
    assert (model._fitted.output_positions, [column.name for column in model._added()]) == (taken, columns)
    assert f"without a value for each row: output {0 if taken == (1,) else 1} (" in caplog.text
    features = torch.randn(7, 6)
    serving = Serving(
        f"recurrent {kind}", None, (), model._added(), 100, output_positions=model._fitted.output_positions
    )
    (((first,), *_), _) = serving._values(model._predictor()(), {"features_0": features.numpy()}, 7)
    with torch.no_grad():
        returned = model.module(features)
    expected = next(iter(returned.values())) if isinstance(returned, dict) else returned[taken[0]]
    assert torch.allclose(torch.from_numpy(first), expected)
    assert Fitted.from_json(json.loads(json.dumps(model._fitted.to_json()))) == model._fitted
    if len(taken) == 2:
        assert [column.name for column in model.setOutputCols(["a", "b"])._added()] == ["a", "b", *OF_CLASSES]
        with pytest.raises(InvalidSettingsError, match="1 output_cols for the 2 outputs"):
            model.setOutputCols(["one"])._added()


def of_second(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch.inputs[0])[1], batch.labels[0])


def test_model_without_a_value_for_any_row_says_what_it_returns(dataset: Dataset) -> None:
    def summed(model: nn.Module, batch: Any) -> Any:
        return model(batch.inputs[0]).sum()

    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> Any:
            return super().forward(x).mean(0)

    net = Mean(6, 3)
    model = estimator(model=net, optimizer=torch.optim.SGD, loss=None, train_fn=summed).from_dataset_path(dataset)
    with pytest.raises(InvalidSettingsError, match=r"for 4 rows it returns float32 \[3\], and no tensor with a value"):
        model._added()


@pytest.mark.parametrize(
    ("layer", "changes", "said"),
    [
        (Centred(of_rows=True), {}, ["1.moving"]),
        (Centred(of_rows=True), {"loss_is_per_worker": True}, []),
        (Centred(of_rows=False), {}, []),
        (nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), {}, []),
        (tracked(), {}, ["1.1.running_mean, 1.1.running_var"]),
        (Graph(), {}, []),
    ],
)
def test_buffers_that_follow_the_rows_are_warned_of(
    layer: nn.Module, changes: dict[str, Any], said: list[str], dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    net = nn.Sequential(nn.BatchNorm1d(6), layer, nn.Linear(6, 3))
    estimator(model=net, optimizer=torch.optim.SGD, epochs=1, **changes).from_dataset_path(dataset)
    warned = [record.args[0] for record in caplog.records if record.msg.startswith("batch statistics")]
    assert warned == said


def test_metric_with_one_number_for_all_rows_is_warned_of(dataset: Dataset, caplog: pytest.LogCaptureFixture) -> None:
    def share(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return (output.argmax(1) == label).float().mean()

    estimator(metrics={"right": by_class}, epochs=1).from_dataset_path(dataset)
    assert "returns one number" not in caplog.text
    model = estimator(metrics={"share": share, "right": by_class}, epochs=1).from_dataset_path(dataset)
    assert "the metric share returns one number for the rows that it is given" in caplog.text
    assert model.history["share"] == pytest.approx(model.history["right"])


# --- modules whose shapes follow from the first rows ------------------------------------------------


class LazyInside(nn.Module):
    """Lazy layers of each kind, beside a layer with a shape."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.LazyConv1d(2, 3), nn.LazyBatchNorm1d()
        self.hidden, self.last = nn.LazyLinear(8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.norm(self.conv(x[:, None, :]))
        return self.last(self.dropout(self.hidden(found.flatten(1)).tanh()))


def by_train_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return cross_entropy(model(batch.inputs[0]), batch.labels[0])


@pytest.mark.parametrize("changes", [{}, {"loss": None, "train_fn": by_train_fn, "optimizer": torch.optim.SGD}])
def test_lazy_modules_are_trained_as_after_a_call_with_rows(changes: dict[str, Any], dataset: Dataset) -> None:
    def fitted(called_before: bool) -> Any:
        net = LazyInside()
        given = {"optimizer": torch.optim.Adam(net.parameters(), lr=0.01), **changes}
        made = estimator(model=net, seed=1, **given)
        torch.manual_seed(4)
        net.last.reset_parameters()
        if called_before:
            with torch.no_grad():
                net.eval()(torch.zeros(2, 6))
            net.train()
        model = made.from_dataset_path(dataset)
        assert net.training
        assert net.norm.num_batches_tracked == 0
        again = made.from_dataset_path(dataset)
        assert weights_of(again) == weights_of(model)
        return model

    assert weights_of(fitted(called_before=False)) == weights_of(fitted(called_before=True))


class Unreached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.LazyLinear(3), nn.LazyLinear(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(x)


def test_a_lazy_module_that_the_first_rows_do_not_reach_is_named(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match=r"unused\.weight, unused\.bias of the model got no shape"):
        estimator(model=Unreached(), optimizer=torch.optim.SGD).from_dataset_path(dataset)


class Buggy(nn.Linear):
    """A model with a fault in its code."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = not_there(x)  # type: ignore[name-defined]  # noqa: F821
        return super().forward(x)


def test_a_fault_of_the_users_own_code_stays_the_error_that_it_is(dataset: Dataset) -> None:
    with pytest.raises(NameError) as caught:
        estimator(model=Buggy(6, 3), optimizer=torch.optim.SGD).from_dataset_path(dataset)
    assert any("x = " in str(frame.statement) and "test_dry_run" in str(frame.path) for frame in caught.traceback)


@pytest.mark.parametrize(
    "changes", [{"callbacks": [EarlyStopping("val_loss")]}, {"lr_scheduler": plateau, "scheduler_monitor": "val_loss"}]
)
def test_a_monitor_of_a_missing_validation_says_how_to_get_one(changes: dict[str, Any], tmp_path: Any) -> None:
    rows = pack({"features_0": torch.zeros(8, 6).numpy(), "label_0": torch.zeros(8).long().numpy()}, tmp_path)
    with pytest.raises(InvalidSettingsError, match=r"'val_loss'.* need a validation: validation=0.1"):
        estimator(**changes).from_dataset_path(rows)
