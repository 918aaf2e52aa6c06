"""The effect of each setting of a training, in a world of one."""

from __future__ import annotations

import inspect
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

import spark_elastic.torch as hvd
from spark_elastic.data.dataset import pack
from spark_elastic.data.files import LocalSource
from spark_elastic.data.reader import Batch, BatchReader
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.callbacks import LambdaCallback
from spark_elastic.ml.torch import serialization
from spark_elastic.ml.torch.engine import objective_of
from spark_elastic.ml.torch.objective import BatchMaker
from spark_elastic.ml.torch.spec import MODEL_FILE, build_optimizer
from spark_elastic.ml.torch.training import train
from spark_elastic.ml.training import trainer as trainers
from spark_elastic.ml.training.engine import host_cores, threads_for
from spark_elastic.ml.training.spec import CheckpointPlan
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


def test_inputs_and_labels_are_found_by_name_and_other_columns_are_kept(data, tmp_path):
    (batch,) = maker(data, tmp_path).parts(one_batch())
    assert [tuple(one.shape) for one in batch.inputs] == [(5, 4), (5, 1)]
    assert [one.tolist() for one in batch.labels] == [[0, 1, 2, 3, 4]]
    assert batch["text"] == ["x"] * 5
    assert batch.weights is None


def test_tensors_are_those_of_the_reader_without_a_copy(data, tmp_path):
    batch = one_batch()
    (made,) = maker(data, tmp_path).parts(batch)
    batch.tensors["features_0"][0, 0] = 77
    assert made.inputs[0][0, 0] == 77


def test_shapes_of_one_row_can_be_set(data, tmp_path):
    (batch,) = maker(data, tmp_path, input_shapes=[(1, 2, 2), None], label_shapes=[(1,)]).parts(one_batch())
    assert [tuple(one.shape) for one in batch.inputs] == [(5, 1, 2, 2), (5, 1)]
    assert tuple(batch.labels[0].shape) == (5, 1)


@pytest.mark.parametrize(("rows", "parts"), [(5, [1, 2, 2]), (2, [1, 1]), (6, [2, 2, 2]), (0, [])])
def test_accumulation_cuts_a_share_into_parts_of_about_equal_size(rows, parts, data, tmp_path):
    made = maker(data, tmp_path, accumulation=3).parts(one_batch(rows))
    assert [len(part.labels[0]) for part in made] == [part.rows for part in made] == parts
    assert [row for part in made for row in part.labels[0].tolist()] == list(range(rows))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda columns: None, "must return columns by name, not NoneType"),
        (
            lambda columns: {"features_0": columns["features_0"][:2]},
            "was given 5 rows and returned 2 rows for features_0",
        ),
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
        ({"batch_size": None}, "either batch_size or per_worker_batch_size"),
        ({"per_worker_batch_size": 4}, "either batch_size or per_worker_batch_size"),
        ({"loss": None}, "either loss or train_fn"),
        ({"loss": None, "train_fn": trainings.squared, "loss_weights": [1]}, "loss_weights need losses"),
        ({"scheduler_interval": "batch"}, 'must be "epoch" or "step"'),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_runs(changes, message, data, tmp_path):
    with pytest.raises(InvalidSettingsError, match=message):
        make_training(data, tmp_path, **changes)


@pytest.mark.parametrize("plan", [{"every_epochs": 0}, {"every_seconds": -1.0}, {"keep": 0}, {"mode": "most"}])
def test_invalid_checkpoint_plan_is_refused(plan):
    with pytest.raises(InvalidSettingsError, match=next(iter(plan))):
        CheckpointPlan(**plan)


def foreign():
    return torch.optim.SGD(make_net().parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": foreign()}, "4 of the optimizer's parameters are not the model's"),
        ({"optimizer": lambda params: None}, "it gave NoneType"),
        ({"optimizer": torch.optim.LBFGS}, "LBFGS evaluates the loss several times"),
        ({"lr_scheduler": torch.optim.lr_scheduler.StepLR(foreign(), 1)}, "belongs to another optimizer"),
        ({"lr_scheduler": lambda optimizer: 3}, "is not a scheduler"),
        ({"lr_scheduler": trainings.plateau, "scheduler_monitor": "f1"}, "scheduler_monitor='f1' is not one of"),
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


class Busy:
    """A store that refuses the model a number of times."""

    def __init__(self, store, times):
        self._store, self._left = store, times

    def __getattr__(self, name):
        return getattr(self._store, name)

    def write_bytes(self, path, data, **options):
        if path == "model.pt":
            self._left -= 1
            if self._left >= 0:
                raise OSError("503")
        return self._store.write_bytes(path, data, **options)


def result_of(training):
    try:
        return train(training)
    finally:
        hvd.shutdown()


def test_a_store_that_is_busy_is_asked_again(data, tmp_path):
    training = make_training(data, tmp_path, epochs=1)
    result = result_of(replace(training, store=Busy(training.store, 1)))
    assert result.unsaved == {}
    assert (tmp_path / "model.pt").exists()


def test_file_that_the_store_refuses_comes_with_the_result(data, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_ELASTIC_SAVE_TIMEOUT", "0")
    training = make_training(data, tmp_path / "refused", epochs=1)
    result = result_of(replace(training, store=Busy(training.store, 1 << 30)))
    alone(make_training(data, tmp_path / "written", epochs=1))
    assert not (tmp_path / "refused" / "model.pt").exists()
    assert (tmp_path / "refused" / "history.json").exists()
    assert list(result.unsaved) == ["model.pt"]
    expected = serialization.loads((tmp_path / "written" / "model.pt").read_bytes())
    for name, value in serialization.loads(result.unsaved["model.pt"]).items():
        assert torch.equal(value, expected[name])


def test_invalid_save_timeout_is_refused_before_the_first_step(data, tmp_path, monkeypatch):
    monkeypatch.setenv("SPARK_ELASTIC_SAVE_TIMEOUT", "5m")
    called = []
    training = make_training(data, tmp_path, callbacks=[LambdaCallback(on_batch_begin=called.append)])
    with pytest.raises(InvalidSettingsError, match="must be a number of seconds"):
        result_of(training)
    assert called == []


@pytest.mark.parametrize("split", ["train", "validation"])
def test_kept_error_of_a_step_does_not_keep_the_reader_alive(split, data, tmp_path, monkeypatch):
    begun = []

    def fail(*_, **__):
        raise ValueError("kept")

    def epoch(reader, *args, **options):
        begun.append(read(reader, *args, **options))
        return begun[-1]

    read = BatchReader.epoch
    monkeypatch.setattr(BatchReader, "epoch", epoch)
    event = {"callbacks": [LambdaCallback(on_batch_end=fail)]}
    if split == "validation":
        monkeypatch.setattr(trainers, "allreduce_", fail)
        event = {}
    with pytest.raises(ValueError, match="kept") as kept:
        alone(make_training(data, tmp_path, **event))
    assert kept.tb is not None
    assert [inspect.getgeneratorstate(each) for each in begun] == [inspect.GEN_CLOSED] * (1 + (split == "validation"))


def test_rows_are_loaded_before_the_worker_joins_the_world(data, tmp_path, monkeypatch):
    order = []
    monkeypatch.setattr(LocalSource, "preload", lambda self, *stopping: order.append("rows"))
    monkeypatch.setattr(trainers.Trainer, "run_in_world", lambda self: order.append("joined"))
    alone(make_training(data, tmp_path))
    assert order == ["rows", "joined"]


def test_a_scheduler_may_be_a_class(data, tmp_path):
    scheduler = torch.optim.lr_scheduler.ConstantLR
    result = alone(make_training(data, tmp_path, lr_scheduler=scheduler))
    assert [row["lr"] for row in result["history"]] == pytest.approx([0.1 / 3] * 3)


def test_tensors_of_a_loss_move_to_the_device(data, tmp_path):
    loss = torch.nn.CrossEntropyLoss(torch.ones(3))
    objective_of(make_training(data, tmp_path, loss=loss), torch.device("meta"))
    assert loss.weight.is_meta


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


def test_nan_weight_after_the_last_step_means_no_model(data, tmp_path):
    result = alone(make_training(data, tmp_path, loss=NanGradient(STEPS)))
    assert result["diverged"] == {"step": STEPS - 1, "epoch": EPOCHS - 1, "loss": None}
    assert not (tmp_path / MODEL_FILE).exists()


def test_weights_that_are_no_numbers_are_not_written_to_a_checkpoint(data, tmp_path):
    result = alone(make_training(data, tmp_path, loss=NanGradient(2 * STEPS // EPOCHS)))
    assert (result["diverged"]["step"], len(result["history"])) == (2 * STEPS // EPOCHS, 2)
    latest = Checkpoints(Store.create(tmp_path).sub(CHECKPOINTS)).latest()
    assert latest is not None
    assert latest.step == STEPS // EPOCHS, "that of the second epoch would have held weights that are NaN"


class NanGradient:
    """A finite loss whose gradient is NaN in the `count`-th step."""

    def __init__(self, count):
        self.count, self.calls = count, 0

    def __call__(self, output, label):
        loss = torch.nn.functional.cross_entropy(output, label)
        self.calls += torch.is_grad_enabled()
        return loss + torch.sqrt(output.sum() * 0) if self.calls == self.count else loss


def test_allowed_nan_loss_is_logged_once(data, tmp_path, caplog):
    loss = lambda output, label: output.mean() * float("nan")  # noqa: E731
    assert alone(make_training(data, tmp_path, loss=loss, allow_nan_loss=True))["diverged"] is None
    assert [record.getMessage() for record in caplog.records if "is NaN" in record.getMessage()] == [
        "the loss of epoch 1 is NaN; the training continues because allow_nan_loss is set"
    ]


def test_a_scheduler_that_was_made_for_the_optimizer_is_the_same_as_a_function_that_makes_it(data, tmp_path):
    alone(make_training(data, tmp_path / "function", lr_scheduler=trainings.halved_every_epoch))
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    scheduler = trainings.halved_every_epoch(optimizer)
    result = alone(make_training(data, tmp_path / "instance", model=net, optimizer=optimizer, lr_scheduler=scheduler))
    assert [row["lr"] for row in result["history"]] == [0.1, 0.05, 0.025]
    assert trainings.weights(tmp_path / "instance") == trainings.weights(tmp_path / "function")


def test_a_model_can_be_trained_again_in_the_same_process(data, tmp_path):
    net = make_net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first = alone(make_training(data, tmp_path / "first", model=net, optimizer=optimizer))
    second = alone(make_training(data, tmp_path / "second", model=net, optimizer=optimizer))
    assert second["history"][0]["loss"] < first["history"][-1]["loss"]


def test_events_come_in_order_and_once_each(data, tmp_path):
    events = []
    names = ["fit_begin", "epoch_begin", "batch_end", "validation_end", "epoch_end", "fit_end"]
    callback = LambdaCallback(**{f"on_{name}": lambda *_, name=name: events.append(name) for name in names})
    alone(make_training(data, tmp_path, callbacks=[callback]))
    an_epoch = ["epoch_begin", *["batch_end"] * 13, "validation_end", "epoch_end"]
    assert events == ["fit_begin", *an_epoch * 3, "fit_end"]


def test_callbacks_see_the_progress(data, tmp_path):
    seen = []

    def look(run, logs):
        seen.append((run.epoch, run.epochs, run.step, len(run.history), run.rank, run.size, logs["steps"]))

    alone(make_training(data, tmp_path, callbacks=[LambdaCallback(on_epoch_end=look)]))
    assert seen == [(epoch, 3, 13 * (epoch + 1), epoch, 0, 1, 13 * (epoch + 1)) for epoch in range(3)]


@pytest.mark.parametrize(("verbose", "lines"), [(0, 0), (1, 3), (2, 6)])
def test_rank_0_prints_according_to_verbose(verbose, lines, data, tmp_path, capsys):
    alone(make_training(data, tmp_path, verbose=verbose))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == lines
    assert Counter("val_accuracy" in line for line in printed)[True] == min(lines, 3)


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
    before = net[0].weight.clone()
    result = alone(make_training(data, tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)))
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(state["0.weight"], before)
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


@pytest.mark.parametrize("threads", [1, 2])
def test_the_number_of_threads_can_be_set(threads, data, tmp_path):
    seen = set()
    look = LambdaCallback(on_batch_end=lambda run: seen.add(torch.get_num_threads()))
    before = torch.get_num_threads()
    alone(make_training(data, tmp_path, callbacks=[look], num_threads=threads, epochs=1))
    torch.set_num_threads(before)
    assert seen == {threads}


def test_workers_of_a_host_share_its_cores():
    assert [threads_for(None, 8, workers) for workers in (1, 2, 3, 8, 20)] == [8, 4, 2, 1, 1]
    assert threads_for(3, 8, 8) == 3


@pytest.mark.parametrize(
    ("text", "most"), [("150000 100000", 2), ("10000 100000", 1), ("max 100000", None), ("", None)]
)
def test_a_container_may_have_fewer_cores_than_the_host(text, most, tmp_path):
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    without = host_cores(tmp_path / "no such file")
    assert host_cores(quota) == (without if most is None else min(without, most))
