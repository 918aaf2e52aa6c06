"""The user's objects, the workers' and those that `fit` returns are the same: hooks, shared memory, attributes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.optim.optimizer import register_optimizer_step_post_hook

from spark_elastic.data.dataset import Dataset
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.ml.callbacks import BestCheckpoint
from spark_elastic.ml.torch import serialization
from spark_elastic.ml.torch.fidelity import differences
from spark_elastic.runs.tensors import from_bytes
from spark_elastic.wire.pickling import dumps
from tests.unit.ml.torch.estimators import HereEstimator, estimator, make_net, settings
from tests.unit.ml.torch.trainings import Sometimes


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def one_process(net: nn.Module, optimizer: torch.optim.Optimizer, dataset: Dataset) -> nn.Module:
    """Train as `estimators.settings` do, with plain torch."""
    for epoch in range(2):
        with dataset.reader("train", batch_size=16, shuffle=False) as reader:
            for batch in reader.epoch(epoch):
                optimizer.zero_grad()
                output = net(torch.from_numpy(batch.tensors["features_0"]))
                nn.functional.cross_entropy(output, torch.from_numpy(batch.tensors["label_0"])).backward()
                optimizer.step()
    return net


def assert_like_one_process(make: Callable[[], tuple[nn.Module, Any]], dataset: Dataset, **changes: Any) -> nn.Module:
    net, optimizer = make()
    fitted = estimator(model=net, optimizer=optimizer, shuffle=False, **changes).from_dataset_path(dataset).module
    expected = one_process(*make(), dataset).state_dict()
    for name, value in fitted.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return fitted


# --- to the workers -----------------------------------------------------------------------------


def clipped(param: torch.Tensor) -> None:
    param.grad.clamp_(-0.001, 0.001)


def with_frozen_rows() -> tuple[nn.Module, Any]:
    net = make_net()
    net[0].weight.register_hook(lambda grad: grad * torch.tensor([0.0, 1.0]).repeat_interleave(4)[:, None])
    net[2].bias.register_post_accumulate_grad_hook(clipped)
    return net, sgd(net)


def clamped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    with torch.no_grad():
        for param in optimizer.param_groups[0]["params"]:
            param.clamp_(-0.1, 0.1)


def with_clamped_weights() -> tuple[nn.Module, Any]:
    net = make_net()
    optimizer = sgd(net)
    optimizer.register_step_post_hook(clamped)
    return net, optimizer


class Autoencoder(nn.Module):
    """Two layers of one memory, a buffer that is a part of it, and a running mean that no state_dict has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 6), nn.Linear(6, 3)
        self.down.weight = nn.Parameter(self.up.weight.t())
        self.register_buffer("first", self.up.weight.data[0])
        self.register_buffer("mean", torch.zeros(6), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.last(self.down(self.up(x)) - self.mean)


def with_shared_memory() -> tuple[nn.Module, Any]:
    net = Autoencoder()
    return net, torch.optim.SGD(net.parameters(), lr=0.01)


class Halving(torch.optim.SGD):
    """An optimizer with an attribute of its own."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.factor = 0.5

    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.grad.mul_(self.factor)
        return super().step(closure)


def with_own_attribute() -> tuple[nn.Module, Any]:
    net = make_net()
    return net, Halving(net.parameters(), lr=0.1)


def with_parametrizations() -> tuple[nn.Module, Any]:
    net = make_net()
    parametrizations.weight_norm(net[0])
    return net, sgd(net)


def with_a_part_in_eval_mode() -> tuple[nn.Module, Any]:
    net = nn.Sequential(make_net(), nn.BatchNorm1d(3), nn.Dropout(0.9), nn.Linear(3, 3))
    net[1].eval(), net[2].eval()
    return net, sgd(net)


def with_layers_that_few_rows_use() -> tuple[nn.Module, Any]:
    net = Sometimes(sparse=False)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.1)


@pytest.mark.parametrize(
    "make",
    [
        *(with_frozen_rows, with_clamped_weights, with_shared_memory, with_layers_that_few_rows_use),
        *(with_own_attribute, with_parametrizations, with_a_part_in_eval_mode),
    ],
    ids=lambda make: make.__name__,
)
def test_training_gives_the_weights_of_plain_torch(make: Callable[[], tuple[nn.Module, Any]], dataset: Dataset) -> None:
    fitted = assert_like_one_process(make, dataset)
    if make is with_shared_memory:  # a buffer that no state_dict has
        torch.testing.assert_close(fitted.mean, one_process(*make(), dataset).mean)
    assert not differences({"model": make()[0].eval()}, {"model": fitted})


class Elsewhere(HereEstimator):
    def run_job(self, *arguments: Any) -> Any:
        torch.set_default_dtype(torch.float32)  # as in a new process
        return super().run_job(*arguments)


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.double()) + torch.zeros(3)


def test_workers_have_the_default_dtype_of_the_driver(dataset: Dataset) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        Elsewhere(**settings(model=Doubled(6, 3))).from_dataset_path(dataset)
        assert torch.get_default_dtype() == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


def replaced_step() -> dict[str, Any]:
    net = make_net()
    optimizer = sgd(net)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign]
    return {"model": net, "optimizer": optimizer}


class Forgetful(nn.Linear):
    """A layer whose pickle leaves out its hooks."""

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_forward_hooks": {}}


def forgetful() -> dict[str, Any]:
    net = Forgetful(6, 3)
    net.register_forward_hook(lambda module, inputs, output: output * 2)
    return {"model": net}


def without_memory() -> dict[str, Any]:
    """A model that has a parameter only after its first call."""

    class Late(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "scale"):
                self.scale = nn.Parameter(torch.ones(3))
            return super().forward(x) * self.scale

    return {"model": Late(6, 3)}


@pytest.fixture
def for_all_optimizers() -> Iterator[None]:
    handle = register_optimizer_step_post_hook(clamped)
    yield
    handle.remove()


@pytest.mark.usefixtures("for_all_optimizers")
def test_hooks_of_all_optimizers_are_refused(dataset: Dataset) -> None:
    with pytest.raises(InvalidSettingsError, match="_global_optimizer_post_hooks"):
        estimator().from_dataset_path(dataset)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (replaced_step, "step of the optimizer (SGD) was replaced"),
        (forgetful, "the hooks of model: {'_forward_hooks'"),
        (without_memory, "the trained Late could not be returned"),
    ],
    ids=["step", "hook", "state"],
)
def test_what_cannot_travel_is_refused_before_workers_start(
    make: Callable[[], dict[str, Any]], named: str, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HereEstimator, "run_job", None)
    with pytest.raises(InvalidSettingsError) as error:
        estimator(**make()).from_dataset_path(dataset)
    assert named in error.value.message


def test_new_hooks_do_not_take_the_place_of_those_that_arrived(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(2, 2)
    net.register_forward_hook(lambda module, inputs, output: output * 0)
    file = dumps(net)
    monkeypatch.setattr(torch.utils.hooks.RemovableHandle, "next_id", 0)  # as in a new process
    arrived = pickle.loads(file)
    for _ in range(5):
        arrived.register_forward_hook(lambda module, inputs, output: output + 1)
    assert torch.equal(arrived(torch.ones(1, 2)), torch.full((1, 2), 5.0))


# --- from the workers ---------------------------------------------------------------------------


def normalised() -> nn.Module:
    """A model with tensors that `copy.deepcopy` refuses: weights computed by hooks, and an activation that it keeps."""
    net = make_net()
    nn.utils.spectral_norm(nn.utils.weight_norm(net[0], "bias", dim=0))
    prune.l1_unstructured(net[2], "weight", amount=0.5)
    net.last = net(torch.ones(2, 6))
    return net


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
@pytest.mark.parametrize("callbacks", [None, [BestCheckpoint("loss")]], ids=["last", "best"])
def test_model_that_deepcopy_refuses_is_returned_and_saved(dataset: Dataset, callbacks: Any) -> None:
    with pytest.raises(RuntimeError, match="deepcopy"):
        copy.deepcopy(normalised())
    fitted = estimator(model=normalised(), callbacks=callbacks).from_dataset_path(dataset)
    x = torch.randn(3, 6)
    fitted.module.last = fitted.module(x)  # as a forward of the user's may keep it
    parts = fitted._parts()
    objects = pickle.loads(serialization.pickled(parts.objects))
    loaded = serialization.fill(objects["architecture"], from_bytes(parts.files["weights.pt"]))
    assert torch.equal(loaded.eval()(x), fitted.module(x))


def test_hooks_of_a_saved_estimator_are_pickled_not_dropped() -> None:
    net = make_net()
    optimizer = sgd(net)
    assert serialization.dumps({"model": net, "optimizer": optimizer}) is not None
    optimizer.register_step_post_hook(clamped)
    assert serialization.dumps({"model": net, "optimizer": optimizer}) is None
    loaded = pickle.loads(serialization.pickled({"model": net, "optimizer": optimizer}))
    assert not differences({"model": net, "optimizer": optimizer}, loaded)
