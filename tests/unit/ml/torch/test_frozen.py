"""Parameters that are not trained: never reduced, sent or written while they have the values that were given."""

from __future__ import annotations

import os
import pickle
import threading
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator
from spark_elastic.collective.group import Group
from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.ml.callbacks import BestCheckpoint, Callback, LambdaCallback
from spark_elastic.ml.torch.dry_run import dry_run
from spark_elastic.ml.torch.engine import TENSORS
from spark_elastic.ml.torch.model import ElasticTorchModel
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.spec import TorchTraining
from spark_elastic.ml.torch.transformers import settings_of
from spark_elastic.ml.training.spec import CheckpointPlan
from spark_elastic.runs.tensors import from_bytes
from spark_elastic.wire.pickling import dumps
from tests.unit.ml.in_worlds import checkpoints_in
from tests.unit.ml.torch.estimators import estimator, make_net, settings, transformers_estimator, weights_of
from tests.unit.ml.torch.test_model_functions import saved_and_loaded
from tests.unit.ml.torch.trainings import make_sets, make_training, outcome
from tests.unit.world_link import die, link, tell
from tests.unit.worlds import WorldDriver, together

NAMES = {"feature_cols": ["input_ids", "attention_mask"], "label_cols": ["labels"]}
ROWS, BATCH, EPOCHS, VOCABULARY = 72, 12, 4, 5000
STEPS = EPOCHS * ROWS // BATCH


def base() -> nn.Module:
    tr = pytest.importorskip("transformers")
    torch.manual_seed(5)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return tr.BertForSequenceClassification(tr.BertConfig(**sizes, **none, vocab_size=VOCABULARY)).double()


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(base(), peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query", "value"]))


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


def make_texts(folder: Path) -> Dataset:
    ids = np.random.default_rng(1).integers(1, VOCABULARY, (ROWS, 6))
    return pack({"features_0": ids, "features_1": np.ones_like(ids), "label_0": ids[:, 0] % 2}, folder)


def trained_by_torch(texts: Dataset) -> nn.Module:
    """Return the adapted model as plain torch trains it in one process."""
    net = adapted().train()
    optimizer = adam(net.parameters())
    with texts.reader("train", batch_size=BATCH, shuffle=False) as reader:
        for epoch in range(EPOCHS):
            for batch in reader.epoch(epoch):
                ids, labels = (torch.from_numpy(batch[name].copy()) for name in ("features_0", "label_0"))
                optimizer.zero_grad()
                net(input_ids=ids, attention_mask=torch.ones_like(ids), labels=labels).loss.backward()
                optimizer.step()
    return net.eval()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_texts(tmp_path_factory.mktemp("texts"))


@pytest.fixture(scope="module")
def plain(texts: Dataset) -> nn.Module:
    return trained_by_torch(texts)


def assert_weights(found: Any, expected: nn.Module) -> None:
    wanted = expected.state_dict()
    torch.testing.assert_close(dict(found), {name: wanted[name] for name in found}, rtol=1e-9, atol=1e-9)


class WaitsForAnother(Callback):
    """Tells of its steps; the second worker dies after 7 of them, and the first then waits for the third."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_batch_end(self, run: Any) -> None:
        tell("step", run.step)
        if run.step == 7 and link().worker == 2:
            die()
        while run.size == 1 and not (self.folder / "3").exists():
            threading.Event().wait(0.01)
        if run.size == 1 and run.step < STEPS - 5:
            threading.Event().wait(0.05)


def in_worker(texts: Dataset, folder: Path) -> dict[str, Any]:
    """Train the adapted model; count the bytes of each kind of collective."""
    sent: Counter[str] = Counter()

    def counted(kind: str) -> None:
        launch = getattr(Group, kind)

        def launched(self: Group, tensor: torch.Tensor, op: Any, *fill: Any) -> Any:
            filled = bool(fill) and kind == "allreduce"
            sent["gradients" if filled else f"{kind} {tensor.dtype}"] += tensor.nbytes
            sent["buckets"] += filled
            return launch(self, tensor, op, *fill)

        setattr(Group, kind, launched)

    for kind in ("allreduce", "broadcast"):
        counted(kind)
    made = settings_of(adapted, NAMES)
    training = TorchTraining(
        dataset=texts,
        store=Store.create(folder),
        model=ModelFunction(made["model"]),
        train_fn=made["train_fn"],
        optimizer=adam,
        callbacks=[WaitsForAnother(folder)],
        batch_size=BATCH,
        epochs=EPOCHS,
        shuffle=False,
        checkpoints=CheckpointPlan(every_epochs=1),
        verbose=0,
    )
    (folder / str(link().worker)).touch()
    return {**outcome(training), "sent": dict(sent)}


def test_lora_reduces_sends_and_writes_what_trains_and_outlives_a_kill(
    texts: Dataset, plain: nn.Module, tmp_path: Path
) -> None:
    trained = {name: each for name, each in plain.named_parameters() if each.requires_grad}
    nbytes = sum(each.nbytes for each in trained.values())
    with WorldDriver(start_with=2) as driver:
        driver.start(in_worker, texts, tmp_path, count=2)
        driver.wait(lambda: driver.told("step"))
        driver.start(in_worker, texts, tmp_path)
        results = driver.results(2)
    for result in results:
        sent = result["sent"]
        assert result["steps"] == STEPS
        # with each gradient a number that says how many workers had one; and the sums of the losses, times, and flags
        assert nbytes <= sent["gradients"] / sent["buckets"] <= nbytes + 8 * (len(trained) + 26)
        del sent["buckets"]
        assert sum(sent.values()) < sum(each.nbytes for each in plain.parameters()) / 5
    found = torch.load(tmp_path / "model.pt", weights_only=True)
    assert_weights({name.removeprefix("model."): each for name, each in found.items()}, plain)
    written = checkpoints_in(tmp_path).load(checkpoints_in(tmp_path).latest().name).files[TENSORS]
    assert from_bytes(written)["model"].keys() == found.keys() == {f"model.{name}" for name in trained}
    assert len(written) < 40_000


# --- in this process ----------------------------------------------------------------------------------


def fitted_here(model: Any, texts: Dataset, **changes: Any) -> ElasticTorchModel:
    chosen = {"optimizer": adam, "batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, **changes}
    return transformers_estimator(model, **NAMES, **chosen).from_dataset_path(texts)


def with_gradient_checkpointing() -> nn.Module:
    net = adapted()
    net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    net.enable_input_require_grads()
    return net


@pytest.mark.parametrize("model", [adapted, None, with_gradient_checkpointing])
def test_adapter_is_saved_alone_for_peft_and_whole_for_spark(
    model: Any, texts: Dataset, plain: nn.Module, tmp_path: Path
) -> None:
    fitted = fitted_here(adapted if model is None else model(), texts)
    assert_weights(fitted.module.model.state_dict(), plain)
    fitted.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < 5_000
    again = pytest.importorskip("peft").PeftModel.from_pretrained(base(), tmp_path / "adapter").eval()
    ids = torch.arange(1, 13).reshape(2, 6)
    inputs = {"features_0": ids.numpy(), "features_1": np.ones((2, 6), np.int64)}
    expected = again(input_ids=ids, attention_mask=torch.ones_like(ids)).logits.detach().numpy()
    for model in (fitted, saved_and_loaded(fitted)):
        (output,) = pickle.loads(dumps(model._predictor()))()(inputs)
        assert output == pytest.approx(expected, abs=1e-12)


def test_model_without_adapter_is_saved_whole_also_to_a_uri(texts: Dataset, tmp_path: Path) -> None:
    net = base()
    fitted = fitted_here(net, texts, epochs=1)
    fitted.save_pretrained(tmp_path / "whole")
    assert_weights(fitted.module.model.state_dict(), type(net).from_pretrained(tmp_path / "whole").double())
    uri = f"memory://{tmp_path.name}"
    fitted.save_pretrained(uri)
    names = {each.name for each in (tmp_path / "whole").iterdir()}
    assert {each.path for each in Store.create(uri).list()} == names >= {"config.json", "model.safetensors"}


def test_module_that_has_no_save_pretrained_is_named(dataset: Dataset, tmp_path: Path) -> None:
    with pytest.raises(InvalidSettingsError, match="Sequential has no save_pretrained"):
        estimator(epochs=1).from_dataset_path(dataset).save_pretrained(tmp_path)


def test_head_that_peft_replaces_may_be_another_when_a_run_is_resumed(texts: Dataset, tmp_path: Path) -> None:
    def made(seed: int) -> nn.Module:
        net = adapted()
        torch.manual_seed(seed)
        head = net.base_model.model.classifier
        for layer in (head.original_module, head.modules_to_save["default"]):
            nn.init.normal_(layer.weight)
        return net

    runs = {"checkpoint_dir": tmp_path, "run_id": "a"}
    fitted_here(made(1), texts, **runs, epochs=1)
    resumed = fitted_here(made(2), texts, **runs, epochs=2).module.state_dict()
    whole = fitted_here(made(1), texts, epochs=2).module.state_dict()
    differing = [name for name, value in whole.items() if not torch.equal(value, resumed[name])]
    assert [name.partition("classifier.")[2] for name in differing] == ["original_module.weight"]


# --- of any module ------------------------------------------------------------------------------------


def head_alone(scale: float = 1.0) -> nn.Module:
    """A net whose first layers are frozen, but for the running means of the second."""
    net = make_net()
    net.insert(1, nn.BatchNorm1d(8))
    net[:2].requires_grad_(False)
    net[0].weight.data.mul_(scale)
    return net


def follows(run: Any) -> None:
    """Change a frozen weight by hand, as a target network is; `.data` hides it from torch's counters."""
    run.model[0].weight.data.mul_(0.9)


@pytest.mark.parametrize("changed", [False, True])
def test_run_with_frozen_weights_is_resumed_with_them(changed: bool, dataset: Dataset, tmp_path: Path) -> None:
    callbacks = [BestCheckpoint("loss"), *([LambdaCallback(on_batch_end=follows)] if changed else [])]
    runs = {"checkpoint_dir": tmp_path, "run_id": "a", "callbacks": callbacks}
    estimator(model=head_alone(), **runs, epochs=1).from_dataset_path(dataset)
    (file,) = tmp_path.glob("a/checkpoints/*/state.pt")
    written = from_bytes(file.read_bytes())
    buffers = {f"1.{name}" for name, _ in nn.BatchNorm1d(8).named_buffers()}
    assert written["model"].keys() == {"3.weight", "3.bias", *buffers, *(["0.weight"] if changed else [])}
    resumed = estimator(model=head_alone(), **runs, epochs=3).from_dataset_path(dataset)
    whole = estimator(model=head_alone(), callbacks=callbacks, epochs=3).from_dataset_path(dataset)
    assert weights_of(resumed) == weights_of(whole)
    assert torch.equal(resumed.module[0].weight, head_alone()[0].weight) != changed


def test_resuming_with_other_frozen_weights_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    runs = {"checkpoint_dir": tmp_path, "run_id": "a"}
    estimator(model=head_alone(), **runs, epochs=1).from_dataset_path(dataset)
    with pytest.raises(CheckpointError, match=r"optimizer: frozen weights .* began with: 0\.weight\. "):
        estimator(model=head_alone(2.0), **runs, epochs=2).from_dataset_path(dataset)


def test_function_that_makes_other_frozen_weights_each_time_is_refused(dataset: Dataset) -> None:
    made = estimator(model=lambda: head_alone(np.random.default_rng().random()))
    with pytest.raises(InvalidSettingsError, match=r"frozen weights \(requires_grad=False\) are not .*: 0\.weight\. "):
        made.from_dataset_path(dataset)


def test_frozen_weights_that_a_worker_computes_otherwise_are_those_of_the_result(dataset: Dataset) -> None:
    driver = os.getpid()

    def make() -> nn.Module:  # as of an SVD with another number of threads, or of random numbers on another CPU
        return head_alone(1.0 if os.getpid() == driver else 1.0 + 1e-6)

    found = ElasticTorchEstimator(**settings(model=make)).from_dataset_path(dataset)
    assert weights_of(found) == weights_of(estimator(model=lambda: head_alone(1.0 + 1e-6)).from_dataset_path(dataset))


class Odd(nn.Module):
    """A net with a frozen factor that is expanded from one number."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.factor = make_net(), nn.Parameter(torch.tensor([2.0]).expand(3), requires_grad=False)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.net(features) * self.factor


def test_frozen_parameter_that_is_expanded_keeps_its_values(dataset: Dataset) -> None:
    assert estimator(model=Odd()).from_dataset_path(dataset).module.factor.tolist() == [2.0] * 3


def test_frozen_parameter_that_is_sparse_is_refused(dataset: Dataset) -> None:
    net = make_net()
    net[1].register_parameter("table", nn.Parameter(torch.eye(3).to_sparse(), requires_grad=False))
    with pytest.raises(InvalidSettingsError, match="not defined for sparse tensors"):
        estimator(model=net).from_dataset_path(dataset)


# --- that forward changes -----------------------------------------------------------------------------


class Averaging(nn.Module):
    """A layer and its momentum encoder, which begins with equal weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 3).double()
        self.slow = nn.Parameter(self.layer.weight.detach().clone(), requires_grad=False)
        self.calls = 0

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
            self.slow.data = self.slow.data * 0.5 + self.layer.weight.data * 0.5  # as published code writes it
            if self.calls == 7 and link().worker == 2:
                die()
        return self.layer(features) - features @ self.slow.T


def average(data: Path, folder: Path) -> dict[str, Any]:
    training = make_training(data, folder, model=Averaging(), optimizer=partial(torch.optim.SGD, lr=0.1))
    return outcome(replace(training, **dry_run(training, None).settings))


def test_momentum_encoder_moves_once_a_step_also_if_a_worker_is_lost(tmp_path: Path) -> None:
    data = make_sets(tmp_path / "sets")
    for name, count in (("alone", 1), ("pair", 2)):
        together(average, data, tmp_path / name, count=count, left=1)
    found, expected = (torch.load(tmp_path / name / "model.pt") for name in ("pair", "alone"))
    torch.testing.assert_close(dict(found), dict(expected), rtol=1e-9, atol=1e-9)


class Codebook(Averaging):
    """Its frozen weights follow the rows."""

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        self.slow.data += features.mean(0)
        return self.layer(features)


def test_forward_that_changes_frozen_weights_is_refused_if_exact_and_warned_of_by_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data, adams = make_sets(tmp_path / "sets"), {"optimizer": torch.optim.Adam}
    with pytest.raises(InvalidSettingsError, match="forward changes slow of the model, and with consistency='exact'"):
        dry_run(make_training(data, tmp_path, model=Averaging(), virtual_workers=2, **adams), None)
    for model, warned in ((Averaging(), False), (Codebook(), True)):
        assert dry_run(make_training(data, tmp_path, model=model, **adams), None).settings["moved"] == ["slow"]
        assert ("batch statistics of slow are not synchronised" in caplog.text) is warned
