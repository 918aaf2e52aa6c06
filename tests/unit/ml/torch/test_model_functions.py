"""Models that a function makes: of modules that cannot be pickled, the training of plain torch in one process."""

from __future__ import annotations

import json
import pickle
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from spark_elastic import ElasticTorchEstimator
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.errors import InvalidSettingsError, NotPicklableError
from spark_elastic.ml.callbacks import BestCheckpoint
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.wire.pickling import dumps
from tests.nightly import by_night
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_net, settings, weights_of
from tests.unit.ml.torch.test_fidelity import one_process, sgd


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1)  # as `sgd`


def weight_norm(shapes: Any) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(shapes[0][1], 8)), nn.Tanh(), nn.Linear(8, 3))


def spectral_norm(shapes: Any) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(parametrizations.spectral_norm(nn.Linear(shapes[0][1], 8)), nn.Tanh(), nn.Linear(8, 3))


def orthogonal(shapes: Any) -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(parametrizations.orthogonal(nn.Linear(shapes[0][1], 8)), nn.Tanh(), nn.Linear(8, 3))


def lazy() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(nn.LazyLinear(8), nn.Tanh(), nn.LazyLinear(3))


def scripted(shapes: Any) -> nn.Module:
    made: nn.Module = torch.jit.script(make_net())
    return made


def exported(shapes: Any) -> nn.Module:
    rows = torch.export.Dim("rows", min=1)
    made = torch.export.export(make_net(), (torch.zeros(4, 6),), dynamic_shapes=({0: rows},), strict=False)
    return made.module()


class Locked(nn.Module):
    """A model with a lock, made for the shapes of its inputs."""

    def __init__(self, shapes: Any) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.lock, self.layer, self.gone = threading.Lock(), nn.Linear(shapes[0][1], 3), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.lock:
            return self.gone(self.layer(x))


KINDS = [weight_norm, spectral_norm, orthogonal, lazy, scripted, exported, Locked]


def first_rows(dataset: Dataset) -> torch.Tensor:
    with dataset.reader("train", batch_size=4, shuffle=False) as reader:
        return torch.from_numpy(next(iter(reader.epoch(0))).tensors["features_0"].copy())


def expected_of(make: Callable[..., nn.Module], dataset: Dataset) -> nn.Module:
    """Return the module that plain torch trains in one process."""
    net = make() if make is lazy else make([(-1, 6)])
    if make is lazy:
        net(first_rows(dataset))
    trained = one_process(net, sgd(net), dataset)
    return trained if make is exported else trained.eval()  # which a graph of torch.export refuses


def assert_same(fitted: ElasticTorchModel, expected: nn.Module, dataset: Dataset) -> None:
    """Compare the weights, and the outputs of the model as it travels to executors."""
    state, wanted = fitted.module.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    for name, value in state.items():
        torch.testing.assert_close(value, wanted[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    rows = first_rows(dataset)
    (output,) = pickle.loads(dumps(fitted._predictor()))()({"features_0": rows.numpy()})
    torch.testing.assert_close(torch.from_numpy(output), expected(rows).detach(), rtol=1e-4, atol=1e-5)


def saved_and_loaded(model: ElasticTorchModel) -> ElasticTorchModel:
    """Return what `load` makes of the parts that `save` writes."""
    facts, files, objects, *_ = model._parts()
    loaded = ElasticTorchModel()
    loaded._restore(json.loads(json.dumps(facts)), files, pickle.loads(dumps(objects)))
    return loaded


@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
def test_model_of_a_function_is_trained_as_by_plain_torch(make: Any, dataset: Dataset) -> None:
    fitted = estimator(model=make, optimizer=momentum, shuffle=False).from_dataset_path(dataset)
    expected = expected_of(make, dataset)
    assert_same(fitted, expected, dataset)
    assert_same(saved_and_loaded(fitted), expected, dataset)
    assert fitted.copy().module is fitted.module


@pytest.mark.parametrize("make", by_night(KINDS, but=[scripted, lazy]), ids=lambda make: make.__name__)
def test_two_workers_train_the_model_of_a_function_as_one(make: Any, dataset: Dataset) -> None:
    changes = {"optimizer": momentum, "shuffle": False, "num_proc": 2}
    fitted = ElasticTorchEstimator(**settings(model=make, **changes)).from_dataset_path(dataset)
    assert_same(fitted, expected_of(make, dataset), dataset)


def test_replicas_that_are_made_with_other_values_start_with_those_of_rank_0(dataset: Dataset) -> None:
    """The function draws from a generator that no seed reaches."""

    def make(shapes: Any) -> nn.Module:
        net, generator = make_net(), torch.Generator()
        generator.seed()
        for param in net.parameters():
            param.data.normal_(generator=generator)
        return net

    def checked(model: nn.Module, batch: Any) -> torch.Tensor:
        import spark_elastic.torch as hvd

        flat = torch.cat([param.detach().reshape(-1) for param in model.parameters()])
        if hvd.is_initialized() and hvd.size() == 2:  # not in the trial step
            assert torch.equal(hvd.broadcast(flat, 0), flat)
        return nn.functional.cross_entropy(model(batch.inputs[0]), batch.labels[0])

    changes = {"optimizer": torch.optim.SGD, "loss": None, "train_fn": checked, "num_proc": 2, "epochs": 1}
    assert len(ElasticTorchEstimator(**settings(model=make, **changes)).from_dataset_path(dataset).history) == 1


# --- shapes, and the weights that a fit begins with ---------------------------------------------------


def test_function_gets_the_shapes_that_the_model_sees(tmp_path: Path) -> None:
    import numpy as np

    rows = {"features_0": np.ones((24, 6), "f4"), "features_1": np.arange(24), "label_0": [0, 1, 2] * 8}

    class Two(nn.Linear):
        def forward(self, x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
            return super().forward(x.flatten(1)) + number[:, None]

    def make(shapes: Any) -> nn.Module:
        return Two(shapes[0][1] * shapes[0][2], 3)

    def wider(columns: dict[str, Any]) -> dict[str, Any]:
        return {**columns, "features_0": np.concatenate([columns["features_0"]] * 2, axis=2)}

    changes = {"transformation_fn": wider, "inference_fn": wider, "input_shapes": [(2, 3), ()], "epochs": 1}
    made = estimator(model=make, optimizer=torch.optim.SGD, **changes)
    model = made.from_dataset_path(pack(rows, tmp_path))
    assert made.training.model.shapes == ((-1, 2, 6), (-1,))
    assert model.module.in_features == 12


def test_fitted_model_keeps_what_the_function_referred_to(dataset: Dataset) -> None:
    width = 5
    made = estimator(model=lambda: nn.Sequential(nn.Linear(6, width), nn.Linear(width, 3)), optimizer=torch.optim.SGD)
    fitted = made.from_dataset_path(dataset)
    width = 9
    assert_same(fitted, fitted.module, dataset)


def drawn() -> nn.Module:
    return nn.Linear(6, 3)


def test_weights_at_the_start_follow_from_the_seed_alone(dataset: Dataset) -> None:
    def trained(seed: int) -> list[float]:
        torch.manual_seed(99 + len(found))  # what has been drawn before does not matter
        chosen: dict[str, Any] = {"model": drawn, "optimizer": torch.optim.SGD, "seed": seed, "shuffle": False}
        weights = weights_of(estimator(**chosen).from_dataset_path(dataset))
        found.append(weights)
        return weights

    found: list[Any] = []
    assert trained(1) == trained(1) != trained(2)
    torch.manual_seed(1)
    net = drawn()
    expected = one_process(net, torch.optim.SGD(net.parameters()), dataset)
    plain = [number for value in expected.state_dict().values() for number in value.reshape(-1).tolist()]
    assert found[0] == pytest.approx(plain, abs=1e-6)


# --- with the rest ------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [scripted, lazy, Locked], ids=lambda make: make.__name__)
def test_run_of_a_function_is_resumed_and_its_best_epoch_restored(make: Any, dataset: Dataset, tmp_path: Path) -> None:
    changes = {"model": make, "optimizer": momentum, "callbacks": [BestCheckpoint("lr", mode="max")]}
    changes |= {"lr_scheduler": lambda each: torch.optim.lr_scheduler.StepLR(each, 1, gamma=2.0)}
    runs = {"checkpoint_dir": tmp_path / "runs", "run_id": "a"}
    estimator(**changes, **runs, epochs=1).from_dataset_path(dataset)
    again = estimator(**changes, **runs, epochs=3)
    resumed = again.from_dataset_path(dataset)
    assert again.training.resume_from is not None
    whole = estimator(**changes, epochs=3).from_dataset_path(dataset)
    assert weights_of(resumed) == weights_of(whole)
    best = estimator(**{**changes, "callbacks": [BestCheckpoint("lr", mode="min")]}, epochs=3).from_dataset_path(
        dataset
    )
    assert weights_of(best) == weights_of(estimator(**changes, epochs=1).from_dataset_path(dataset))


def test_exact_training_of_a_function_does_not_depend_on_the_draws_before(dataset: Dataset) -> None:
    chosen = {"model": drawn, "optimizer": momentum, "consistency": "exact", "virtual_workers": 3}
    first = weights_of(estimator(**chosen).from_dataset_path(dataset))
    torch.rand(3)
    assert weights_of(estimator(**chosen).from_dataset_path(dataset)) == first


def normed(wrap: Any) -> Any:
    return lambda: wrap(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))


@pytest.mark.parametrize("wrap", [torch.jit.script, lambda net: torch.jit.trace(net, torch.zeros(4, 6))])
def test_scripted_batch_norm_is_warned_of_by_its_name_once(wrap: Any, dataset: Dataset, caplog: Any) -> None:
    changes: dict[str, Any] = {"model": normed(wrap), "optimizer": torch.optim.SGD, "epochs": 1}
    estimator(**changes).from_dataset_path(dataset)
    (said,) = [each.getMessage() for each in caplog.records if "batch statistics" in each.getMessage()]
    assert "1 (scripted BatchNorm1d) are not synchronised, because layers that are scripted, or" in said
    assert "Use torch.nn.BatchNorm1d, 2d or 3d in a model that is not scripted, or set sync_batch_norm=False" in said
    caplog.clear()
    estimator(**changes, sync_batch_norm=False).from_dataset_path(dataset)
    assert "batch statistics" not in caplog.text


# --- refused before workers start ---------------------------------------------------------------------


def failing(shapes: Any) -> Any:
    return shapes[0][7]


def named(*, width: int) -> Any: ...


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            lambda shapes: [shapes],
            r"model=<lambda> must return a torch.nn.Module; called with the shapes \[\(-1, 6\)\], it returned",
        ),
        (failing, r"model=failing, which is called with the shapes \[\(-1, 6\)\], raised IndexError: tuple index"),
        (nn.Linear, r"model=Linear needs in_features, out_features, and"),
        (named, r"model=named needs width, and"),
    ],
    ids=lambda each: getattr(each, "__name__", None),
)
def test_function_that_makes_no_model_is_refused_before_workers_start(
    model: Any, said: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HereEstimator, "run_job", None)
    with pytest.raises(InvalidSettingsError, match=said) as caught:
        estimator(model=model, optimizer=torch.optim.SGD).from_dataset_path(dataset)
    if model is failing:  # with the frames of the function, and none of this package
        frames = traceback.extract_tb(caught.value.__cause__.__traceback__)
        assert [each.name for each in frames] == ["failing"]


def test_optimizer_of_another_model_is_refused_with_the_function_that_makes_one(dataset: Dataset) -> None:
    other = torch.optim.SGD(make_net().parameters(), lr=0.5)
    with pytest.raises(InvalidSettingsError, match=r"lambda params: torch.optim.SGD\(params, lr=0.5\)"):
        estimator(model=drawn, optimizer=other).from_dataset_path(dataset)


@pytest.mark.parametrize("make", [scripted, Locked], ids=lambda make: make.__name__)
def test_model_that_cannot_be_pickled_is_refused_with_the_function_that_can(
    make: Any, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HereEstimator, "run_job", None)
    with pytest.raises(NotPicklableError, match=r"model \(.*give a function .*: model=lambda shapes: Net\(shapes"):
        estimator(model=make([(-1, 6)]), optimizer=momentum).from_dataset_path(dataset)
