"""Try a user's own losses and metrics on the driver: which rows they compare, and if parts add up to the whole."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.preparation import LABEL, split_evenly
from spark_elastic.ml.torch.metrics import TorchMetricAccumulator
from spark_elastic.ml.torch.model_step import ForwardResult, ModelStep, Number, TorchBatch
from spark_elastic.ml.torch.objective import BatchMaker, LossTerm, Objective
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.training.dry_run import rows_of_losses
from spark_elastic.ml.training.engine import first_rows

log = logging.getLogger("spark_elastic.ml")


@contextmanager
def broadcast_is_an_error() -> Iterator[None]:
    """Raise where torch warns of a loss that compares each output with the labels of all rows."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="Using a target size")
        yield


def _other_shape(label: Any, axis: int | None) -> Any:
    """Return a label without this axis if it is 1, else with one there: [rows] becomes [rows, 1]; None: as it is."""
    if axis is None or not isinstance(label, torch.Tensor):
        return label
    return label.squeeze(axis) if label.dim() > 1 and label.shape[axis] == 1 else label.unsqueeze(axis)


def _all_pairs_error(name: str, shapes: str) -> DataError:
    return DataError(
        f"{name} compares each output with the labels of all rows: {shapes}, which are broadcast to all pairs; give "
        "output and label one shape, in your function or by label_shapes"
    )


def check_metrics(training: TorchTraining, objective: Objective, result: ForwardResult, rows: int) -> None:
    """Raise DataError if a metric compares each output with the labels of all rows.

    Such a metric depends on the labels' shape, but not on which row has which label; outputs and labels are invented.
    """
    if rows < 4 or rows % 2:
        return
    odd = torch.arange(rows) % 2
    outputs = tuple(_other_outputs(each, odd) for each in result.outputs)
    # the same labels in three orders
    labels, *others = ([_of_rows(label, each) for label in result.labels] for each in (odd, 1 - odd, odd.sort().values))
    for name, metric in training.metrics.items():
        accumulator = TorchMetricAccumulator(objective, {name: metric})

        def value(
            labels: Sequence[Any], start: int, stop: int, sums_of: TorchMetricAccumulator = accumulator
        ) -> torch.Tensor:
            of_outputs, of_labels = (tuple(_part(each, start, stop) for each in some) for some in (outputs, labels))
            sums = torch.zeros(sums_of.width, dtype=torch.float64)
            sums_of.measure(replace(result, outputs=of_outputs, labels=of_labels, logged={}), stop - start, sums)
            return sums[sums_of.rows_position + 1 :]

        if _pairs_all(value, labels, others, rows):
            raise _all_pairs_error(f"the metric {name}", _shapes_of(result.labels, result.outputs))


def _pairs_all(
    value: Callable[..., torch.Tensor], labels: Sequence[Any], others: Sequence[Sequence[Any]], rows: int
) -> bool:
    """Return True if a metric is no sum over rows, and depends on the labels' shape, but not on their order."""

    def equal(one: torch.Tensor, other: torch.Tensor) -> bool:
        return torch.allclose(one, other, rtol=1e-3, equal_nan=True)

    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            whole = value(labels, 0, rows)
            parts = torch.stack([value(labels, row, row + 1) for row in range(rows)]).sum(0)
            if equal(whole, parts) or not all(equal(whole, value(each, 0, rows)) for each in others):
                return False
        except Exception as error:
            log.info("it is not known which rows a metric compares: %s", error)
            return False
        for axis in (-1, 1):
            with contextlib.suppress(Exception):
                if not equal(whole, value([_other_shape(each, axis) for each in labels], 0, rows)):
                    return True
    return False


def _other_outputs(output: Any, odd: torch.Tensor) -> Any:
    """Return the output of the first row in even rows, and the opposite in odd ones, so that thresholds divide them."""
    if not _has_rows(output, len(odd)) or not output.is_floating_point():
        return output
    first = output[:1]
    is_unit = bool(((first >= 0) & (first <= 1)).all())  # perhaps probabilities, which have to remain such
    opposite = 1 - first if is_unit else -first
    pair = torch.cat([first, opposite]) * (1 if is_unit else 4 / first.abs().max())
    return pair[odd]


def _of_rows(label: Any, numbers: torch.Tensor) -> Any:
    if not isinstance(label, torch.Tensor) or label.shape[:1] != numbers.shape:
        return label
    return numbers.reshape(-1, *[1] * (label.dim() - 1)).to(label.dtype).expand(label.shape).clone()


def _part(value: Any, start: int, stop: int) -> Any:
    return value[start:stop] if isinstance(value, torch.Tensor) and value.dim() else value


def _shapes_of(labels: Sequence[Any], outputs: Sequence[Any] = ()) -> str:
    named = [(f"{LABEL}{at}", each) for at, each in enumerate(labels)]
    named += [(f"output {at}", each) for at, each in enumerate(outputs)]
    return ", ".join(f"{name} {list(each.shape)}" for name, each in named if isinstance(each, torch.Tensor))


def check_losses(training: TorchTraining, objective: Objective, part: TorchBatch, result: ForwardResult) -> None:
    """Try a user's own losses, or `train_fn`, on the first rows: whole against their parts; raise as `_compare` does.

    Raises InvalidSettingsError also for a loss of torch that has weights of the rows of a batch.
    """
    for term, output in zip(objective.terms, result.outputs, strict=False):
        for name, factor in term.factors.items():
            if isinstance(factor, torch.Tensor) and factor.dim() == output.dim() and factor.shape[0] != 1:
                raise InvalidSettingsError(
                    f"{name} of {term.name} has the shape {list(factor.shape)} for outputs of shape "
                    f"{['rows', *output.shape[1:]]}, so it has a value for each row of one batch, whose rows and their "
                    "number change. Put weights of rows into a column, and name it in sample_weight_col"
                )
    per_worker = training.loss_is_per_worker
    if per_worker and all(count == part.rows for count in result.counts):
        return
    if training.train_fn is not None:
        step = training.train_fn
        _check_by_model(
            training, objective, part, f"the loss of {step.name}" if isinstance(step, ModelStep) else "train_fn"
        )
        return
    losses = training.loss if isinstance(training.loss, Sequence) else [training.loss] * len(objective)
    own = [at for at, term in enumerate(objective.terms) if term.own]
    by_row = all(_has_rows(result.outputs[at], part.rows) for at in own)
    batch = _more_rows(training, part, result.outputs) if own and by_row else part
    for at in own:
        term = objective.terms[at]
        try:
            if by_row:
                _check_term(losses[at], term, at, part, result.outputs[at].detach(), batch, per_worker)
            else:
                _check_by_model(training, objective, part, term.name, at)
        except InvalidSettingsError as error:
            if not (hint := objective.hint(result.outputs)):
                raise
            raise InvalidSettingsError(f"{error}. Perhaps it needs more than one output: {hint}") from None


def _has_rows(output: Any, rows: int) -> bool:
    dense = isinstance(output, torch.Tensor) and output.layout is torch.strided
    return dense and output.shape[:1] == (rows,)


def _more_rows(training: TorchTraining, part: TorchBatch, outputs: Sequence[Any] = ()) -> TorchBatch:
    """Return as many rows as can be tried cheaply; fewer without outputs, which the model then has to compute."""
    tensors = [each for each in (*part.tensors.values(), *outputs) if isinstance(each, torch.Tensor)]
    a_row = sum(each.nbytes for each in tensors) // part.rows
    if not outputs:
        a_row += sum(each.nbytes for each in training.model.parameters()) // 4
    rows = rows_of_losses(a_row, part.rows)
    try:
        return BatchMaker(training, torch.device("cpu")).parts(first_rows(training, rows), 1)[0]
    except Exception as error:  # of transformation_fn, which has taken fewer rows
        log.info("no more rows can be tried: %s", error)
        return part


def _check_term(
    loss: Any, term: LossTerm, at: int, part: TorchBatch, output: torch.Tensor, batch: TorchBatch, per_worker: bool
) -> None:
    alone = LossTerm(loss, weighted=False)
    label = batch.labels[at] if batch.labels else batch.inputs[0]
    # The model's outputs for the first rows, over and over. They differ in size, and remain logits or probabilities.
    outputs = output[torch.arange(batch.rows) % len(output)]
    if outputs.is_floating_point():
        sizes = torch.rand(outputs.shape, generator=torch.Generator().manual_seed(0)) / 2 + 0.5
        outputs = outputs * sizes.to(outputs.dtype)
    ones = None if batch.weights is None else torch.ones_like(batch.weights)

    def whole(axis: int | None) -> tuple[torch.Tensor, float]:  # without sample weights, which change nothing
        return _plain(alone(outputs, _other_shape(label, axis), None, batch.rows))

    def part_of(start: int, stop: int) -> tuple[torch.Tensor, float]:
        weights = None if ones is None else ones[start:stop]
        return _plain(term(outputs[start:stop], label[start:stop], weights, stop - start))

    def other() -> tuple[torch.Tensor, float]:
        return _plain(alone(-outputs, label, None, batch.rows))

    shapes = f"{LABEL}{at} {list(part.labels[at].shape)} and output {at} {list(output.shape)}" if part.labels else ""
    _compare(term.name, whole, part_of, other, shapes, batch.rows, per_worker)


def _plain(loss: tuple[torch.Tensor, Number]) -> tuple[torch.Tensor, float]:
    return loss[0], float(loss[1])


def _check_by_model(training: TorchTraining, objective: Objective, part: TorchBatch, name: str, at: int = 0) -> None:
    """Try loss number `at` by calling the model, where it is not a function of outputs by row."""
    model, of_model = training.model, isinstance(training.train_fn, ModelStep)
    modes = [(module, module.training) for module in model.modules()]
    batch = _more_rows(training, part)

    def of_batch(rows: TorchBatch) -> tuple[torch.Tensor, float]:
        result = objective.forward(model, rows)
        return _plain((result.sums[at], result.counts[at]))

    def whole(axis: int | None) -> tuple[torch.Tensor, float]:
        labels = tuple(_other_shape(each, axis) for each in batch.labels)
        named = {f"{LABEL}{at}": each for at, each in enumerate(labels)}
        return of_batch(replace(batch, labels=labels, tensors={**batch.tensors, **named}))

    def part_of(start: int, stop: int) -> tuple[torch.Tensor, float]:
        return of_batch(_cut(batch, start, stop))

    def other() -> tuple[torch.Tensor, float]:  # of the parameters with the opposite sign
        params: list[torch.Tensor] = [each for each in model.parameters() if each.is_floating_point()]
        torch._foreach_neg_(params)
        try:
            return of_batch(batch)
        finally:
            torch._foreach_neg_(params)

    try:
        # Layers are in eval mode, because dropout and batch statistics differ between the whole and its parts. The
        # model itself is in training mode where eval mode would mean a validation.
        model.eval()
        model.training = of_model
        _compare(name, whole, part_of, other, _shapes_of(part.labels), batch.rows, training.loss_is_per_worker)
    finally:
        for module, mode in modes:
            module.training = mode


def _cut(batch: TorchBatch, start: int, stop: int) -> TorchBatch:
    def rows(value: Any) -> Any:
        return None if value is None else value[start:stop]

    tensors: Mapping[str, Any] = {name: rows(value) for name, value in batch.tensors.items()}
    inputs, labels = tuple(map(rows, batch.inputs)), tuple(map(rows, batch.labels))
    return TorchBatch(inputs, labels, rows(batch.weights), stop - start, tensors)


def _compare(
    name: str,
    whole: Callable[[int | None], tuple[torch.Tensor, float]],
    part_of: Callable[[int, int], tuple[torch.Tensor, float]],
    other: Callable[[], tuple[torch.Tensor, float]],
    shapes: str,
    rows: int,
    per_worker: bool,
) -> None:
    """Raise InvalidSettingsError unless the sums and denominators of parts add up to those of the whole.

    A loss that is random, or cannot be computed of a part, is not judged. Warn if the denominator of `other` outputs is
    another one. DataError: the whole with labels of another shape agrees with the parts, so it compares all pairs.
    """
    if rows < 2:
        return None
    found: list[tuple[torch.Tensor, float]] = []
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for edges in (split_evenly(rows, rows), [(0, (rows + 2) // 3), ((rows + 2) // 3, rows)]):
            try:
                found = [part_of(*each) for each in edges]
                again, expected = part_of(*edges[0]), whole(None)
            except Exception as error:
                log.info("%s cannot be tried on %d parts: %s", name, len(edges), error)
                continue
            break
        else:
            return None
    first = float(found[0][0])
    if not math.isclose(float(again[0]), first, rel_tol=1e-6) and not math.isnan(first):
        return log.info("%s is random, so it is not known if it is a mean over rows", name)
    count = sum(part[1] for part in found)
    if not count or not expected[1] or not math.isfinite(loss := float(expected[0]) / expected[1]):
        return None
    if count > expected[1] * (1 + 1e-4) or (count < expected[1] * (1 - 1e-4) and not per_worker):
        raise InvalidSettingsError(
            f"{name} returned two values, for a numerator and a denominator, and the second is no denominator: it is "
            f"{expected[1]:.6g} for the first {rows} rows together, and {count:.6g} in all for {len(found)} parts of "
            "them. Return the loss alone; a train_fn returns values for metrics as (loss, outputs), with outputs by row"
        )
    with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(Exception):
        warnings.simplefilter("ignore")
        if not math.isclose(of_other := other()[1], expected[1], rel_tol=1e-4):
            log.warning(
                "%s returned two values, so its loss is the first divided by the second, a denominator. That follows "
                "from the model's outputs: it is %g for the first %d rows, and %g for the same rows and other outputs. "
                "If it is a number of hits, say, return the loss alone",
                name,
                expected[1],
                rows,
                of_other,
            )
    if per_worker:
        return None
    sums = [float(part[0]) for part in found]
    parts, size = sum(sums) / count, sum(map(abs, sums)) / count
    eps, apart = torch.finfo(expected[0].dtype).eps, abs(parts - loss)
    near = max(1e-4, 8 * eps) * size
    if apart <= 64 * eps * size:
        return None
    means = []
    for axis in (-1, 1) if shapes else ():
        with torch.no_grad(), warnings.catch_warnings(), contextlib.suppress(Exception):
            warnings.simplefilter("ignore")
            total, denominator = whole(axis)
            means.append(float(total) / denominator)
    # outputs that differ little give about the same for all pairs as for the right ones
    if any(abs(parts - mean) <= (near if apart > near else apart / 8) for mean in means):
        raise _all_pairs_error(name, shapes)
    if apart <= near:
        return None
    raise InvalidSettingsError(
        f"{name} is not a mean over rows: for the first {rows} rows together it is {loss:.6g}, and the mean of its "
        f"values for {len(found)} parts of them is {parts:.6g}, so the result would depend on the number of workers "
        "that share a batch. Let it return a value for each row; or (numerator, denominator), such as the sum over "
        "the labels that count and their number; or set loss_is_per_worker=True, to average it over the workers' "
        "shares as it is"
    )
