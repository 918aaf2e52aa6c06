"""Archives of Keras: only those without references to other files, and without trust only by safe versions of Keras."""

from __future__ import annotations

import contextlib
import io
import json
import pickle
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
from spark_elastic.ml.keras import pickling, safe_objects, serialization
from spark_elastic.runs import trust

WEIGHTS = "model.weights.h5"


def small_model() -> Any:
    return keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="dense")])


@pytest.mark.parametrize("version", ["3.10.0", "3.11.3", "3.12.0", "3.13.0", "3.13.1"])
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
def test_archive_whose_weights_are_in_other_files_is_refused(name: str, tmp_path: Path) -> None:
    archive = with_weights(serialization.model_to_archive(small_model()), changes(tmp_path)[name])
    for safe in (True, False):
        with pytest.raises(CheckpointError, match=r"^model\.weights\.h5 has .*: refused"):
            serialization.model_from_archive(archive, safe=safe)


def test_pickled_model_and_codec_refuse_weights_in_other_files(tmp_path: Path, monkeypatch: Any) -> None:
    change, plain = changes(tmp_path)["external_storage"], serialization.model_to_archive
    evil = with_weights(plain(small_model()), change)
    monkeypatch.setattr(serialization, "model_to_archive", lambda model: evil)
    monkeypatch.setattr(safe_objects, "model_to_archive", lambda model: evil)
    assert safe_objects.dumps(small_model()) is None
    with pytest.raises(CheckpointError, match="external storage"):
        pickle.loads(pickling.dumps(small_model()))


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


@pytest.mark.parametrize("seed", range(4))
def test_damaged_archive_is_reported_by_name(seed: int, tmp_path: Path) -> None:
    path, dice = tmp_path / "model.keras", np.random.default_rng(seed)
    small_model().save(path)
    whole = path.read_bytes()
    for number in range(25):
        damaged = bytearray(whole)
        at = int(dice.integers(len(whole)))
        if number % 5 == 0:
            del damaged[at:]
        else:
            damaged[at] ^= 1 << int(dice.integers(8))
        path.write_bytes(damaged)
        with contextlib.suppress(CheckpointError):  # what is damaged may have no meaning: the time of an entry, say
            assert load_model(path).count_params() == 3


def test_hard_links_in_a_circle_end() -> None:
    def circle(file: Any) -> None:
        file["layers/again"] = file["layers"]

    archive = with_weights(serialization.model_to_archive(small_model()), circle)
    assert serialization.model_from_archive(archive, safe=True).count_params() == 3


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
