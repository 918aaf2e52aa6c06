"""Archives of Keras: only those without references to other files, and without trust only by safe versions of Keras."""

from __future__ import annotations

import contextlib
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest

from spark_elastic.errors import CheckpointError
from spark_elastic.keras import archives
from spark_elastic.keras.functions import load_model
from spark_elastic.ml.keras import safe_objects, serialization
from spark_elastic.runs import trust

WEIGHTS = "model.weights.h5"


def small_model() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])


@pytest.mark.parametrize("version", ["3.10.0", "3.12.0", "3.13.1"])
def test_unsafe_keras_loads_no_archive_and_no_settings(version: str, monkeypatch: Any) -> None:
    model = small_model()
    archive, settings = serialization.model_to_archive(model), safe_objects.dumps(keras.losses.MeanSquaredError())
    assert settings is not None
    monkeypatch.setattr(keras, "__version__", version)
    for load in (lambda: serialization.model_from_archive(archive, safe=True), lambda: safe_objects.loads(settings)):
        with pytest.raises(CheckpointError, match=rf"keras {version} is installed.*keras>=3\.12\.1,!=3\.13\.0"):
            load()
        with trust.trusted_files():
            assert load() is not None


def with_weights(archive: bytes, change: Callable[[Any], None]) -> bytes:
    """Return the archive with another file of weights."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        files = {name: source.read(name) for name in source.namelist()}
    weights = io.BytesIO(files[WEIGHTS])
    with h5py.File(weights, "r+") as file:
        change(file)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        for name, content in {**files, WEIGHTS: weights.getvalue()}.items():
            target.writestr(name, content)
    return made.getvalue()


def with_config(archive: bytes, change: Callable[[Any], None]) -> bytes:
    config = archives.archive_config(archive)
    change(config)
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as source, zipfile.ZipFile(made, "w") as target:
        for name in source.namelist():
            target.writestr(name, json.dumps(config) if name == "config.json" else source.read(name))
    return made.getvalue()


def changes(folder: Path) -> dict[str, Callable[[Any], None]]:
    """Return ways to get a local file into the weights of `small_model`."""
    secret = folder / "secret"
    secret.write_bytes(np.array([1.0, 2.0], "<f4").tobytes())
    with h5py.File(folder / "other.h5", "w") as other:
        other.create_group("vars")["0"] = np.ones((2, 1), "float32")
    layer = "layers/dense/vars"

    def external_storage(file: Any) -> None:
        del file[f"{layer}/0"]
        file.create_dataset(f"{layer}/0", (2, 1), "float32", external=[(str(secret), 0, 8)])

    def external_link(file: Any) -> None:
        del file[layer]
        file[layer] = h5py.ExternalLink(str(folder / "other.h5"), "/vars")

    def soft_link(file: Any) -> None:
        del file[f"{layer}/0"]
        file["elsewhere"] = h5py.ExternalLink(str(folder / "other.h5"), "/vars/0")
        file[f"{layer}/0"] = h5py.SoftLink("/elsewhere")

    def virtual(file: Any) -> None:
        del file[f"{layer}/0"]
        layout = h5py.VirtualLayout((2, 1), "float32")
        layout[:] = h5py.VirtualSource(str(folder / "other.h5"), "vars/0", (2, 1))
        file.create_virtual_dataset(f"{layer}/0", layout)

    return {each.__name__: each for each in (external_storage, external_link, soft_link, virtual)}


@pytest.mark.parametrize("name", ["external_storage", "external_link", "soft_link", "virtual"])
@pytest.mark.parametrize("suffix", ["keras", "h5"])
def test_load_model_refuses_weights_in_other_files(name: str, suffix: str, tmp_path: Path) -> None:
    path, change = tmp_path / f"model.{suffix}", changes(tmp_path)[name]
    small_model().save(path)
    assert load_model(path).count_params() == 3
    if suffix == "keras":
        path.write_bytes(with_weights(path.read_bytes(), change))
    else:
        with h5py.File(path, "r+") as file:
            file.create_group("layers/dense/vars")["0"] = np.ones((2, 1), "float32")
            change(file)
    with pytest.raises(CheckpointError, match=r": refused"):
        load_model(path)


def test_damaged_archive_is_reported_by_name(tmp_path: Path) -> None:
    path, dice = tmp_path / "model.keras", np.random.default_rng(1)
    small_model().save(path)
    whole = path.read_bytes()
    for number in range(50):
        damaged = bytearray(whole)
        at = int(dice.integers(len(whole)))
        if number % 5 == 0:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << int(dice.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):  # what is damaged may have no meaning: the time of an entry, say
            assert load_model(path).count_params() == 3


@pytest.mark.parametrize("kind", ["StringLookup", "IntegerLookup", "TextVectorization"])
@pytest.mark.parametrize("safe", [True, False])
def test_lookup_layer_with_a_path_is_refused_before_keras_reads_it(kind: str, safe: bool) -> None:
    layer = getattr(keras.layers, kind)(vocabulary=[1, 2] if kind == "IntegerLookup" else ["a", "b"])

    def change(config: Any) -> None:
        config["config"]["layers"][1]["config"]["vocabulary"] = "/etc/hostname"

    archive = serialization.model_to_archive(
        keras.Sequential([keras.Input((1,), dtype="int64" if kind == "IntegerLookup" else "string"), layer])
    )
    assert serialization.model_from_archive(archive, safe=safe) is not None
    with pytest.raises(CheckpointError, match=rf"{kind} in the model names the file '/etc/hostname'"):
        serialization.model_from_archive(with_config(archive, change), safe=safe)
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as settings:
        node = keras.saving.serialize_keras_object(layer)
        node["config"]["vocabulary"] = "/etc/hostname"
        settings.writestr("objects.json", json.dumps({"keras": node}))
    with pytest.raises(CheckpointError, match="names the file"):
        safe_objects.loads(file.getvalue())


def test_layer_of_the_users_own_may_have_a_vocabulary_by_name() -> None:
    class Embedded(keras.layers.Layer):  # type: ignore[misc, name-defined]
        def __init__(self, vocabulary: str, **rest: Any) -> None:
            super().__init__(**rest)
            self.vocabulary = vocabulary

        def get_config(self) -> dict[str, Any]:
            return {**super().get_config(), "vocabulary": self.vocabulary}

        def call(self, inputs: Any) -> Any:
            return inputs

    archive = serialization.model_to_archive(keras.Sequential([keras.Input((2,)), Embedded("english")]))
    names = serialization.custom_names(None, archives.archive_config(archive))
    loaded = serialization.model_from_archive(archive, dict.fromkeys(names, Embedded))
    assert loaded.layers[0].vocabulary == "english"


def bad_files(folder: Path) -> dict[str, Path]:
    """Write files and folders that are no models, or are made to do harm, and return them by what is wrong."""
    names = {"none": "a-folder-without-a-model", "a lambda": "lambda.h5"}

    def path(kind: str, suffix: str = "h5") -> Path:
        return folder / names.get(kind, f"{kind.replace(' ', '-')}.{suffix}")

    def with_h5_config(kind: str, node: Any) -> Path:
        """Write a model whose first layer has another configuration."""
        small_model().save(path(kind))
        with h5py.File(path(kind), "r+") as file:
            config = json.loads(file.attrs["model_config"])
            config["config"]["layers"][1] = node
            file.attrs["model_config"] = json.dumps(config)
        return path(kind)

    small_model().save(folder / "whole.keras")
    small_model().save(folder / "whole.h5")
    archive, legacy = (folder / "whole.keras").read_bytes(), (folder / "whole.h5").read_bytes()
    for name in ("a-folder-without-a-model", "no-weights", "no-configuration"):
        (folder / name).mkdir()
    (folder / "a-folder-without-a-model" / "notes.txt").touch()
    (folder / "no-weights" / "config.json").write_text(json.dumps(archives.archive_config(archive)))
    (folder / "no-weights" / WEIGHTS).write_bytes(b"none")
    (folder / "no-configuration" / "config.json").write_bytes(b"\x00")
    for name, content in (("empty", b""), ("cut off", archive[: len(archive) // 2])):
        path(name, "keras").write_bytes(content)
    path("legacy cut off").write_bytes(legacy[: len(legacy) // 2])
    small_model().save_weights(folder / "alone.weights.h5")
    path("no words").write_bytes(legacy)
    with h5py.File(path("no words"), "r+") as file:
        file.attrs["model_config"] = "{"
    path("storage").write_bytes(legacy)
    with h5py.File(path("storage"), "r+") as file:
        (folder / "secret").write_bytes(bytes(8))
        datasets: list[str] = []
        file.visititems(lambda name, each: datasets.append(name) if isinstance(each, h5py.Dataset) else None)
        kernel = next(name for name in datasets if file[name].shape == (2, 1))
        del file[kernel]
        file.create_dataset(kernel, (2, 1), "float32", external=[(str(folder / "secret"), 0, 8)])
    harm = eval(f"lambda x: (__import__('pathlib').Path({str(folder / 'harm')!r}).touch(), x)[1]")
    keras.Sequential([keras.Input((2,)), keras.layers.Lambda(harm)]).save(path("a lambda"))
    (folder / "harm").unlink()  # made when the layer was called
    system = {"module": "os", "class_name": "function", "config": "system", "registered_name": "system"}
    touched = {"module": "pathlib", "class_name": "Path", "config": {"name": "x"}, "registered_name": None}
    return {
        "a folder without a model": folder / "a-folder-without-a-model",
        "a folder without weights": folder / "no-weights",
        "a folder without a configuration": folder / "no-configuration",
        "an empty archive": path("empty", "keras"),
        "an archive that is cut off": path("cut off", "keras"),
        "a legacy file that is cut off": path("legacy cut off"),
        "a legacy file of weights alone": folder / "alone.weights.h5",
        "a legacy file whose configuration is damaged": path("no words"),
        "a legacy file with storage outside": path("storage"),
        "a legacy file with code": path("a lambda"),
        "a legacy file with a function of Python": with_h5_config(
            "a function", {"class_name": "Activation", "config": {"name": "a", "activation": system}}
        ),
        "a legacy file with a class of Python": with_h5_config("a class", touched),
        "a legacy file with a vocabulary elsewhere": with_h5_config(
            "vocabulary", {"class_name": "StringLookup", "config": {"name": "a", "vocabulary": "/etc/hostname"}}
        ),
        "a legacy file with a program of TensorFlow": with_h5_config(
            "program", {"class_name": "TFSMLayer", "config": {"name": "a", "filepath": "/etc"}}
        ),
    }


BAD_FILES = {
    "a folder without a model": (ValueError, "not supported: filepath=.*a-folder-without-a-model"),
    "a folder without weights": (CheckpointError, "model.weights.h5 is not a file of weights"),
    "a folder without a configuration": (CheckpointError, "config.json has no configuration of a model"),
    "an empty archive": (CheckpointError, "not a .keras archive"),
    "an archive that is cut off": (CheckpointError, "not a .keras archive"),
    "a legacy file that is cut off": (CheckpointError, "legacy-cut-off.h5 is not a file of weights"),
    "a legacy file of weights alone": (ValueError, "No model config found in the file at .*alone.weights.h5"),
    "a legacy file whose configuration is damaged": (CheckpointError, "no-words.h5 has no configuration of a model"),
    "a legacy file with storage outside": (CheckpointError, "has external storage at .*: refused"),
    "a legacy file with code": (ValueError, "Lambda"),
    "a legacy file with a function of Python": (TypeError, "Could not locate function 'system'"),
    "a legacy file with a class of Python": (TypeError, "Could not locate class 'Path'"),
    "a legacy file with a vocabulary elsewhere": (CheckpointError, "StringLookup .* names the file '/etc/hostname'"),
    "a legacy file with a program of TensorFlow": (CheckpointError, "TFSMLayer .* names the file '/etc'"),
}


@pytest.mark.parametrize("kind", BAD_FILES)
def test_load_model_names_what_is_wrong_and_runs_nothing(kind: str, tmp_path: Path) -> None:
    path, (error, words) = bad_files(tmp_path)[kind], BAD_FILES[kind]
    with pytest.raises(error, match=words):
        load_model(path)
    assert not (tmp_path / "harm").exists()
