"""The effect of each setting of a training, in a world of one."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from spark_elastic.data.dataset import pack
from spark_elastic.data.reader import Batch
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, HorovodInternalError, InvalidSettingsError, UsageError
from spark_elastic.ml.callbacks import LambdaCallback
from spark_elastic.ml.torch.engine import single_row_norm
from spark_elastic.ml.torch.objective import BatchMaker
from spark_elastic.ml.torch.spec import MODEL_FILE, build_optimizer, check_compiler
from spark_elastic.ml.training.engine import host_cores
from spark_elastic.runs.checkpoints import CHECKPOINTS, Checkpoints
from tests.unit.ml.torch import trainings
from tests.unit.ml.torch.trainings import EPOCHS, STEPS, alone, make_net, make_training

CPU = torch.device("cpu")


def one_batch(rows=5):
    features = np.arange(rows * 4, dtype=np.float32).reshape(rows, 4)
    tensors = {"features_0": features, "features_1": features[:, :1], "label_0": np.arange(rows), "text": ["x"] * rows}
    return Batch(tensors, rows, rows, 0, rows)


def maker(data, tmp_path, **changes):
    return BatchMaker(make_training(data, tmp_path, **changes), CPU)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda columns: None, "must return columns by name, not NoneType"),
        (lambda columns: {"features_0": columns["features_0"][:2]}, "was given 5 rows and returned 2 rows"),
        (lambda columns: {"features_0": 1.0}, "returned no rows for features_0"),
        (lambda columns: {**columns, "features_0": columns["text"]}, "features_0 holds list values of variable length"),
    ],
)
def test_transformation_fn_must_return_arrays_with_all_rows(function, message, data, tmp_path):
    with pytest.raises(DataError, match=message):
        maker(data, tmp_path, transformation_fn=function).parts(one_batch())


def test_transformation_fn_must_return_labels_and_weights(weighted_data, tmp_path):
    rows = one_batch()
    rows.tensors["sample_weight"] = np.ones(5)

    def features_only(columns):
        return {"features_0": columns["features_0"]}

    with pytest.raises(DataError, match="returned no label_0 and no sample_weight, but features_0"):
        maker(weighted_data, tmp_path, transformation_fn=features_only).parts(rows)
    changes = {"loss": None, "train_fn": trainings.squared, "transformation_fn": features_only}
    assert len(maker(weighted_data, tmp_path, **changes).parts(rows)) == 1  # a train_fn knows what it needs


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler": lambda optimizer: 3}, "is not a scheduler"),
        ({"device": "cuda:7"}, "sees no GPU"),
        ({"device": "abacus"}, "device='abacus'"),
    ],
)
def test_settings_that_do_not_fit_model_or_machine_are_refused(changes, message, data, tmp_path):
    if "cuda" in str(changes.get("device")) and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(InvalidSettingsError, match=message):
        alone(make_training(data, tmp_path, **changes))


def test_a_model_without_parameters_cannot_be_trained():
    with pytest.raises(InvalidSettingsError, match=r"the model \(Flatten\) has no parameters"):
        build_optimizer(torch.optim.SGD, torch.nn.Flatten())


def test_optimizers_and_compilers_that_torch_refuses_are_refused_with_the_setting():
    with pytest.raises(InvalidSettingsError, match="optimizer, called with the list of the model's parameters, raised"):
        build_optimizer(lambda model: torch.optim.SGD(model.parameters()), torch.nn.Linear(1, 1))
    check_compiler("eager")
    with pytest.raises(InvalidSettingsError, match="compile='nosuch' is no backend"):
        check_compiler("nosuch")


def test_nan_loss_ends_the_training_at_its_step_without_a_model(data, tmp_path):
    called = []
    watch = LambdaCallback(on_batch_end=lambda run: called.append(run.step), on_fit_end=called.append)
    result = alone(make_training(data, tmp_path, loss=trainings.NanFrom(3), callbacks=[watch]))
    loss = result["diverged"].pop("loss")
    assert loss != loss
    assert (result["diverged"], result["caused_divergence"], result["history"]) == ({"step": 2, "epoch": 0}, True, [])
    assert called == [1, 2]
    assert not (tmp_path / MODEL_FILE).exists()
    assert alone(make_training(data, tmp_path / "inf", loss=lambda output, label: output.mean() * float("inf")))[
        "diverged"
    ] in ({"step": 0, "epoch": 0, "loss": sign * float("inf")} for sign in (1, -1))


def test_weights_that_are_no_numbers_are_written_to_no_model_and_no_checkpoint(data, tmp_path):
    result = alone(make_training(data, tmp_path, loss=NanGradient(STEPS)))
    assert result["diverged"] == {"step": STEPS - 1, "epoch": EPOCHS - 1, "loss": None}
    assert not (tmp_path / MODEL_FILE).exists()
    latest = Checkpoints(Store.create(tmp_path).sub(CHECKPOINTS)).latest()
    assert latest is not None
    assert latest.step == 2 * STEPS // EPOCHS, "that of the last epoch would have held weights that are NaN"


class NanGradient:
    """A finite loss whose gradient is NaN in the `count`-th step."""

    def __init__(self, count):
        self.count, self.calls = count, 0

    def __call__(self, output, label):
        loss = torch.nn.functional.cross_entropy(output, label)
        self.calls += torch.is_grad_enabled()
        return loss + torch.sqrt(output.sum() * 0) if self.calls == self.count else loss


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        (
            {"loss": lambda output, label: output.mean() * float("nan"), "allow_nan_loss": True},
            "the training continues because allow_nan_loss is set",
        ),
        (
            {"transformation_fn": lambda columns: {**columns, "label_0": np.full_like(columns["label_0"], -100)}},
            "the loss ignores the labels of all its rows",
        ),
    ],
)
def test_nan_loss_that_does_not_end_the_training_is_logged_once(changes, why, data, tmp_path, caplog):
    assert alone(make_training(data, tmp_path, **changes))["diverged"] is None
    found = [record.getMessage() for record in caplog.records if "is NaN" in record.getMessage()]
    assert found == [f"the loss of epoch 1 is NaN; {why}"]


def test_a_made_scheduler_is_the_same_as_a_function_that_makes_it(data, tmp_path):
    alone(make_training(data, tmp_path / "function", lr_scheduler=trainings.halved_every_epoch))
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = trainings.halved_every_epoch(optimizer)
    result = alone(make_training(data, tmp_path / "instance", model=net, optimizer=optimizer, lr_scheduler=scheduler))
    assert [row["lr"] for row in result["history"]] == [0.1, 0.05, 0.025]
    assert trainings.weights(tmp_path / "instance") == trainings.weights(tmp_path / "function")


def test_events_come_in_order_and_once_each_and_callbacks_see_the_progress(data, tmp_path):
    events, seen = [], []

    def look(run, logs):
        seen.append((run.epoch, run.epochs, run.step, len(run.history), run.rank, run.size, logs["steps"]))

    names = ["fit_begin", "epoch_begin", "batch_end", "validation_end", "epoch_end", "fit_end"]
    callback = LambdaCallback(**{f"on_{name}": lambda *_, name=name: events.append(name) for name in names})
    alone(make_training(data, tmp_path, callbacks=[callback, LambdaCallback(on_epoch_end=look)]))
    assert seen == [(epoch, 3, 13 * (epoch + 1), epoch, 0, 1, 13 * (epoch + 1)) for epoch in range(3)]
    an_epoch = ["epoch_begin", *["batch_end"] * 13, "validation_end", "epoch_end"]
    assert events == ["fit_begin", *an_epoch * 3, "fit_end"]


@pytest.mark.parametrize("empty", [False, True], ids=["no split", "a split without rows"])
def test_dataset_without_validation_split_is_trained_on(empty, tmp_path):
    rows = {"features_0": np.random.default_rng(0).normal(size=(50, 6)), "label_0": np.arange(50) % 3}
    made = pack(rows, tmp_path / "set")
    training = make_training(tmp_path / "set", tmp_path / "run")
    if empty:
        manifest = replace(made.manifest, splits={**made.manifest.splits, "validation": ()})
        training = replace(training, dataset=replace(made, manifest=manifest))
    result = alone(training)
    assert all(not name.startswith("val_") for name in result["history"][0])


def test_frozen_and_unused_parameters_do_not_change(data, tmp_path):
    net = make_net()
    net[0].requires_grad_(False)
    net.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    result = alone(make_training(data, tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state.keys() == {"2.weight", "2.bias", "unused"}  # those that are as they were given are left out
    assert state["unused"].tolist() == [1, 1, 1]
    assert result["steps"] == STEPS


class Remembers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.net = make_net()
        self.seen = {"rows": 0}

    def forward(self, x):
        self.seen = {"rows": self.seen["rows"] + len(x)}
        return self.net(x)

    def get_extra_state(self):
        return self.seen

    def set_extra_state(self, state):
        self.seen = state


def test_model_may_have_a_state_beside_tensors(data, tmp_path):
    net = Remembers()
    alone(make_training(data, tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert state["_extra_state"]["rows"] == 3 * (trainings.ROWS + trainings.VALIDATION_ROWS)


@pytest.mark.parametrize("event", ["on_epoch_begin", "on_batch_end"])
def test_thawing_a_parameter_during_the_training_is_refused(event, data, tmp_path):
    net = make_net()
    net[0].weight.requires_grad_(False)
    thaw = LambdaCallback(**{event: lambda run: run.model[0].weight.requires_grad_(True)})
    with pytest.raises(InvalidSettingsError, match=r"requires_grad of 0\.weight was set to True"):
        alone(make_training(data, tmp_path, model=net, callbacks=[thaw]))


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_container_may_have_fewer_cores_than_the_host(text, most, tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    without = host_cores(tmp_path / "no such file")
    assert host_cores(quota) == (without if most is None else min(without, most))


# --- steps of one row, and steps that fail --------------------------------------------------------------


def test_single_row_is_normalised_by_the_unchanged_running_statistics():
    net = make_net(norm=True)
    row = torch.ones(1, 6, dtype=torch.float64)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    with single_row_norm(net, rows=1):
        output = net(row)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net[1].training
    assert torch.equal(output, net.eval()(row))


class StepThatLosesAWorker(torch.optim.SGD):
    """An optimizer with a collective in its second step, which fails."""

    steps = 0

    def step(self, closure=None):
        super().step(closure)
        self.steps += 1
        if self.steps == 2:
            raise HorovodInternalError("a collective failed: a peer is gone")


def test_collective_that_fails_within_the_optimizers_step_ends_the_training(data, tmp_path):
    net = make_net()
    optimizer = StepThatLosesAWorker(net.parameters(), lr=0.1)
    with pytest.raises(UsageError, match="must not call collectives in its step"):
        alone(make_training(data, tmp_path, model=net, optimizer=optimizer))
