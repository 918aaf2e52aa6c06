"""Losses, metrics and modules of the user's own in the dry run: refused if the result depended on the workers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import DataError, InvalidSettingsError
from tests.unit.ml.torch.estimators import estimator, weights_of


def all_pairs(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).square().mean()


# --- a user's own losses and metrics --------------------------------------------------------------

ONE = {"model": nn.Linear(6, 1), "optimizer": torch.optim.SGD}
ZEROS = {**ONE, "model": nn.utils.skip_init(nn.Linear, 6, 1)}
nn.init.zeros_(ZEROS["model"].weight), nn.init.zeros_(ZEROS["model"].bias)
SCORES = {"model": nn.Linear(6, 3), "optimizer": torch.optim.SGD}


class Picture(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).reshape(-1, 1, 2, 2)


class Changed(nn.Linear):
    def __init__(self, change: Any) -> None:
        super().__init__(6, 3)
        self.change = change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(super().forward(x))


def sparse(output: torch.Tensor) -> torch.Tensor:
    return output.to_sparse()


def mean_square(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


TWO = {"model": Changed(lambda output: (output[:, :1], output[:, 1:])), "optimizer": torch.optim.SGD}
SPARSE, SCALAR = ({**TWO, "model": Changed(each)} for each in (sparse, mean_square))
OF_ONE_BATCH = {
    **ONE,
    "loss": nn.BCEWithLogitsLoss(torch.ones(4, 1)),
    "transformation_fn": lambda columns: {**columns, "label_0": columns["label_0"].astype("float32")},
}
PICTURE = {"model": Picture(6, 4), "optimizer": torch.optim.SGD, "transformation_fn": lambda columns: pictures(columns)}


def pictures(columns: dict[str, Any]) -> dict[str, Any]:
    return {**columns, "label_0": columns["features_0"][:, :4].reshape(-1, 2, 2)}


def pixels(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.sigmoid() - label).abs().flatten(1).mean(1)


def difference(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.squeeze(1) - label).square().mean()


def distance(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output - label).abs().mean().sqrt()


def in_numpy(output: torch.Tensor, label: torch.Tensor) -> Any:
    return np.abs(output.numpy() - label.numpy()).mean()


def hits_in_numpy(output: torch.Tensor, label: torch.Tensor) -> Any:
    return ((output.numpy() > 0.5) == label.numpy()).mean()


def error_in_sum(output: torch.Tensor, label: torch.Tensor) -> Any:
    return (output.numpy()[:, 0] - label.numpy()).sum() / len(label)


def root_in_numpy(output: torch.Tensor, label: torch.Tensor) -> Any:
    return np.square(output.numpy().ravel() - label.numpy().ravel()).mean() ** 0.5


def called(loss: Any) -> Any:
    return lambda model, batch: loss(model(*batch.inputs), batch.labels[0])


def unlabelled(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output, label)


def contrastive(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    squares = output.square().sum(1)
    apart = output.square().sum(1, keepdim=True) + squares - 2 * output @ output.T
    return (apart * (label[:, None] == label[None, :])).mean()


def of_token(output: torch.Tensor, label: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    found = nn.functional.cross_entropy(output, label, reduction="none")
    return found if reduction == "none" else found.sum() / (label != -100).sum()


class Normalised(nn.Module):
    """Dropout and batch statistics, in the model itself and in layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(6), nn.Dropout(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(x)))


@pytest.fixture(scope="module")
def ignoring(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """A dataset whose 71st row has a label of -100, and every row a weight of 1."""
    rows = {"features_0": torch.randn(96, 6).numpy(), "label_0": (torch.arange(96) % 3).numpy()}
    rows["label_0"][70] = -100
    return pack(rows, tmp_path_factory.mktemp("ignoring"), shards=2)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({**ONE, "loss": difference, "metrics": {"far": distance}}, DataError, r"metric far .*label_0 \[4\]"),
        ({**ONE, "loss": difference, "metrics": {"far": (0, all_pairs)}}, DataError, "metric far compares each output"),
        ({**ONE, "loss": difference, "metrics": {"far": in_numpy}}, DataError, "metric far compares each output"),
        ({**ONE, "loss": difference, "metrics": {"hits": hits_in_numpy}}, DataError, "metric hits compares each"),
        ({**ONE, "loss": None, "train_fn": called(all_pairs)}, DataError, r"train_fn compares .* label_0 \[4\]"),
        ({**PICTURE, "loss": pixels}, DataError, r"pixels .* \[4, 2, 2\] and output 0 \[4, 1, 2, 2\]"),
        ({**SCORES, "loss": contrastive}, InvalidSettingsError, "contrastive is not a mean .*loss_is_per_worker=True"),
        ({**SCORES, "loss": None, "train_fn": called(contrastive)}, InvalidSettingsError, "train_fn is not a mean"),
        (
            {**TWO, "loss": lambda outputs, label: (outputs[0] - label).square().mean()},
            InvalidSettingsError,
            "is not a mean over rows.*the model returns 2 outputs, and a loss gets the one of its label alone",
        ),
        ({**SCALAR, "loss": lambda output, label: output.sqrt()}, InvalidSettingsError, "is not a mean over rows"),
        (OF_ONE_BATCH, InvalidSettingsError, r"^weight of BCEWith.* has the shape \[4, 1\] .*sample_weight_col"),
    ],
)
def test_loss_or_metric_that_depends_on_other_rows_is_refused(
    changes: dict[str, Any], error: Any, said: str, dataset: Dataset
) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        estimator(**changes).from_dataset_path(dataset)


def test_loss_that_fails_with_one_of_several_outputs_is_explained(
    dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(AttributeError):
        estimator(**TWO, loss=lambda outputs, label: outputs.first.mean()).from_dataset_path(dataset)
    assert "a train_fn calls the model itself, and has all outputs" in caplog.text


@pytest.mark.parametrize("loss", [unlabelled, of_token], ids=["cross entropy", "own mean"])
def test_scalar_over_labels_that_count_is_refused_by_its_numbers(loss: Any, ignoring: Dataset) -> None:
    said = r"not a mean over rows: for the first 96 rows together it is [\d.]+, and .* 96 parts .* \(numerator, denom"
    with pytest.raises(InvalidSettingsError, match=said):
        estimator(**SCORES, loss=loss).from_dataset_path(ignoring)
    estimator(**SCORES, loss=loss, loss_is_per_worker=True, epochs=1).from_dataset_path(ignoring)


@pytest.mark.parametrize(
    "changes",
    [
        {**SCORES, "loss": None, "train_fn": called(unlabelled), "model": Normalised()},
        {**ONE, "loss": difference, "metrics": {"far": difference, "sum": error_in_sum, "root": root_in_numpy}},
        {**ZEROS, "loss": difference, "metrics": {"far": difference, "sum": error_in_sum, "root": root_in_numpy}},
        {**ONE, "loss": lambda output, label: nn.functional.mse_loss(output.squeeze(1), label.float())},
        {**SCORES, "loss": lambda output, label: nn.CrossEntropyLoss(label_smoothing=0.1)(output.squeeze(), label)},
        {**SCORES, "loss": unlabelled, "metrics": {"within": contrastive}},
        {**SCORES, "loss": lambda output, label: unlabelled(output + 0.1 * torch.randn(output.shape), label)},
        {**SCORES, "loss": contrastive, "loss_is_per_worker": True},
        {**SPARSE, "loss": lambda output, label: output.to_dense().mean(1)},
        {**SCALAR, "loss": lambda output, label: output},
    ],
)
def test_own_function_that_is_right_is_accepted(changes: dict[str, Any], dataset: Dataset) -> None:
    assert len(estimator(**changes, epochs=1).from_dataset_path(dataset).history) == 1


# --- pairs of values ---------------------------------------------------------------------------------


def with_accuracy(output: torch.Tensor, label: torch.Tensor) -> Any:
    return unlabelled(output, label), (output.argmax(1) == label).float().mean()


def with_distance(output: torch.Tensor, label: torch.Tensor) -> Any:
    return unlabelled(output, label), output.abs().mean()


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"loss": with_accuracy}, InvalidSettingsError, "with_accuracy returned two values, .* Return the loss alone"),
        ({"loss": with_distance}, DataError, "a denominator, depends on the model's parameters"),
        ({"train_fn": called(with_accuracy)}, InvalidSettingsError, "train_fn returned two values, .*no denominator"),
    ],
)
@pytest.mark.parametrize("per_worker", [False, True])
def test_number_beside_the_loss_is_not_taken_for_a_denominator(
    changes: dict[str, Any], error: Any, said: str, per_worker: bool, dataset: Dataset
) -> None:
    with pytest.raises(error, match=f"(?s){said}"):
        estimator(**{**SCORES, "loss": None, **changes}, loss_is_per_worker=per_worker).from_dataset_path(dataset)


def with_hits(output: torch.Tensor, label: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(output, label, reduction="sum"), (output.argmax(1) == label).sum()


def with_labels(output: torch.Tensor, label: torch.Tensor) -> Any:
    return nn.functional.cross_entropy(output, label, reduction="sum"), (label >= 0).sum()


@pytest.mark.parametrize("changes", [lambda loss: {"loss": loss}, lambda loss: {"train_fn": called(loss)}])
def test_denominator_that_follows_from_outputs_is_warned_of(
    changes: Any, dataset: Dataset, caplog: pytest.LogCaptureFixture
) -> None:
    made = {**SCORES, "loss": None, "epochs": 1}
    estimator(**{**made, **changes(with_labels)}).from_dataset_path(dataset)
    assert "the first divided by the second" not in caplog.text
    estimator(**{**made, **changes(with_hits)}).from_dataset_path(dataset)
    assert "returned two values, so its loss is the first divided by the second" in caplog.text


@pytest.mark.parametrize(
    "train_fn",
    [
        lambda model, batch: (model(*batch.inputs).squeeze() - batch.labels[0]).square().mean(),
        lambda model, batch: (((out := model(*batch.inputs).squeeze()) - batch.labels[0]).square().mean(), out),
        lambda model, batch: (((out := model(*batch.inputs).squeeze(1)) - batch.labels[0]).square(), out),
        lambda model, batch: (((out := model(*batch.inputs).squeeze()) - batch.labels[0]).square().mean(), out.mean()),
    ],
    ids=["alone", "outputs", "by row, outputs", "a mean"],
)
def test_values_beside_the_loss_change_nothing_in_batches_of_one_row(train_fn: Any, dataset: Dataset) -> None:
    net = nn.Linear(6, 1)
    net.load_state_dict({"weight": torch.full((1, 6), 0.1), "bias": torch.zeros(1)})
    changes = {"model": net, "optimizer": torch.optim.SGD, "loss": None, "batch_size": 5, "epochs": 1}
    found = estimator(**changes, train_fn=train_fn).from_dataset_path(dataset)
    right = estimator(**changes, train_fn=called(difference)).from_dataset_path(dataset)
    assert weights_of(found) == pytest.approx(weights_of(right), rel=1e-6)
    assert found.history[0]["val_loss"] == pytest.approx(right.history[0]["val_loss"], rel=1e-6)


# --- what training would leave out or make different -----------------------------------------------


class Bounded(nn.Module):
    """Weights that forward changes: all of them, or those of the rows' numbers."""

    def __init__(self, by_row: bool) -> None:
        super().__init__()
        self.table, self.head, self.by_row = nn.Parameter(torch.full((24, 4), 3.0)), nn.Linear(4, 3), by_row

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        number = (x[:, 0] * 4).long() % 24
        if self.by_row:
            return self.head(nn.functional.embedding(number, self.table, max_norm=1.0))
        with torch.no_grad():
            self.table.clamp_(-1.0, 1.0)
        return self.head(self.table[number])


def test_forward_that_changes_weights_by_its_rows_is_refused(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match="forward changes table of the model in place"):
        estimator(model=Bounded(True), optimizer=torch.optim.SGD).from_dataset_path(dataset)
    kept = {"loss_is_per_worker": True, "epochs": 1, "optimizer": torch.optim.SGD}
    assert estimator(model=Bounded(True), **kept).from_dataset_path(dataset).history
    assert estimator(model=Bounded(False), **{**kept, "loss_is_per_worker": False}).from_dataset_path(dataset).history


class Scaled(nn.Module):
    """A loss with a scale that is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output * self.scale, label)


def test_loss_with_parameters_of_its_own_is_refused(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match=r"the loss Scaled has parameters of its own \(scale\)"):
        estimator(**SCORES, loss=Scaled()).from_dataset_path(dataset)
    assert estimator(**SCORES, loss=Scaled().requires_grad_(False), epochs=1).from_dataset_path(dataset).history
