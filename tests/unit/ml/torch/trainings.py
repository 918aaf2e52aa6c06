"""A small training in float64, to be done in any world, and callbacks that end a worker at a chosen moment."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.ml.callbacks import BestCheckpoint, LambdaCallback
from spark_elastic.ml.torch.spec import MODEL_FILE, TorchTraining
from spark_elastic.ml.torch.train import train
from spark_elastic.ml.training.spec import CheckpointPlan
from tests.unit.ml.in_worlds import (
    BATCH,
    EPOCHS,
    ROWS,
    STEPS,
    VALIDATION_ROWS,
    At,
    EpochCounter,
    EverySteps,
    assert_same_outcome,
    at_call,
    plain_outcome,
)


def make_sets(folder: Path) -> Path:
    """Write the dataset, and the same with sample weights beside it; return the path of the first."""
    make_set(folder / "weighted", weights=True)
    make_set(folder / "set")
    return folder / "set"


def make_set(folder: Path, *, weights: bool = False, float32: bool = False) -> Dataset:
    generator = np.random.default_rng(7)
    kind = np.float32 if float32 else np.float64
    truth = generator.normal(size=(6, 3))

    def rows(count: int) -> dict[str, Any]:
        features = generator.normal(size=(count, 6)).astype(kind)
        columns: dict[str, Any] = {"features_0": features, "label_0": (features @ truth).argmax(1)}
        if weights:
            columns["sample_weight"] = generator.uniform(0.1, 2.0, size=count).astype(kind)
        return columns

    return pack(rows(ROWS), folder, validation=rows(VALIDATION_ROWS), shards=3)


class Counting(torch.nn.Module):
    """A layer that every forward pass of the training changes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += self.training
        return x * (1 + 0.1 * self.passes)


class Sometimes(torch.nn.Module):
    """A model with layers and a table for rows of a kind, and a layer that nothing calls."""

    def __init__(self, *, sparse: bool, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.enter = torch.nn.Sequential(torch.nn.Linear(6, 6), *([torch.nn.BatchNorm1d(6)] if norm else []))
        self.base, self.rare, self.never = (torch.nn.Linear(6, 3) for _ in range(3))
        self.table = torch.nn.Embedding(4, 3, sparse=sparse)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        entered = self.enter(features)
        out = self.base(entered)
        if (rare := features[:, 0] > 1.4).any():
            out = out.index_add(0, rare.nonzero()[:, 0], self.rare(entered[rare]))
        if (many := features[:, 1] > 0.8).any():
            out = out.index_add(0, many.nonzero()[:, 0], self.table((features[many][:, 2] > 0).long()))
        return out


def make_net(
    *, dropout: float = 0.0, norm: bool = False, counting: bool = False, sometimes: bool = False, sparse: bool = False
) -> torch.nn.Module:
    if sometimes:
        return Sometimes(norm=norm, sparse=sparse).double()
    torch.manual_seed(3)
    layers: list[torch.nn.Module] = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)]
    if counting:
        layers[0] = torch.nn.utils.parametrizations.spectral_norm(layers[0])
        layers.append(Counting())
    if norm:
        layers.insert(1, torch.nn.BatchNorm1d(8))
    if dropout:
        layers.insert(-1, torch.nn.Dropout(dropout))
    return torch.nn.Sequential(*layers).double()


def accuracy(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    return (output.argmax(1) == label).double().mean()


def label_sum(output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """A metric with a value for each row, which shows the rows that were seen."""
    return label.double()


def make_training(data: Path, folder: Path, **changes: Any) -> TorchTraining:
    made = {name: changes.pop(name, False) for name in ("dropout", "norm", "counting", "sometimes", "sparse")}
    net = changes.pop("model", None) or make_net(**made)
    settings: dict[str, Any] = {
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        "loss": torch.nn.CrossEntropyLoss(),
        "metrics": {"accuracy": accuracy, "label_sum": label_sum},
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "checkpoints": CheckpointPlan(every_epochs=1),
        "verbose": 0,
        **changes,
    }
    return TorchTraining(dataset=Dataset.open(data), store=Store.create(folder), **settings)


def outcome(training: TorchTraining) -> dict[str, Any]:
    """Train, and return the result as plain values."""
    return plain_outcome(train(training), hvd.size())


def precise() -> Any:
    """Return a context in which the framework computes in float64; PyTorch takes the type of the data."""
    return contextlib.nullcontext()


def alone(training: TorchTraining) -> dict[str, Any]:
    """Train in this process, a world of one."""
    try:
        return outcome(training)
    finally:
        hvd.shutdown()


def weights(folder: Path) -> list[float]:
    state = torch.load(folder / MODEL_FILE, weights_only=True)
    return [number for tensor in state.values() for number in tensor.double().reshape(-1).tolist()]


def assert_as_undisturbed(result: Mapping[str, Any], folder: Path, undisturbed: tuple[Any, Any]) -> None:
    assert_same_outcome(result, weights(folder), undisturbed)


def settings_of(name: str) -> dict[str, Any]:
    """Make the settings of a variant anew, as another process would."""
    return variant_of(name)


class SumMetric:
    """A metric like those of torchmetrics, with states that are added up: the accuracy by class."""

    def __init__(self) -> None:
        self._reductions = {"right": dim_zero_sum, "total": dim_zero_sum}
        self._defaults = {"right": torch.zeros(3, dtype=torch.int64), "total": torch.tensor(0)}
        self.reset()

    def reset(self) -> None:
        self.right, self.total = (default.clone() for default in self._defaults.values())

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.right = self.right + torch.bincount(label[output.argmax(1) == label], minlength=3)
        self.total = self.total + len(label)

    def compute(self) -> torch.Tensor:
        return self.right / self.total


class ListMetric:
    """A metric like those of torchmetrics, with a list of all values: the median and number of the largest outputs."""

    def __init__(self) -> None:
        self._reductions = {"seen": dim_zero_cat, "most": dim_zero_max}
        self._defaults = {"seen": [], "most": torch.tensor(-9.0, dtype=torch.float64)}
        self.reset()

    def reset(self) -> None:
        self.seen: list[torch.Tensor] = []
        self.most = torch.tensor(-9.0, dtype=torch.float64)

    def update(self, output: torch.Tensor, label: torch.Tensor) -> None:
        self.seen.append(output.max(1).values)
        self.most = torch.maximum(self.most, output.max())

    def compute(self) -> dict[str, torch.Tensor]:
        seen = torch.cat(self.seen)
        return {"median": seen.median(), "count": torch.tensor(len(seen)), "most": self.most}


def dim_zero_sum(states: torch.Tensor) -> torch.Tensor:
    return states.sum(0)


def dim_zero_cat(states: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(states)


def dim_zero_max(states: torch.Tensor) -> torch.Tensor:
    return states.max(0).values


class StoreThat:
    """A store that calls `action` before or after it writes a file whose name ends with `ending`."""

    def __init__(self, store: Any, ending: str, action: Callable[[], None], *, half: bool = False) -> None:
        self._store, self._ending, self._action, self._half = store, ending, action, half

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def sub(self, path: str) -> StoreThat:
        return StoreThat(self._store.sub(path), self._ending, self._action, half=self._half)

    def write_bytes(self, path: str, data: bytes, **options: Any) -> Any:
        if path.endswith(self._ending):
            if self._half:  # as on storage that does not write in one piece
                target = self._store.local_path(path)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data[: len(data) // 2])
            else:
                self._store.write_bytes(path, data, **options)
            self._action()
        return self._store.write_bytes(path, data, **options)


def adam(params: list[Any]) -> torch.optim.Optimizer:
    """Adam with other options for the first layer."""
    return torch.optim.Adam([{"params": params[:2], "lr": 0.01}, {"params": params[2:], "weight_decay": 0.1}], lr=0.02)


def adamw(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.05, weight_decay=0.1)


def plain_sgd(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)  # its momentum of sparse gradients is sparse, which is refused


def of_last_layer(params: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params[2:], lr=0.1)


def only_negative(param: Any) -> None:
    param.grad.clamp_(max=0.0)


def hooked(params: list[Any]) -> torch.optim.Optimizer:
    """SGD with hooks that see the gradient of a parameter, and the parameters after a step."""
    params[0].register_hook(lambda grad: grad.clamp(-0.005, 0.005))
    params[1].register_post_accumulate_grad_hook(only_negative)
    optimizer = torch.optim.SGD(params, lr=0.1)
    optimizer.register_step_post_hook(lambda *_: params[2].data.clamp_(-0.3, 0.3))
    return optimizer


def halved_every_epoch(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)


def less_every_step(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def plateau(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)


def squared(model: torch.nn.Module, batch: Any) -> Any:
    output = model(batch["features_0"])
    wanted = torch.nn.functional.one_hot(batch.labels[0], 3).double()
    return (output - wanted).square().mean(), output


def doubled(columns: dict[str, Any]) -> dict[str, Any]:
    return {"features_0": columns["features_0"] * 2, "label_0": columns["label_0"]}


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulation_steps": 3},
    "clipped by norm and by value": {"gradient_clip_norm": 0.05, "gradient_clip_value": 0.01},
    "Adam with options by parameter": {"optimizer": adam},
    "hooks of parameters and optimizer": {"optimizer": hooked, "accumulation_steps": 2},
    "a schedule by step": {"lr_scheduler": less_every_step, "scheduler_interval": "step"},
    "a schedule by metric": {"lr_scheduler": plateau},
    "class weights": {"loss": torch.nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64))},
    "a loss that is a sum": {"loss": torch.nn.CrossEntropyLoss(reduction="sum"), "optimizer": torch.optim.Adagrad},
    "train_fn": {"loss": None, "train_fn": squared},
    "transformation_fn, no shuffle": {"transformation_fn": doubled, "shuffle": False},
    "metrics with states": {"metrics": {"by_class": SumMetric(), "outputs": ListMetric()}},
    "sample weights": {"weighted": True},
    "no prefetch": {"prefetch": 0},
    "rows in windows, in parts": {"order": "lanes", "accumulation_steps": 2},
    "clipped, for the last layer alone": {"optimizer": of_last_layer, "gradient_clip_norm": 0.05},
    "a batch larger than the set": {"batch_size": 1000},
    "batches of two rows, fewer than workers": {"batch_size": 2, "epochs": 1},
    "states of forward passes, a last batch of two rows": {"counting": True, "batch_size": 67, "epochs": 2},
    "rare layers": {"sometimes": True, "optimizer": adamw, "gradient_clip_norm": 0.3, "accumulation_steps": 2},
    "rare layers, a last batch of one row": {"sometimes": True, "norm": True, "batch_size": 101},
    "rare sparse gradients": {"sometimes": True, "sparse": True, "optimizer": plain_sgd, "gradient_clip_norm": 0.3},
    "batch normalisation": {"norm": True},
    "batch normalisation, a last batch of one row": {"norm": True, "batch_size": 101},
    "batch normalisation with class weights": {
        "norm": True,
        "batch_size": 4,
        "loss": torch.nn.CrossEntropyLoss(torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64)),
    },
}
"""Settings under which the result must not depend on the world."""

WORLDLY: dict[str, dict[str, Any]] = {
    "a batch for each worker": {"batch_size": None, "per_worker_batch_size": BATCH},
    "compressed": {"gradient_compression": "bf16"},
    "batch normalisation of parts": {"norm": True, "batch_size": 4, "accumulation_steps": 3},
    "dropout": {"dropout": 0.5},
}
"""And settings under which it does."""


def in_worker(data: Path, folder: Path, plans: Mapping[int, tuple[Any, ...]], variant: str = "plain") -> Any:
    """Train in a worker of a `WorldDriver`.

    `plans` has the moment at which a worker ends: ("on_batch_end", 7), ("forward", 3) or ("store", "a.pt", half).
    """
    from tests.unit.world_link import die, link

    training = make_training(data, folder, **variant_of(variant))
    for worker, (kind, *rest) in plans.items():
        action = die if worker == link().worker else lambda: None
        if kind.startswith("on_"):  # all workers have the same callbacks
            training = replace(training, callbacks=[*training.callbacks, At(kind, rest[0], action)])
        elif kind == "forward":
            training.model.register_forward_hook(at_call(rest[0], action))
        elif kind == "backward":
            training.model[0].register_full_backward_pre_hook(at_call(rest[0], action))
        elif kind == "store":
            training = replace(training, store=StoreThat(training.store, rest[0], action, half=rest[1]))
    return outcome(training)


def in_worker_variants(folders: Mapping[str, Path], folder: Path) -> dict[str, Any]:
    """Train the variants, each on the set in its folder, one after the other in one world."""
    from tests.unit.world_link import tell

    results = {}
    for name, data in folders.items():
        results[name] = in_worker(data, folder / name, {}, name)
        tell("trained", name)  # a test waits only as long as something happens
    return results


def variant_of(name: str) -> dict[str, Any]:
    return {key: value for key, value in {**VARIANTS, **WORLDLY}[name].items() if key != "weighted"}


def in_worker_slowly(data: Path, folder: Path) -> Any:
    counter = EpochCounter(STEPS - 5, pause_s=0.05)
    return {**outcome(make_training(data, folder, callbacks=[counter])), "epochs counted": counter.epochs}


def in_worker_resumed(data: Path, folder: Path, name: str) -> Any:
    callbacks = [EverySteps(5), At("on_batch_end", 1 << 30, lambda: None)]
    return outcome(make_training(data, folder, callbacks=callbacks, resume_from=name))


def in_worker_with_best(data: Path, folder: Path) -> Any:
    """Train with the best weights in the first epoch; rank 0 ends in the second."""
    from tests.unit.world_link import die, link

    dies = At("on_batch_end", 20, die if link().worker == 1 else lambda: None)
    callbacks = [BestCheckpoint("lr", mode="max"), dies]
    return outcome(make_training(data, folder, callbacks=callbacks, lr_scheduler=halved_every_epoch))


def in_worker_with_norm(data: Path, folder: Path) -> Any:
    net = make_net(norm=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return outcome(make_training(data, folder, model=net, optimizer=optimizer, sync_batch_norm=False))


def in_worker_that_stops(data: Path, folder: Path) -> Any:
    """Train until rank 1 alone asks to stop."""

    def enough(run: Any) -> None:
        if run.rank == 1 and run.step == 4:
            run.stop("rank 1 has seen enough")

    return outcome(make_training(data, folder, callbacks=[LambdaCallback(on_batch_end=enough)]))


class NanFrom:
    """A loss that is NaN from the `count`-th call on, in the worker of this rank."""

    def __init__(self, count: int, rank: int = 0) -> None:
        self.count, self.rank, self.calls = count, rank, 0

    def __call__(self, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss = torch.nn.functional.cross_entropy(output, label)
        return loss * float("nan") if self.calls >= self.count and hvd.rank() == self.rank else loss


def in_worker_that_diverges(data: Path, folder: Path) -> Any:
    """Train with a NaN loss on rank 1 alone, in the third step of the second epoch."""
    return outcome(make_training(data, folder, loss=NanFrom(13 + 5 + 3, rank=1)))
