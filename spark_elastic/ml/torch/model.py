"""ElasticTorchModel: a trained PyTorch module as a Spark ML Transformer."""

from __future__ import annotations

import itertools
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from spark_elastic.collective.gpu.devices import choose_device, device_info
from spark_elastic.data.store import Store
from spark_elastic.errors import DataError, InvalidSettingsError
from spark_elastic.ml import params as to
from spark_elastic.ml.fitted import Fitted
from spark_elastic.ml.model import ElasticModel
from spark_elastic.ml.params import ElasticParams, setting
from spark_elastic.ml.persistence import ElasticReader
from spark_elastic.ml.saved_stage import Codec, SavedParts
from spark_elastic.ml.serving import ROWS, Predictor, gpu_of_task
from spark_elastic.ml.torch import saved_model, serialization
from spark_elastic.ml.torch.lightning import prediction_call
from spark_elastic.ml.torch.model_function import ModelFunction
from spark_elastic.ml.torch.objective import full, outputs_of
from spark_elastic.ml.torch.transformers import NamedInputs
from spark_elastic.runs.trust import trusted_files

log = logging.getLogger("spark_elastic.ml")

_ROWS_ON_CPU = 512
"""A row of an MLP with 256 units takes 1.7 µs of a core in batches of 512, and 3.0 µs in batches of 4,096, whose values
leave the core's second-level cache between two layers."""
_T = TypeVar("_T", bound="ElasticTorchModel")


class HalfPrecision(ElasticParams):
    """A setting of the output that PyTorch alone has."""

    transform_amp, getTransformAmp, setTransformAmp = setting(
        "half precision in transform, by torch.autocast: 'bf16' or 'fp16'. Default: none.",
        to.one_of("bf16", "fp16"),
    )


class ElasticTorchModel(HalfPrecision, ElasticModel):
    """The result of `ElasticTorchEstimator.fit`: `transform` appends the outputs of the trained module.

    `module` is the trained `torch.nn.Module`; `history` and `events` are as of `ElasticModel`.
    """

    _made_by: ModelFunction | None = None  # the function that has made the module, if one was given

    @property
    def module(self) -> torch.nn.Module:
        """The trained module, on the CPU, in eval mode. Not a copy: `predict` runs where you move it to."""
        self._facts_of_fit()  # raises if there is none
        return self._native  # type: ignore[no-any-return]

    @classmethod
    def load(cls: type[_T], path: str, *, trusted: bool = False, module: torch.nn.Module | None = None) -> _T:
        """Load a model that was saved at `path`.

        Args:
            path: the path that `save` was given.
            trusted: run code that the files name; needed for modules of your own classes.
            module: a module of the same architecture, which is given the saved weights. The saved architecture is then
                not read, so no trust is needed.

        Raises:
            CheckpointError: the path holds no such model, or a damaged one, or one that needs trust.
        """
        instead = {} if module is None else {saved_model.ARCHITECTURE: module}
        return ElasticReader(cls, trusted, **instead).load(path)

    def save_pretrained(self, path: str | os.PathLike[str]) -> None:
        """Write the module as its own `save_pretrained` does: of a PEFT model the adapter alone.

        Args:
            path: A folder of this machine, or a URI that `Store` opens.

        Raises:
            InvalidSettingsError: The module is no model of transformers or PEFT.
        """
        given: Any = self.module
        given = given.model if isinstance(given, NamedInputs) else given
        if not hasattr(given, "save_pretrained"):
            raise InvalidSettingsError(
                f"{type(given).__name__} has no save_pretrained, as models of transformers and PEFT have; use save"
            )
        store = Store.create(os.fspath(path))
        if store.is_local:
            given.save_pretrained(str(store.local_path()))
            return
        with tempfile.TemporaryDirectory(prefix="spark_elastic-save-") as folder:
            given.save_pretrained(folder)
            for file in Path(folder).rglob("*"):
                if file.is_file():
                    store.write_bytes(file.relative_to(folder).as_posix(), file.read_bytes())

    @classmethod
    def _codec(cls) -> Codec:
        return serialization

    def _attach(self, module: torch.nn.Module, fitted: Fitted, made_by: ModelFunction | None = None) -> None:
        self._native, self._fitted, self._made_by = module.eval(), fitted, made_by

    def _predictor(self) -> Callable[[], Predictor]:
        carried: Any = self.module
        if self._made_by is not None:
            carried = _Trained(self._made_by, serialization.weights_to_bytes(self.module))
        return partial(_load_predictor, carried, *self._computing())

    def _computing(self) -> tuple[Any, ...]:
        return *super()._computing(), self._given("transform_amp")

    def _own_predictor(self) -> Predictor:
        module = self.module.eval()
        tensor = next(itertools.chain(module.parameters(), module.buffers()), None)
        device = "cpu" if tensor is None else str(tensor.device)
        return TorchPredictor(module, device, self._given("transform_amp"))

    def _parts(self) -> SavedParts:
        return saved_model.parts_of(self.module, self._facts_of_fit().to_json(), self._made_by)

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        super()._restore(facts, files, objects)
        self._native = saved_model.native_of(facts, files, objects)
        given = objects[saved_model.ARCHITECTURE]
        self._made_by = given if isinstance(given, ModelFunction) else None


@dataclass(frozen=True)
class _Trained:
    """A trained module as it travels to executors if it cannot be pickled."""

    function: ModelFunction
    weights: bytes

    def __call__(self) -> torch.nn.Module:
        with trusted_files():  # sent by this application
            return serialization.trained_copy(self.function, self.weights)


def _load_predictor(carried: Any, transform_device: str, threads: int, amp: str | None) -> Predictor:
    torch.set_num_threads(threads)
    module = carried() if isinstance(carried, _Trained) else carried
    try:
        device = choose_device(transform_device, device_info(), gpu_of_task).device
        return TorchPredictor(module.to(device).eval(), device, amp)
    except (RuntimeError, AssertionError, InvalidSettingsError) as error:
        if transform_device == "auto":
            log.warning("transform computes on the CPU, because the GPU cannot be used: %s", error)
            return TorchPredictor(module.to("cpu").eval(), "cpu", amp)
        raise InvalidSettingsError(f"{transform_device=!r} cannot be used on this executor: {error}") from error


class TorchPredictor:
    """Calls a module with arrays by name and returns its outputs, tensors as arrays."""

    def __init__(self, module: torch.nn.Module, device: str, amp: str | None = None) -> None:
        self._call = prediction_call(module)
        self._device = device
        kind, dtype = torch.device(device).type, torch.float16 if amp == "fp16" else torch.bfloat16
        self._precision = nullcontext if amp is None else partial(torch.autocast, kind, dtype)
        self.rows = _ROWS_ON_CPU if device.startswith("cpu") else ROWS
        scripted = any(isinstance(each, torch.jit.ScriptModule) for each in module.modules())
        self._mode = torch.no_grad if scripted else torch.inference_mode  # which TorchScript does not bear

    def __call__(self, inputs: Mapping[str, Any]) -> list[Any]:
        try:
            with self._mode(), self._precision():
                returned = self._call(*(_tensor_of(value).to(self._device) for value in inputs.values()))
                outputs = map(full, outputs_of(returned))
                return [_as_numpy(each) if isinstance(each, torch.Tensor) else each for each in outputs]
        except torch.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None


def _tensor_of(value: Any) -> torch.Tensor:
    """Return an array as a tensor, without a copy if the array is writable."""
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    raise DataError(f"the model takes arrays, not {type(value).__name__}; convert the values to arrays in inference_fn")


def _as_numpy(tensor: torch.Tensor) -> Any:
    return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().cpu().numpy()
