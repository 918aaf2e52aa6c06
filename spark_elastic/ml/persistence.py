"""Save and load estimators and models as Spark ML does, below a path of Spark's filesystem (see `saved_folder`).

::

    path/metadata/      as Spark ML writes it for every stage: class, uid and the settings that JSON can hold
    path/data/*         the other settings, the weights, ...

Values that JSON cannot hold are stored in one of two ways, and the metadata says which for each setting:

"safe"    a file that the framework's restricted loader reads: layers, optimizers, losses of the framework itself
"pickled" anything else: a class or function of your own. Loading it runs code that the file names, so it is loaded only
          if the caller trusts the file: `load(path, trusted=True)`, or `with trusted_files():` around a loader of
          several stages (PipelineModel.load), or by the environment, see `trust`. Saving warns of it.
"""

from __future__ import annotations

import inspect
import json
import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from pyspark.ml.util import MLReadable, MLReader, MLWritable, MLWriter

from spark_elastic.data.store import Store
from spark_elastic.errors import CheckpointError, InvalidSettingsError
from spark_elastic.jobs.driver_callbacks import DriverCallback
from spark_elastic.ml.params import as_list
from spark_elastic.ml.saved_folder import saved_folder
from spark_elastic.ml.saved_stage import DATA, FORMAT, Codec, SavedParts, damage_named, read_stage
from spark_elastic.redaction import without_secrets
from spark_elastic.runs.trust import TRUST_VARIABLE, granted, is_trusted, trusted_files
from spark_elastic.spark.connect_session import has_session

log = logging.getLogger("spark_elastic.ml")

T = TypeVar("T", bound="Savable")


class Savable(MLWritable, MLReadable[Any]):
    """Mixin of Params that are saved in this way."""

    _saved_together: tuple[str, ...] = ()  # these share objects and are saved in one file

    @classmethod
    def _codec(cls) -> Codec:
        raise NotImplementedError

    def _parts(self) -> SavedParts:
        """Return what to save in addition to settings."""
        return SavedParts()

    @classmethod
    def _present(cls, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Return those of the saved objects that this process has already, so that their files are not read."""
        return {}

    def _restore(self, facts: Mapping[str, Any], files: Mapping[str, bytes], objects: Mapping[str, Any]) -> None:
        """Take what `_parts` returned. Called by the loader once the settings are set."""

    def write(self) -> ElasticWriter:
        return ElasticWriter(self)

    @classmethod
    def read(cls: type[T]) -> ElasticReader[T]:
        return ElasticReader(cls)

    @classmethod
    def load(cls: type[T], path: str, *, trusted: bool = False) -> T:
        """Load what was saved at `path`.

        Args:
            path: A path of Spark's filesystem; without a session, one of this machine or a URI.
            trusted: Allow the files to run code; needed only if they hold classes or functions that are not the
                framework's own, which the error says.

        Raises:
            CheckpointError: There is no object of this class, it is damaged, or it needs trust.
        """
        return ElasticReader(cls, trusted).load(path)


def _folder(handler: MLReader[Any] | MLWriter, path: str) -> Any:
    """Return the folder at a path in Spark's filesystem, or in this process's own if it has no session."""
    within = handler._sparkSession is not None or has_session()
    return saved_folder(handler.sparkSession if within else None, path)


class ElasticWriter(MLWriter):
    """Writes a stage; Spark ML's `write().overwrite().save(path)`."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def _handleOverwrite(self, path: str) -> None:
        """Delete what was saved at `path`. Called by `save` after `overwrite`."""
        _folder(self, path).delete()

    def saveImpl(self, path: str) -> None:
        """Save the stage. Raises `CheckpointError` if `path` exists and `overwrite()` was not called."""
        target = _folder(self, path)
        if target.exists():
            raise CheckpointError(f"{path} exists; save to another path, or use .write().overwrite().save(path)")
        plain, objects, left_out = plain_and_objects(self.instance)
        parts = self.instance._parts()
        objects.update(parts.objects)
        stored, files = _encode(objects, self.instance._saved_together, self.instance._codec())
        warn_of_trust(self.instance, stored, parts.running, path)
        files.update(parts.files)
        target.write(DATA, {**files, **parts.beside})
        about = {
            "format": FORMAT,
            "stored": stored,
            "objects": sorted(parts.objects),
            "files": sorted(files),
            "checksums": {name: zlib.crc32(content) for name, content in files.items()},
            "facts": parts.facts,
            "left_out": left_out,
        }
        # Last: without metadata the rest is not taken for a saved stage.
        target.write_metadata(self.instance, {"sparkElastic": about}, plain)


class ElasticReader(MLReader[T], Generic[T]):
    """Reads a stage; Spark ML's `read().load(path)`."""

    def __init__(self, cls: type[T], trusted: bool = False, **instead: Any) -> None:
        super().__init__()
        self._cls, self._trusted = cls, trusted
        self._instead = instead  # objects to use in place of the saved ones, whose files are then not read

    def load(self, path: str) -> T:
        source = _folder(self, path)
        stage = read_stage(source, path, f"{self._cls.__module__}.{self._cls.__name__}")
        trusted = self._trusted or is_trusted() or granted(path, source.qualified)
        codec = self._cls._codec()
        with damage_named(path):
            instead = {**self._cls._present(stage.facts), **self._instead}
        values = stage.values(codec, trusted, instead)
        instance: Any = self._cls()
        instance._resetUid(stage.uid)
        beside = {*stage.objects, *instead}
        settings = {name: value for name, value in values.items() if name not in beside}
        for name, value in {**stage.settings, **settings}.items():
            if not instance.hasParam(name):
                raise CheckpointError(f"{path} has a setting {name!r:.80}, which this version does not know")
            instance._set(**{name: value})
        if stage.left_out:
            log.warning(
                "%s of the %s in %s may hold credentials and was not saved with it: set it again",
                ", ".join(stage.left_out),
                self._cls.__name__,
                path,
            )
        with trusted_files(trusted), damage_named(path):
            instance._restore(stage.facts, stage.files, {name: values[name] for name in beside})
        return instance  # type: ignore[no-any-return]


def plain_and_objects(instance: Any) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Return the settings for JSON, those for files, and the names of those left out, which may hold credentials."""
    plain: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    left_out: list[str] = []
    for param, value in instance._paramMap.items():
        if param.name == "callbacks":
            value = _without_driver_callbacks(instance, value)
        if param.name == "store" and isinstance(value, (os.PathLike, Store)):
            value = value.address if isinstance(value, Store) else os.fspath(value)
        if value is not None:
            value, names = without_secrets(param.name, value)
            left_out += names
            if param.name in names:
                continue
        (plain if _survives_json(value) else objects)[param.name] = value
    return plain, objects, left_out


def _without_driver_callbacks(instance: Any, given: Any) -> Any:
    """Return the callbacks that run in workers. Those on the driver hold connections and are not saved."""
    listed = as_list(given)
    kept = [each for each in listed if not isinstance(each, DriverCallback)]
    if len(kept) == len(listed):
        return given
    names = sorted({type(each).__name__ for each in listed if isinstance(each, DriverCallback)})
    log.warning(
        "%s of %s is not saved with it, because it runs on the driver; set callbacks again after loading",
        ", ".join(names),
        type(instance).__name__,
    )
    return kept or None


def _survives_json(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value)) == value)
    except (TypeError, ValueError):
        return False


def warn_of_trust(instance: Any, stored: Mapping[str, str], running: Sequence[str], path: str) -> None:
    """Warn at once that loading will need trust; otherwise another person finds out later."""
    pickled = sorted(name for name, where in stored.items() if not where.startswith("safe:"))
    if needing := [*pickled, *running]:
        log.warning(
            "loading %s from %s will need trust, because of %s: code of your own, which only a pickle can hold. Load "
            "it with load(path, trusted=True); CrossValidatorModel.load, PipelineModel.load and the like within `with "
            "spark_elastic.trusted_files():`; a deployment sets %s. The framework's own classes and "
            "optimizers need no trust",
            type(instance).__name__,
            path,
            ", ".join(needing),
            TRUST_VARIABLE,
        )


def _encode(
    objects: dict[str, Any], together: tuple[str, ...], codec: Codec
) -> tuple[dict[str, str], dict[str, bytes]]:
    """Return "safe:file" or "pickled:file" for each setting, and the files."""
    stored: dict[str, str] = {}
    files: dict[str, bytes] = {}
    # Classes and functions refer to nothing, so the rest of the group may be safe where they are not.
    joined = [
        n for n in together if n in objects and not (isinstance(objects[n], type) or inspect.isroutine(objects[n]))
    ]
    for group in [*([joined] if joined else []), *([name] for name in objects if name not in joined)]:
        values = {name: objects[name] for name in group}
        file, how = codec.dumps(values), "safe"
        if file is None:
            try:
                file, how = codec.pickled(values), "pickled"
            except Exception as error:
                raise InvalidSettingsError(f"{', '.join(group)} cannot be saved: {error}") from error
        name = f"{'-'.join(group)}.{codec.SUFFIX if how == 'safe' else 'pkl'}"
        files[name] = file
        stored.update(dict.fromkeys(group, f"{how}:{name}"))
    return stored, files
