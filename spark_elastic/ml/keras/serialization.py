"""Keras objects as bytes, arrays and plain values, and back."""

from __future__ import annotations

import base64
import builtins
import contextlib
import dis
import inspect
import io
import json
import marshal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import keras
import numpy as np
import numpy.typing as npt
from keras.src.saving import saving_lib  # what calls it in `keras.saving` and `Model.save` takes paths only

from spark_elastic.errors import CheckpointError, NotPicklableError
from spark_elastic.keras.archives import check_self_contained
from spark_elastic.keras.backend import same_path
from spark_elastic.runs import trust

Array = npt.NDArray[Any]


_saving = threading.Lock()


def model_to_archive(model: Any) -> bytes:
    """Return architecture and weights of a model; raise Keras's own error for a class without a configuration."""
    archive = io.BytesIO()
    with _as_uncompiled(model):
        saving_lib.save_model(model, archive)
    return archive.getvalue()


def model_from_archive(file: bytes, custom_objects: Mapping[str, Any] | None = None, *, safe: bool = False) -> Any:
    """Load a model, not compiled; `safe` refuses Lambda layers, which are code, and unsafe versions of Keras."""
    if safe:
        trust.KERAS.check(keras.__version__)
    check_self_contained(file, custom_objects or {}, safe=safe)
    with io.BytesIO(file) as archive:  # in memory: a worker that is killed meanwhile leaves no file behind
        return saving_lib.load_model(archive, dict(custom_objects or {}), compile=False, safe_mode=safe)


def architecture(model: Any) -> Any:
    """Return the model's configuration; `archive_config` returns the same from an archive."""
    with _as_uncompiled(model):
        return keras.saving.serialize_keras_object(model)


@contextlib.contextmanager
def _as_uncompiled(model: Any) -> Iterator[None]:
    """Keep losses and metrics out of the archive. One thread at a time: the fits of a CrossValidator share a model."""
    with _saving, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of lambdas, which the caller handles
        compiled = [each for each in model._flatten_layers() if vars(each).get("compiled")]
        for each in compiled:
            vars(each)["compiled"] = False
        try:
            yield
        finally:
            for each in compiled:
                vars(each)["compiled"] = True


class Flags(NamedTuple):
    """What an archive leaves out of a built model: of its layers and variables, in their order."""

    policies: list[Any]  # the configuration of each layer's dtype policy, also of those within layers
    layers: list[bool]  # whether each layer is trainable; the same for the variables
    variables: list[bool]

    @classmethod
    def of(cls, model: Any) -> Flags:
        layers = list(model._flatten_layers())
        policies = [keras.dtype_policies.serialize(each.dtype_policy) for each in layers]
        return cls(policies, [each.trainable for each in layers], [each.trainable for each in model.variables])

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Create layers under the model's own policy, which layers within layers have by default."""
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(keras.dtype_policies.get(self.policies[0]))
        try:
            yield
        finally:
            keras.config.set_dtype_policy(before)

    def restore(self, model: Any) -> None:
        """Give the flags to a model of the same architecture; leave another one as it is, see `differences`."""
        layers, variables = list(model._flatten_layers()), model.variables
        if (len(layers), len(variables)) != (len(self.layers), len(self.variables)):
            return
        for layer, policy, trainable in zip(layers, self.policies, self.layers, strict=True):
            if keras.dtype_policies.serialize(layer.dtype_policy) != policy:
                layer.dtype_policy = keras.dtype_policies.get(policy)
            if layer.trainable != trainable:
                layer.trainable = trainable
        for variable, trainable in zip(variables, self.variables, strict=True):
            if variable.trainable != trainable:
                variable.trainable = trainable


_TYPES = "types.json"


def arrays_to_bytes(arrays: Mapping[str, Array]) -> bytes:
    """Return arrays as an .npz file; types that numpy has no name for (bfloat16) are stored as bytes and a name."""
    out, types, plain = io.BytesIO(), {}, {}
    for name, array in arrays.items():
        array = np.asarray(array)
        if array.dtype.kind == "V":
            types[name] = [array.dtype.name, list(array.shape)]
            array = np.frombuffer(array.tobytes(), np.uint8)
        plain[name] = array
    np.savez(out, **{_TYPES: np.frombuffer(json.dumps(types).encode(), np.uint8)}, **plain)  # type: ignore[arg-type]
    return out.getvalue()


def arrays_from_bytes(data: bytes) -> dict[str, Array]:
    """Load what `arrays_to_bytes` has written; raise CheckpointError if it is damaged or something else."""
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        types = json.loads(arrays.pop(_TYPES).tobytes())
        for name, (kind, shape) in types.items():
            import ml_dtypes  # installed with TensorFlow

            arrays[name] = arrays[name].view(np.dtype(getattr(ml_dtypes, kind))).reshape(shape)
    except Exception as error:  # zipfile, zlib and numpy raise errors of many classes at damaged bytes
        raise CheckpointError(f"not a file of arrays: {type(error).__name__}: {error}") from error
    return arrays


def weights_to_bytes(model: Any) -> bytes:
    """Return all weights of the model, including those that are not trained."""
    return arrays_to_bytes(named_values(model.weights))


def fill(model: Any, file: bytes) -> Any:
    """Load the weights of `weights_to_bytes` into a built model; raise CheckpointError if they do not fit."""
    try:
        assign(model.weights, arrays_from_bytes(file))
    except ValueError as error:
        raise CheckpointError(f"the saved weights do not fit {model.name}: {error}") from error
    return model


def named_values(variables: Sequence[Any], prefix: str = "") -> dict[str, Array]:
    """Copy the values of variables, by number and path, because paths alone need not be unique."""
    return {f"{prefix}{number}:{each.path}": each.numpy() for number, each in enumerate(variables)}


def assign(variables: Sequence[Any], values: Mapping[str, Array], prefix: str = "") -> None:
    """Assign what `named_values` returned to variables in the same order; raise ValueError if they are others."""
    found = [(name[len(prefix) :].partition(":")[2], each) for name, each in values.items() if name.startswith(prefix)]
    if len(found) != len(variables):
        raise ValueError(f"there are {len(found)} arrays for {len(variables)} variables")
    for (path, value), variable in zip(found, variables, strict=True):
        # the model's own name may differ
        same = same_path(path.rpartition("/")[2], variable.path.rpartition("/")[2])
        if tuple(value.shape) != tuple(variable.shape) or not same:
            raise ValueError(
                f"the saved values have {path} of shape {list(value.shape)} where {variable.path} of shape "
                f"{list(variable.shape)} is expected"
            )
    for (_, value), variable in zip(found, variables, strict=True):
        variable.assign(value)


_KEPT_BY_KERAS = ("name", "dtype", "trainable", "reduction")  # arguments that Keras itself writes into a configuration


def custom_names(value: Any, config: Any) -> list[str]:
    """Return the names in the configuration of `value` that are not Keras's own; a lambda is "<lambda>".

    To load the configuration, `custom_objects` must have these names, unless they are registered with Keras.
    """
    for name, each in _custom_parts(value):
        if isinstance(each, FunctionType) and is_builtin(name):
            raise NotPicklableError(
                f"the function {name} has the name of one of Keras's, which the model would get instead of it; give it "
                "another name"
            )
    for node in _mappings_in(config):
        if node.get("class_name") == "__lambda__":
            kept = node["config"]
            code = marshal.loads(base64.b64decode(kept["code"] if "code" in kept else kept["value"][0]))
            if used := dict.fromkeys(_globals_of(code)):
                raise NotPicklableError(
                    f"a lambda in {getattr(value, 'name', type(value).__name__)} uses {', '.join(used)}, and Keras "
                    "keeps of a lambda its code alone, without what its module has under these names; give a function "
                    "with a name (def)"
                )
    names = filter(None, map(_name, _mappings_in(config)))
    return [name for name in dict.fromkeys(names) if not is_builtin(name)]


def custom_objects_of(value: Any, names: Sequence[str], given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the classes and functions of these names, from `given`, from within `value`, or registered with Keras."""
    made = dict(given or {})
    missing = [name for name in names if name not in made]
    within = dict(_custom_parts(value)) if missing else {}
    for name in missing:
        found = within.get(name, keras.saving.get_registered_object(name))
        if found is not None:
            made[name] = found
    return made


def config_of(value: Any) -> Any:
    """Return Keras's configuration of an object, with what Keras leaves out: dtypes of losses, Huber's `delta`, ..."""
    config = keras.saving.serialize_keras_object(value)
    if type(value).__module__.partition(".")[0] != "keras":
        return config
    if isinstance(value, keras.losses.Loss) and value.dtype != keras.config.floatx():
        config["config"].setdefault("dtype", str(value.dtype))
    arguments = getattr(value, "_fn_kwargs", None)
    if isinstance(arguments, Mapping):
        accepted = inspect.signature(type(value).__init__).parameters
        for name, each in arguments.items():
            if isinstance(each, np.ndarray):
                # as a list: Keras would take its own description of an array for the argument itself
                config["config"][name] = each.tolist()
            elif name in accepted and each != accepted[name].default:
                config["config"].setdefault(name, keras.saving.serialize_keras_object(each))
    return config


def is_builtin(function: str) -> bool:
    """Return whether Keras has a function of this name in the modules where it looks up names in configurations."""
    known = (keras.activations, keras.initializers, keras.losses, keras.metrics, keras.regularizers, keras.constraints)
    return any(hasattr(module, function) for module in known)


def check_config(value: Any, error: type[Exception]) -> None:
    """Raise `error` if a configuration leaves out arguments of the constructor, which Keras writes for layers alone."""
    kind = type(value)
    maker = next(each for each in kind.__mro__ if "__init__" in vars(each))
    teller = next((each for each in kind.__mro__ if "get_config" in vars(each)), object)
    if maker.__module__.partition(".")[0] == "keras" or teller in kind.__mro__[: kind.__mro__.index(maker) + 1]:
        return
    if isinstance(value, keras.layers.Layer) and not isinstance(value, keras.Model):
        return
    variable = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    _, *parameters = inspect.signature(maker.__init__).parameters.values()  # type: ignore[misc]
    if any(each.kind not in variable and each.name not in _KEPT_BY_KERAS for each in parameters):
        name = kind.__name__
        raise error(f"{name}.get_config() leaves out arguments of {name}.__init__; it has to return all of them")


def _mappings_in(config: Any) -> Iterator[Mapping[str, Any]]:
    """Yield all mappings in a configuration, each before those in it."""
    if isinstance(config, Mapping):
        yield config
        config = list(config.values())
    for each in config if isinstance(config, (list, tuple)) else ():
        yield from _mappings_in(each)


def _globals_of(code: CodeType) -> Iterator[str]:
    """Yield the names that a function, and those defined in it, have from their module."""
    loads = [each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"]
    yield from (name for name in loads if not hasattr(builtins, name))
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _globals_of(each)


def _name(node: Mapping[str, Any]) -> str | None:
    """Return the name in a node that may be a user's; Keras does not record the module of a function."""
    kind = node.get("class_name")
    if not isinstance(kind, str) or "config" not in node:
        return None
    if kind == "__lambda__":
        return "<lambda>"
    if str(node.get("module") or "").partition(".")[0] == "keras":  # Keras's Functional has a registered name, too
        return None
    if kind == "function":
        return node["config"] if isinstance(node["config"], str) else None
    registered = node.get("registered_name")
    return str(registered) if registered is not None else None


def _custom_parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, class or function) of everything that a Keras object refers to and that is not Keras's own."""
    stack, seen = [value], set()
    while stack:
        each = stack.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, (list, tuple, set, frozenset)):
            stack += each
        elif isinstance(each, Mapping):
            stack += each.values()
        elif isinstance(each, FunctionType):
            if each.__module__.partition(".")[0] != "keras":
                yield keras.saving.get_registered_name(each), each
        elif hasattr(type(each), "get_config"):
            if type(each).__module__.partition(".")[0] != "keras":
                yield keras.saving.get_registered_name(type(each)), type(each)
            stack += getattr(each, "__dict__", {}).values()


_PROCESS_KEYS = ("shared_object_id", "compile_config", "build_config", "registered_name")  # differ between processes


def comparable_config(value: Any) -> Any:
    """Replace Keras objects by configurations with numbered layers, whose names differ between processes."""
    if isinstance(value, (list, tuple)):
        return [comparable_config(each) for each in value]
    if isinstance(value, Mapping):
        return {str(name): comparable_config(each) for name, each in value.items()}
    if isinstance(value, (str, type, FunctionType)) or not hasattr(value, "get_config"):
        return value
    own: dict[str, Any] = {}
    if isinstance(value, keras.losses.Loss) and type(value).__module__.partition(".")[0] != "keras":
        # the configuration of a user's loss may leave out its plain attributes
        plain = (bool, int, float, str, type(None), FunctionType)
        own = {name: each for name, each in vars(value).items() if name[0] != "_" and isinstance(each, plain)}
    return _numbered(architecture(value) if isinstance(value, keras.Model) else config_of(value), {}) | own


def _numbered(node: Any, names: dict[str, str]) -> Any:
    if isinstance(node, Mapping):
        if isinstance(node.get("name"), str):
            names.setdefault(node["name"], f"#{len(names)}")
        return {name: _numbered(each, names) for name, each in node.items() if name not in _PROCESS_KEYS}
    if isinstance(node, (list, tuple)):
        return [_numbered(each, names) for each in node]
    return names.get(node, node) if isinstance(node, str) else node
