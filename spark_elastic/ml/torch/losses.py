"""What a loss says about its labels and about predictions."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from spark_elastic.ml.preparation import FLOAT, INTEGER

_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.MultiMarginLoss)
_OF_CLASSES_FN = (F.cross_entropy, F.nll_loss, F.multi_margin_loss)
_OF_LOGITS = (nn.BCEWithLogitsLoss, nn.SoftMarginLoss)
_OF_LOGITS_FN = (F.binary_cross_entropy_with_logits, F.soft_margin_loss)
_OF_PROBABILITIES = (nn.BCELoss,)
_OF_PROBABILITIES_FN = (F.binary_cross_entropy,)
_OF_NUMBERS = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.PoissonNLLLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.KLDivLoss,
)
_OF_NUMBERS_FN = (
    F.mse_loss,
    F.l1_loss,
    F.smooth_l1_loss,
    F.huber_loss,
    F.poisson_nll_loss,
    F.multilabel_soft_margin_loss,
    F.kl_div,
)


def rule(loss: Any) -> str | None:
    """How the loss makes a prediction of an output; None: it does not say. See the setting `prediction`."""
    for name, classes, functions in (
        ("argmax", _OF_CLASSES, _OF_CLASSES_FN),
        ("binary_logit", _OF_LOGITS, _OF_LOGITS_FN),
        ("binary_probability", _OF_PROBABILITIES, _OF_PROBABILITIES_FN),
        ("value", _OF_NUMBERS, _OF_NUMBERS_FN),
    ):
        if isinstance(loss, classes) or any(loss is function for function in functions):
            return name
    return None


def label_dtype(loss: Any) -> str | None:
    """What a label that is one number has to be for this loss; None: whatever it is.

    Spark ML's own stages, such as StringIndexer, give class numbers as doubles, and users compare integers with
    numbers: both are told apart here, where it is known what they are for.
    """
    found = rule(loss)
    return None if found is None else INTEGER if found == "argmax" else FLOAT


def is_loss(value: Any) -> bool:
    return isinstance(value, torch.nn.Module) or (callable(value) and not isinstance(value, type))
