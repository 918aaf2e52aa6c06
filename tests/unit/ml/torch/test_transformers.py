"""Models of transformers, from configurations, in an estimator: their losses as sums, and their outputs."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spark_elastic import ElasticTorchEstimator, load_module
from spark_elastic.data.dataset import pack
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml.torch.model_step import TorchBatch
from spark_elastic.ml.torch.transformers import settings_of
from spark_elastic.wire.pickling import dumps
from tests.unit.ml.torch.estimators import estimator, transformers_estimator, weights_of

tr = pytest.importorskip("transformers")

SMALL = {
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 30,
    "max_position_embeddings": 16,
}
GPT = {"vocab_size": 30, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "pad_token_id": 0}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
T5 = {"vocab_size": 30, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2}
NAMES = {"feature_cols": ["input_ids", "attention_mask"], "label_cols": ["labels"]}

torch.manual_seed(0)
IDS = torch.randint(3, 30, (6, 8))
TOKENS = torch.randint(0, 3, (6, 8))
TOKENS[0, :5] = TOKENS[1, 3:] = TOKENS[2] = TOKENS[3, 0] = -100
CLASSES = torch.tensor([0, 1, 1, 0, 1, 0])


def batch_of(labels: tuple[torch.Tensor, ...], rows: slice) -> TorchBatch:
    ids = IDS[rows]
    return TorchBatch((ids, torch.ones_like(ids)), tuple(label[rows] for label in labels), None, len(ids), {})


@pytest.mark.parametrize(
    ("make", "labels", "count"),
    [
        (lambda: tr.BertForSequenceClassification(tr.BertConfig(**SMALL, num_labels=3)), (CLASSES,), 6),
        (lambda: tr.BertForSequenceClassification(tr.BertConfig(**SMALL, num_labels=1)), (torch.rand(6),), 6),
        (lambda: tr.BertForTokenClassification(tr.BertConfig(**SMALL, num_labels=3)), (TOKENS,), 29 / 8),
        (lambda: tr.BertForMaskedLM(tr.BertConfig(**SMALL)), (TOKENS,), 29 / 8),
        (lambda: tr.BertForNextSentencePrediction(tr.BertConfig(**SMALL)), (CLASSES,), 6),
        (lambda: tr.BertForQuestionAnswering(tr.BertConfig(**SMALL)), (CLASSES, CLASSES + 1), 6),
        (lambda: tr.GPT2LMHeadModel(tr.GPT2Config(**GPT)), (TOKENS,), 26 / 7),
        (lambda: tr.LlamaForCausalLM(tr.LlamaConfig(**SMALL)), (TOKENS,), 26 / 7),
        (lambda: tr.T5ForConditionalGeneration(tr.T5Config(**T5, decoder_start_token_id=0)), (TOKENS,), 29 / 8),
    ],
)
def test_the_loss_of_all_rows_is_the_sum_over_any_parts_of_them(make: Any, labels: Any, count: int) -> None:
    """A row without labels is a part of its own, and parts have different numbers of labels."""
    names = ["labels"] if len(labels) == 1 else ["start_positions", "end_positions"]
    settings = settings_of(make().eval(), {**NAMES, "label_cols": names})
    step, model = settings["train_fn"], settings["model"]
    whole = step(model, batch_of(labels, slice(0, 6)))
    parts = [step(model, batch_of(labels, slice(*edges))) for edges in ((0, 2), (2, 3), (3, 6))]
    assert sum(part.counts[0] for part in parts) == pytest.approx(whole.counts[0]) == count
    total = sum(float(part.sums[0].detach()) for part in parts)
    assert total == pytest.approx(float(whole.sums[0].detach()), rel=1e-6)
    assert len(whole.outputs) == len(labels)


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"num_labels": 3}, "<i8"),
        ({"num_labels": 1}, "<f4"),
        ({"num_labels": 3, "problem_type": "multi_label_classification"}, "<f4"),
    ],
)
def test_labels_of_sequences_have_the_type_that_the_loss_needs(config: dict[str, Any], dtype: str) -> None:
    settings = settings_of(tr.BertForSequenceClassification(tr.BertConfig(**SMALL, **config)), NAMES)
    assert settings["train_fn"].label_dtype == dtype


class Own(nn.Module):
    """A model of one's own that returns `.loss`."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        out = self.line(x).squeeze(1)
        return SimpleNamespace(loss=None if y is None else (out - y).square().mean(), prediction=out)


def test_a_model_of_ones_own_is_trained_and_its_other_outputs_are_those_of_transform(tmp_path: Path) -> None:
    x = np.random.default_rng(1).normal(size=(64, 2)).astype(np.float32)
    dataset = pack({"features_0": x, "label_0": x.sum(1)}, tmp_path / "set")
    model = Own()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    estimator = transformers_estimator(model, feature_cols="x", label_cols="y", epochs=20, optimizer=optimizer)
    fitted = estimator.from_dataset_path(dataset)
    assert fitted.history["loss"][-1] < 1e-3
    assert fitted.module.model.line.weight.tolist()[0] == pytest.approx([1.0, 1.0], abs=0.05)
    (out,) = fitted._predictor()()({"features_0": x[:4]})
    assert out == pytest.approx(x[:4].sum(1), abs=0.2)


def test_rows_without_labels_that_count_add_nothing_although_their_mean_is_nan(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            out = self.line(x)
            if y is None:
                return SimpleNamespace(loss=None, logits=out)
            counted = y != -100
            each = nn.functional.cross_entropy(out, y.clamp(min=0), reduction="none")
            return SimpleNamespace(loss=(each * counted).sum() / counted.sum(), logits=out)

    x = np.random.default_rng(1).normal(size=(64, 8)).astype(np.float32)
    labels = np.abs(x).argmax(1) % 3
    labels[16:40] = -100  # a whole batch, and one part of another
    dataset = pack({"features_0": x, "label_0": labels}, tmp_path / "set")
    torch.manual_seed(1)
    model = Masked()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    made = [
        transformers_estimator(
            model, feature_cols="x", label_cols="y", optimizer=optimizer, shuffle=False, accumulation_steps=parts
        ).from_dataset_path(dataset)
        for parts in (1, 2)
    ]
    assert weights_of(made[0]) == pytest.approx(weights_of(made[1]), abs=1e-6)
    assert made[0].history["loss"] == pytest.approx(made[1].history["loss"], rel=1e-6)


def test_accumulation_changes_no_result_of_unevenly_labelled_rows(tmp_path: Path) -> None:
    tensors = {"features_0": IDS.numpy(), "features_1": np.ones((6, 8), np.int64), "label_0": TOKENS.numpy()}
    dataset = pack(tensors, tmp_path / "set")
    torch.manual_seed(1)
    config = tr.BertConfig(**SMALL, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    model = tr.BertForTokenClassification(config)
    made = [
        transformers_estimator(model, **NAMES, accumulation_steps=count).from_dataset_path(dataset) for count in (1, 5)
    ]
    assert weights_of(made[0]) == pytest.approx(weights_of(made[1]), abs=1e-6)
    assert made[0].history["loss"] == pytest.approx(made[1].history["loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("model", "changes", "words"),
    [
        (lambda: 3, {}, "must return a torch.nn.Module; called without arguments, it returned 3"),
        (Own.forward, {}, "model=Own.forward, which is called without arguments, raised TypeError: .*missing"),
        ("bert", {}, "needs a torch.nn.Module, or a function .*, not 'bert'"),
        (Own(), {"feature_cols": [["x", "z"]]}, "feature_cols must be names of columns"),
        (Own(), {"label_cols": None}, "label_cols must be names of columns"),
        (Own(), {"loss": nn.MSELoss()}, "loss is set, but the model decides it"),
        (Own(), {"sample_weight_col": "w"}, "sample_weight_col is set"),
        (Own(), {"train_fn": print}, "train_fn follows from"),
    ],
)
def test_settings_that_do_not_go_with_such_a_model_are_refused(model: Any, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettingsError, match=words):
        ElasticTorchEstimator.from_transformers(model, **{"feature_cols": ["x"], "label_cols": ["y"], **changes})


def test_a_model_without_a_loss_is_an_error_that_names_the_labels(tmp_path: Path) -> None:
    dataset = pack({"features_0": np.zeros((8, 2), np.float32), "label_0": np.zeros(8, np.float32)}, tmp_path / "set")

    class Lossless(Own):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
            return super().forward(x)

    estimator = transformers_estimator(Lossless(), feature_cols="x", label_cols="y")
    with pytest.raises(DataError, match=r"Lossless must return an object whose .loss is one number, not None.*are y"):
        estimator.from_dataset_path(dataset)


SPEECH = {
    **{name: value for name, value in SMALL.items() if name not in ("vocab_size", "max_position_embeddings")},
    "conv_dim": (8,),
    "conv_kernel": (10,),
    "conv_stride": (5,),
    "num_feat_extract_layers": 1,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 8,
    "num_labels": 2,
    **{f"{name}_dropout": 0.0 for name in ("hidden", "attention", "activation", "feat_proj", "final")},
    "layerdrop": 0.0,
    "apply_spec_augment": False,
}


def speech_model(kind: str) -> Any:
    torch.manual_seed(5)
    return getattr(tr, f"{kind}ForSequenceClassification")(getattr(tr, f"{kind}Config")(**SPEECH))


@pytest.mark.parametrize("kind", ["Hubert", "Wav2Vec2", "Wav2Vec2 of a function"])
def test_speech_models_with_parametrized_convolutions_are_trained_as_by_plain_torch(kind: str, tmp_path: Path) -> None:
    name, _, by_function = kind.partition(" ")
    sounds = np.random.default_rng(1).normal(size=(32, 100)).astype("f4")
    data = pack({"features_0": sounds, "label_0": np.arange(32) % 2}, tmp_path / "set")
    changes = {"optimizer": lambda params: torch.optim.SGD(params, lr=0.1), "shuffle": False, "epochs": 2}
    if by_function:
        loss = nn.CrossEntropyLoss()  # of the logits, which the result begins with
        made = estimator(model=lambda shapes: speech_model(name), loss=loss, **changes)
    else:
        made = transformers_estimator(speech_model(name), feature_cols="input_values", label_cols="labels", **changes)
    fitted = made.from_dataset_path(data)
    net = speech_model(name).train()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for start in (0, 16, 0, 16):
        optimizer.zero_grad()
        rows = slice(start, start + 16)
        net(input_values=torch.from_numpy(sounds[rows]), labels=torch.arange(32)[rows] % 2).loss.backward()
        optimizer.step()
    expected = net.eval().state_dict()
    assert any("parametrizations" in key for key in expected)
    fitted.save(str(tmp_path / "model"))
    loaded = load_module(tmp_path / "model", trusted=True)
    for module in (fitted.module, loaded):
        for key, value in (module if by_function else module.model).state_dict().items():
            torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    (output, *_) = pickle.loads(dumps(fitted._predictor()))()({"features_0": sounds})  # as on executors
    torch.testing.assert_close(torch.from_numpy(output), net(torch.from_numpy(sounds)).logits, rtol=1e-4, atol=1e-5)
