"""Losses and metrics as sums over rows: the parts of a batch add up to the batch, however it is cut."""

import pytest
import torch
from torch import nn

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.objective import Objective, TorchBatch
from tests.unit.ml.torch.trainings import ListMetric, SumMetric, accuracy, label_sum

ROWS = 11


class Fixed(nn.Module):
    """A model that returns its inputs."""

    def forward(self, *inputs):
        return inputs if len(inputs) > 1 else inputs[0]


def batch(*inputs, labels, weights=None):
    tensors = {f"features_{at}": value for at, value in enumerate(inputs)}
    return TorchBatch(inputs, labels, weights, len(inputs[0]), tensors)


def cut(whole, sizes):
    start = 0
    for size in sizes:
        rows = slice(start, start + size)
        yield TorchBatch(
            tuple(one[rows] for one in whole.inputs),
            tuple(one[rows] for one in whole.labels),
            None if whole.weights is None else whole.weights[rows],
            size,
            {},
        )
        start += size


def scores(rows=ROWS, classes=3, seed=1):
    return torch.randn(rows, classes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def classes(rows=ROWS, seed=2):
    return torch.randint(0, 3, (rows,), generator=torch.Generator().manual_seed(seed))


def own_mean(output, label):
    return (output.logsumexp(1) - output.gather(1, label[:, None])[:, 0]).mean()


def test_label_beyond_the_classes_is_reported_with_its_column():
    wrong = batch(scores(), labels=(classes() + 3,))
    with pytest.raises(DataError, match=r"label_0 \(label column number 0, from 0\) has values from 3 to 5.*\(11, 3\)"):
        Objective(nn.CrossEntropyLoss(), None, labels=1, weighted=False).forward(Fixed(), wrong)


def test_sample_weights_need_a_loss_with_a_value_for_each_row():
    whole = batch(scores(), labels=(classes(),), weights=torch.ones(ROWS, dtype=torch.float64))
    objective = Objective(own_mean, None, labels=1, weighted=True)
    with pytest.raises(DataError, match="has to return a value for each row"):
        objective.forward(Fixed(), whole)
    weights = torch.rand(ROWS, 2, dtype=torch.float64)
    objective = Objective(torch.nn.CrossEntropyLoss(), None, labels=1, weighted=True)
    sums = [
        objective.forward(Fixed(), batch(scores(), labels=(classes(),), weights=each)).sums[0].item()
        for each in (weights[:, 0], weights[:, :1])
    ]
    assert sums[0] == sums[1]
    with pytest.raises(DataError, match=r"sample weights of shape \[\d+, 2\]"):
        objective.forward(Fixed(), batch(scores(), labels=(classes(),), weights=weights))


def test_several_losses_are_multiplied_by_their_weights():
    whole = batch(scores(), scores(seed=5), labels=(classes(), scores(seed=6)))
    objective = Objective([nn.CrossEntropyLoss(), nn.MSELoss()], None, labels=2, weighted=False, loss_weights=[2, 0.5])
    measured = objective.forward(Fixed(), whole)
    first = nn.functional.cross_entropy(scores(), classes()).item()
    second = nn.functional.mse_loss(scores(seed=5), scores(seed=6)).item()
    assert objective.share(measured, ROWS, measured.counts).item() == pytest.approx(2 * first + 0.5 * second)
    logs = objective.means([value.item() for value in measured.sums], measured.counts)
    assert logs == pytest.approx({"loss": 2 * first + 0.5 * second, "loss_0": first, "loss_1": second})


def test_train_fn_computes_the_loss_itself():
    objective = Objective(None, lambda model, batch: model(batch["features_0"]).mean(), labels=1, weighted=False)
    measured = objective.forward(Fixed(), batch(scores(), labels=(classes(),)))
    assert objective.share(measured, 2 * ROWS, ()).item() == pytest.approx(scores().mean().item() / 2)
    wrong = Objective(None, lambda model, batch: scores(), labels=1, weighted=False)
    with pytest.raises(DataError, match="train_fn must return a loss"):
        wrong.forward(Fixed(), batch(scores(), labels=(classes(),)))


def measured(loss, metrics, whole, sizes, prefix=""):
    """Return the values of metrics over a batch in parts, and the number of rows."""
    objective = Objective(loss, None, labels=len(whole.labels), weighted=False)
    accumulator = TorchMetricAccumulator(objective, metrics)
    sums, pieces = torch.zeros(accumulator.width, dtype=torch.float64), []
    for part in cut(whole, sizes):
        pieces.append(accumulator.measure(objective.forward(Fixed(), part), part.rows, sums))
    return accumulator.logs(sums.numpy(), pieces, prefix), accumulator.rows(sums.numpy())


@pytest.mark.parametrize("sizes", [[11], [4, 4, 3], [1] * 11])
def test_metrics_count_each_row_once_however_the_rows_are_cut(sizes):
    metrics = {"accuracy": accuracy, "label": label_sum, "by_class": SumMetric(), "outputs": ListMetric()}
    logs, rows = measured(nn.CrossEntropyLoss(), metrics, batch(scores(), labels=(classes(),)), sizes, "val_")
    right = scores().argmax(1) == classes()
    assert rows == ROWS
    assert logs["val_accuracy"] == pytest.approx(right.double().mean().item())
    assert logs["val_label"] == pytest.approx(classes().double().mean().item())
    assert logs["val_by_class_1"] == pytest.approx((right & (classes() == 1)).sum().item() / ROWS)
    assert logs["val_outputs_median"] == pytest.approx(scores().max(1).values.median().item())
    assert logs["val_outputs_most"] == pytest.approx(scores().max().item())
    assert logs["val_outputs_count"] == ROWS


def test_torchmetrics_metrics_equal_those_of_all_rows_at_once():
    classification = pytest.importorskip("torchmetrics.classification")
    metrics = {
        "accuracy": classification.MulticlassAccuracy(3),
        "auroc": classification.MulticlassAUROC(3),
        "f1": classification.MulticlassF1Score(3),
    }
    logs, _ = measured(nn.CrossEntropyLoss(), metrics, batch(scores(), labels=(classes(),)), [4, 1, 6])
    for name, metric in metrics.items():
        metric.reset()
        assert logs[name] == pytest.approx(metric(scores(), classes()).item())


@pytest.mark.parametrize("sizes", [[11], [4, 4, 3], [1] * 11])
@pytest.mark.parametrize("loss", [nn.BCEWithLogitsLoss(), nn.BCELoss()])
def test_binary_torchmetrics_do_not_depend_on_how_logits_are_cut(loss, sizes):
    """torchmetrics takes the outputs of one `update` for probabilities if all of them lie between 0 and 1."""
    classification = pytest.importorskip("torchmetrics.classification")
    metrics = {"f1": classification.BinaryF1Score(), "auroc": classification.BinaryAUROC()}
    logits = 2 * scores(classes=1)
    assert ((logits > 0) & (logits < 0.5)).any()  # a row that would be of class 0 if it were alone
    outputs = logits if isinstance(loss, nn.BCEWithLogitsLoss) else logits.sigmoid()
    labels = (classes() > 0).to(outputs.dtype)[:, None]  # these losses take floats
    logs, _ = measured(loss, metrics, batch(outputs, labels=(labels,)), sizes)
    for name, metric in metrics.items():
        metric.reset()
        assert logs[name] == pytest.approx(metric(logits.sigmoid(), labels.long()).item())


def test_torchmetrics_without_states_of_their_own_are_refused():
    torchmetrics = pytest.importorskip("torchmetrics")
    objective = Objective(nn.CrossEntropyLoss(), None, labels=1, weighted=False)
    by_class = torchmetrics.classification.MulticlassF1Score(3, average=None)
    with pytest.raises(InvalidSettingsError, match="f1 is a ClasswiseWrapper around a MulticlassF1Score"):
        TorchMetricAccumulator(objective, {"f1": torchmetrics.wrappers.ClasswiseWrapper(by_class)})

    class Stateless(torchmetrics.Metric):
        def update(self, output, label): ...
        def compute(self): ...

    with pytest.raises(InvalidSettingsError, match=r"the metric mine \(Stateless\) has no states"):
        TorchMetricAccumulator(objective, {"mine": Stateless()})


@pytest.mark.parametrize(
    ("metric", "error", "message"),
    [
        (3, InvalidSettingsError, "the metric wrong is neither a function"),
        (lambda output, label: torch.zeros(7), DataError, r"returned a tensor of shape \(7,\) for 11 rows"),
    ],
)
def test_metric_without_a_usable_value_is_refused(metric, error, message):
    with pytest.raises(error, match=message):
        measured(nn.CrossEntropyLoss(), {"wrong": metric}, batch(scores(), labels=(classes(),)), [ROWS])


def test_metric_of_several_outputs_sees_all_or_the_chosen_one():
    whole = batch(scores(), scores(seed=5), labels=(classes(), scores(seed=6)))
    metrics = {"first": (0, accuracy), "both": lambda outputs, labels: float(len(outputs) + len(labels))}
    logs, _ = measured([nn.CrossEntropyLoss(), nn.MSELoss()], metrics, whole, [ROWS])
    assert logs["both"] == 4
    assert logs["first"] == pytest.approx(accuracy(scores(), classes()).item())
    assert set(logs) == {"loss", "loss_0", "loss_1", "first", "both"}
