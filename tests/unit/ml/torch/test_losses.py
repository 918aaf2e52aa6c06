"""Every loss of torch, and the forms of a user's own: any split of a batch gives the loss and gradient of the whole."""

import functools
import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError
from spark_elastic.ml.torch.objective import Objective
from spark_elastic.ml.torch.spec import TorchTraining
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.test_objective import Fixed, batch, cut
from tests.unit.worlds import together

ROWS, CLASSES, TOKENS = 13, 3, 5
GENERATOR = torch.Generator().manual_seed(11)


def numbers(*shape):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64)


def classes(*shape, ignored=-100):
    labels = torch.randint(0, CLASSES, shape, generator=GENERATOR)
    flat = labels.reshape(shape[0], -1)
    flat[0, 0] = flat[1, :] = flat[2, -1] = ignored  # a row without a label, which may be a worker's only one
    return labels


SCORES, TOKEN_SCORES = numbers(ROWS, CLASSES), numbers(ROWS, CLASSES, TOKENS)
ONE, MANY, OTHER = classes(ROWS), classes(ROWS, TOKENS), classes(ROWS, ignored=2)
BINARY, SIGNS = (SCORES > 0.3).double(), (numbers(ROWS, CLASSES) > 0).double() * 2 - 1
SEVERAL = torch.tensor([[0, 2, -1], [1, -1, -1]]).repeat(7, 1)[:ROWS]
HEAVY = torch.tensor([0.1, 2.0, 5.0], dtype=torch.float64)
PROBABLE, PROBABLE_TOKENS = numbers(ROWS, CLASSES).softmax(1), numbers(ROWS, CLASSES, TOKENS).softmax(1)


class Renamed(nn.CrossEntropyLoss):
    """A subclass that changes nothing."""


TORCH = [
    *((loss, SCORES, ONE) for loss in (nn.CrossEntropyLoss(), F.cross_entropy, Renamed(HEAVY))),
    *((loss, TOKEN_SCORES, MANY) for loss in (nn.CrossEntropyLoss(), F.cross_entropy, nn.CrossEntropyLoss(HEAVY))),
    (nn.CrossEntropyLoss(HEAVY, ignore_index=2, label_smoothing=0.3), SCORES, OTHER),
    (nn.CrossEntropyLoss(label_smoothing=0.1), TOKEN_SCORES, MANY),
    (functools.partial(F.cross_entropy, ignore_index=2), SCORES, OTHER),
    (functools.partial(functools.partial(F.cross_entropy, label_smoothing=0.1), weight=HEAVY), TOKEN_SCORES, MANY),
    (functools.partial(nn.CrossEntropyLoss(HEAVY)), SCORES, ONE),
    (nn.CrossEntropyLoss(HEAVY), SCORES, PROBABLE),
    (nn.CrossEntropyLoss(HEAVY, label_smoothing=0.1), TOKEN_SCORES, PROBABLE_TOKENS),
    *((loss, SCORES.log_softmax(1), ONE) for loss in (nn.NLLLoss(), F.nll_loss, nn.NLLLoss(HEAVY))),
    (functools.partial(F.nll_loss, weight=HEAVY, ignore_index=2), SCORES.log_softmax(1), OTHER),
    (nn.NLLLoss(), TOKEN_SCORES.log_softmax(1), MANY),
    *((loss, SCORES.log_softmax(1), PROBABLE) for loss in (nn.KLDivLoss(), nn.KLDivLoss("batchmean"), F.kl_div)),
    (functools.partial(F.kl_div, reduction="batchmean"), TOKEN_SCORES.log_softmax(1), PROBABLE_TOKENS),
    *((loss, SCORES, ONE.clamp(0)) for loss in (nn.MultiMarginLoss(), nn.MultiMarginLoss(2, weight=HEAVY))),
    (nn.MultiLabelMarginLoss(), SCORES, SEVERAL),
    *((loss, SCORES, BINARY) for loss in (nn.MultiLabelSoftMarginLoss(HEAVY), nn.BCEWithLogitsLoss(pos_weight=HEAVY))),
    *((loss, SCORES.sigmoid(), BINARY) for loss in (nn.BCELoss(), nn.BCELoss(HEAVY), F.binary_cross_entropy)),
    *((loss, SCORES, SIGNS) for loss in (nn.SoftMarginLoss(), nn.HingeEmbeddingLoss(0.5), F.soft_margin_loss)),
    *((loss, SCORES, PROBABLE) for loss in (nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(delta=0.3))),
    *((loss, SCORES.exp(), PROBABLE) for loss in (nn.PoissonNLLLoss(log_input=False), F.poisson_nll_loss)),
    *(
        (loss, SCORES, PROBABLE)
        for loss in (nn.MSELoss(reduction="sum"), functools.partial(F.l1_loss, reduction="sum"))
    ),
    (nn.KLDivLoss(reduction="sum"), SCORES.log_softmax(1), PROBABLE),
    (nn.CrossEntropyLoss(reduction="sum"), TOKEN_SCORES, MANY),
    (nn.MSELoss(), SCORES[:, :1], PROBABLE[:, 0]),  # labels without the last axis of 1
    (nn.L1Loss(), SCORES[:, :1], ONE),  # and integers
    (nn.BCEWithLogitsLoss(), SCORES[:, 0], BINARY[:, :1]),
    (nn.CrossEntropyLoss(), SCORES, ONE[:, None]),
]


def by_token(output, label):
    return F.cross_entropy(output, label, reduction="none").sum(1), (label != -100).sum(1)


def over_tokens(output, label):
    return F.cross_entropy(output, label, reduction="sum"), (label != -100).sum()


def by_row(output, label):
    return (output - label).square().mean(1)


OWN = [
    (by_token, TOKEN_SCORES, MANY, nn.CrossEntropyLoss()),
    (over_tokens, TOKEN_SCORES, MANY, nn.CrossEntropyLoss()),
    (by_row, SCORES, PROBABLE, nn.MSELoss()),
    (lambda output, label: (output - label).square().mean(), SCORES, PROBABLE, nn.MSELoss()),
]
SHARES = [[13], [12, 1], [1, 2, 10], [1] * 13]
"""The rows of the parts of all workers."""


def step(objective, whole, sizes):
    """Return the loss of a batch in parts, and the gradient of the outputs."""
    outputs = [each.clone().requires_grad_() for each in whole.inputs]
    held = batch(*outputs, labels=whole.labels, weights=whole.weights)
    results = [objective.forward(Fixed(), part) for part in cut(held, sizes)]
    counts = [sum(each) for each in zip(*(result.counts for result in results), strict=True)]
    for result in results:
        objective.share(result, ROWS, counts if objective.coupled else ()).backward()
    sums = [sum(each).item() for each in zip(*(result.sums for result in results), strict=True)]
    scale = objective.scale(counts, ROWS)
    return objective.means(sums, counts)["loss"], [output.grad * scale for output in outputs]


def like_torch(loss, output, label):
    """Return the label in the shape that torch wants it, which a user of plain torch would give it."""
    inner = loss.func if isinstance(loss, functools.partial) else loss
    if isinstance(inner, nn.CrossEntropyLoss) and label.shape == (ROWS, 1):
        return label[:, 0]
    return label.reshape(output.shape) if label.numel() == output.numel() else label


def settings_of(loss):
    found = {}
    while isinstance(loss, functools.partial):
        found, loss = {**loss.keywords, **found}, loss.func
    return getattr(loss, "reduction", found.get("reduction", "mean"))


def by_element(loss, output, label):
    """Return the values of one of torch's losses before any reduction."""
    inner = loss
    while isinstance(inner, functools.partial):
        inner = inner.func
    if not isinstance(inner, nn.Module):
        return functools.partial(loss, reduction="none")(output, label)
    before, inner.reduction = inner.reduction, "none"
    try:
        return loss(output, label)
    finally:
        inner.reduction = before


@pytest.mark.parametrize(("loss", "output", "label"), TORCH)
def test_any_split_gives_loss_and_gradient_of_the_whole(loss, output, label):
    leaf = output.clone().requires_grad_()
    wanted = like_torch(loss, output, label)
    expected = loss(leaf, wanted)
    expected.backward()
    is_sum = settings_of(loss) == "sum"
    each = by_element(loss, output, wanted).reshape(ROWS, -1).sum(1)
    for weights, sizes in itertools.product([None, torch.ones(ROWS).double(), torch.rand(ROWS).double()], SHARES):
        objective = Objective(loss, None, labels=1, weighted=weights is not None)
        found, (gradient,) = step(objective, batch(output, labels=(label,), weights=weights), sizes)
        if weights is None or (weights == 1).all():
            assert found * (ROWS if is_sum else 1) == pytest.approx(expected.item(), rel=1e-12)
            torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-14)
        else:  # the denominator stays unweighted
            denominator = ROWS if is_sum else each.sum() / expected
            assert found == pytest.approx(((each * weights).sum() / denominator).item(), rel=1e-12)


@pytest.mark.parametrize(("loss", "output", "label", "same"), OWN)
@pytest.mark.parametrize("sizes", SHARES, ids=str)
def test_own_loss_by_rows_or_as_two_numbers_is_reduced_as_such(loss, output, label, same, sizes):
    leaf = output.clone().requires_grad_()
    expected = same(leaf, label)
    expected.backward()
    found, (gradient,) = step(Objective(loss, None, labels=1, weighted=False), batch(output, labels=(label,)), sizes)
    assert found == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-14)

    def train_fn(model, part):
        return loss(model(*part.inputs), part.labels[0]), ()

    objective = Objective(None, train_fn, labels=1, weighted=False)
    found, (gradient,) = step(objective, batch(output, labels=(label,)), sizes)
    assert found == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(gradient, leaf.grad, rtol=1e-12, atol=1e-14)


def test_batch_without_any_label_that_counts_has_no_gradient():
    nothing = torch.full((ROWS,), -100)
    loss, (gradient,) = step(
        Objective(nn.CrossEntropyLoss(), None, labels=1, weighted=False), batch(SCORES, labels=(nothing,)), [5, 8]
    )
    assert np.isnan(loss)
    assert not gradient.any()


@pytest.mark.parametrize(
    ("loss", "output", "label"),
    [
        (nn.MSELoss(), numbers(ROWS, 3, 4, 4), numbers(ROWS, 4, 4, 3)),
        (nn.L1Loss(), numbers(ROWS, 2, 5), numbers(ROWS, 5, 2)),
        (nn.L1Loss(), numbers(ROWS, 2, 5), numbers(ROWS, 10)),
        (nn.MSELoss(), numbers(ROWS, 3), numbers(ROWS)),
        (nn.KLDivLoss(), numbers(ROWS, 3).log_softmax(1), numbers(ROWS, 1)),
        (nn.HingeEmbeddingLoss(), numbers(ROWS, 3), SIGNS[:, :1]),
        (nn.CrossEntropyLoss(), TOKEN_SCORES, classes(ROWS, TOKENS + 1)),
        (nn.CrossEntropyLoss(), SCORES, numbers(ROWS, CLASSES + 1)),
        (functools.partial(F.mse_loss, reduction="sum"), numbers(1, ROWS), numbers(ROWS, 1)),
    ],
)
def test_other_differences_of_shape_are_refused(loss, output, label):
    with pytest.raises(DataError) as error:
        Objective(loss, None, labels=1, weighted=False).forward(Fixed(), batch(output, labels=(label,)))
    assert all(each in str(error.value) for each in (str(list(output.shape)), str(list(label.shape)), "label_shapes"))


def test_own_loss_gets_the_label_as_its_column_has_it():
    seen = []
    loss = lambda output, label: seen.append(label.shape) or (output.squeeze(1) - label).square()  # noqa: E731
    whole = batch(SCORES[:, :1], labels=(PROBABLE[:, 0],))
    found = Objective(loss, None, labels=1, weighted=False).forward(Fixed(), whole)
    assert seen == [(ROWS,)]
    assert found.sums[0].item() == pytest.approx((SCORES[:, 0] - PROBABLE[:, 0]).square().sum().item())


# --- through the engine ---------------------------------------------------------------------------


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(6, CLASSES).double(), nn.Linear(6, 2).double()

    def forward(self, x):
        return self.a(x), self.b(x)


def make_set(folder):
    """40 rows with labels of which a third is -100."""
    made = np.random.default_rng(5)

    def rows(count):
        first, second = made.integers(0, 3, count), made.integers(0, 2, count)
        first[::3] = second[1:9] = -100
        return {"features_0": made.normal(size=(count, 6)), "label_0": first, "label_1": second}

    return pack(rows(40), folder, validation=rows(9), shards=2)


def pair_of(output, label):
    return F.cross_entropy(output, label, reduction="sum"), (label != -100).sum()


def total_of(model, batch):
    outputs = model(*batch.inputs)
    return pair_of(outputs[0], batch.labels[0]), outputs


def trained(data, folder, several, **changes):
    """Train two epochs; return the weights."""
    net = Heads()
    training = TorchTraining(
        dataset=Dataset.open(data),
        store=Store.create(folder),
        model=net,
        optimizer=torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        loss=[nn.CrossEntropyLoss(), pair_of] if several else None,
        train_fn=None if several else total_of,
        batch_size=16,
        epochs=2,
        shuffle=False,
        gradient_clip_norm=0.5,
        verbose=0,
        **changes,
    )
    trainings.outcome(training)
    return trainings.weights(folder)


def trained_in_parts(data, folder):
    kinds = itertools.product([True, False], [{}, {"accumulation_steps": 3}, {"virtual_workers": 3}])
    return [trained(data, folder / str(number), several, **each) for number, (several, each) in enumerate(kinds)]


def plain_weights(data, several):
    """Train as `trained` does, in plain torch."""
    net = Heads()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    with Dataset.open(data).reader("train", batch_size=16, shuffle=False, prefetch=0) as reader:
        for rows in [*reader.epoch(0), *reader.epoch(1)]:
            names = ("features_0", "label_0", "label_1")
            x, first, second = (torch.from_numpy(rows.tensors[name].copy()) for name in names)
            outputs = net(x)
            loss = F.cross_entropy(outputs[0], first) + several * F.cross_entropy(outputs[1], second)
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.5)
            optimizer.step()
    return [number for value in net.state_dict().values() for number in value.reshape(-1).tolist()]


def test_denominators_of_all_workers_give_the_steps_of_plain_torch(tmp_path):
    make_set(tmp_path / "set")
    expected = [plain_weights(tmp_path / "set", several) for several in (True, False) for _ in range(3)]
    found = [trained_in_parts(tmp_path / "set", tmp_path / "alone")]
    hvd.shutdown()
    found += together(trained_in_parts, tmp_path / "set", tmp_path / "three", count=3)
    for each in found:
        for weights, wanted in zip(each, expected, strict=True):
            assert weights == pytest.approx(wanted, rel=1e-9, abs=1e-12)
