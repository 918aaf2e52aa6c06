"""Read the files of a saved stage, and decode what JSON cannot hold. Imports nothing of Spark."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from spark_elastic.data.manifest import names_in, typed, whole_number
from spark_elastic.errors import CheckpointError
from spark_elastic.runs.trust import TRUST, trusted_files

FORMAT = 1
DATA = "data"


class Codec(Protocol):
    """A framework's way to store objects; SUFFIX is that of files that can be loaded without trust."""

    SUFFIX: str

    def dumps(self, value: Any) -> bytes | None:
        """Return a file that can be loaded without trust; None if the value contains code of the user's own."""

    def loads(self, file: bytes) -> Any:
        """Load a file of `dumps`. Raises `CheckpointError` if it is damaged, or needs trust."""

    def pickled(self, value: Any) -> bytes:
        """Return a pickle, which needs trust."""


class SavedParts(NamedTuple):
    """What a stage saves in addition to its settings."""

    facts: Mapping[str, Any] = {}  # plain values for JSON
    files: Mapping[str, bytes] = {}
    objects: Mapping[str, Any] = {}  # values that need the framework's loader or a pickle
    running: Sequence[str] = ()  # names of what in `files` runs code when it is loaded
    beside: Mapping[str, bytes] = {}  # files for other programs, which `load` does not read


class SavedStage:
    """The metadata and the files of a saved stage, whose checksums are right."""

    def __init__(self, path: str, kind: str, metadata: Mapping[str, Any], about: Mapping[str, Any]) -> None:
        """Take the metadata. Raises ValueError, with the field's name, if one is missing or of another type."""
        self.path = path
        self.kind = kind  # the stage's class, with its module
        self.uid: str = typed(metadata, "uid", str)
        self.settings: Mapping[str, Any] = typed(metadata, "paramMap", dict)  # the settings that JSON can hold
        self.stored: Mapping[str, str] = typed(about, "stored", dict)  # "safe:file" or "pickled:file"
        if not all(isinstance(where, str) for where in self.stored.values()):
            raise ValueError(f"stored is {self.stored!r:.80}, not the files of settings")
        self.objects = names_in(about, "objects")  # those of `stored` that are no settings
        self.names = names_in(about, "files")
        self.facts: Mapping[str, Any] = typed(about, "facts", dict)
        self.left_out = names_in({"left_out": [], **about}, "left_out")  # settings with credentials
        checksums = typed({"checksums": {}, **about}, "checksums", dict)  # none in files of 0.2.0
        self.checksums = {name: whole_number(crc, name) for name, crc in checksums.items()}
        self.files: Mapping[str, bytes] = {}

    def values(self, codec: Codec, trusted: bool, instead: Mapping[str, Any], settings: bool = True) -> dict[str, Any]:
        """Return the stored objects by name, and unless `settings` is False the stored settings.

        Those in `instead` are returned as given, and their files are not read. Raises `CheckpointError` if an object is
        missing or damaged, or needs trust.
        """
        wanted = {*self.stored} if settings else {*self.objects}
        stored = {name: where for name, where in self.stored.items() if name in wanted and name not in instead}
        with trusted_files(trusted):
            values = {**_decode(stored, self.files, codec, trusted, self.path), **instead}
        if missing := sorted({*self.objects} - values.keys()):
            raise CheckpointError(
                f"{self.path} is damaged: its metadata does not say where {missing[0]!r:.80} is stored"
            )
        return values


def read_stage(source: Any, path: str, *kinds: str) -> SavedStage:
    """Read the stage in a folder of `saved_folder`, of one of these classes. Raises `CheckpointError` if it cannot."""
    if not source.exists():
        raise CheckpointError(f"{path} does not exist{source.hint}")
    metadata = source.metadata()
    about, found = metadata.get("sparkElastic"), metadata.get("class")
    if not isinstance(about, dict) or found not in kinds:
        hint = _stages_in(path, metadata)
        raise CheckpointError(f"{path} is a saved {found!s:.200}, not a {' or '.join(kinds)}{hint}")
    if about.get("format") != FORMAT:
        raise CheckpointError(f"{path} has format {about.get('format')!r:.40}; this version reads format {FORMAT}")
    try:
        stage = SavedStage(path, str(found), metadata, about)
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged: in its metadata, {error}") from error
    stage.files = source.read(DATA, list(stage.names))
    for name, expected in stage.checksums.items():
        if name in stage.files and (crc := zlib.crc32(stage.files[name])) != expected:
            raise CheckpointError(
                f"{path} is damaged: {DATA}/{name} has the checksum {crc:08x}, and was written with {expected:08x}; "
                "bring it back from a copy, or save it again"
            )
    return stage


def _stages_in(path: str, metadata: Mapping[str, Any]) -> str:
    """Return which folders of a saved PipelineModel have the stages of this package, as the end of an error."""
    settings = metadata.get("paramMap")
    uids = settings.get("stageUids") if isinstance(settings, dict) else None
    if not isinstance(uids, list):
        return ""
    digits = len(str(len(uids)))
    found = [f"{path}/stages/{at:0{digits}}_{uid}" for at, uid in enumerate(uids) if str(uid).startswith("Elastic")]
    return f"; its stage is in {' and '.join(found)}" if found else ""


@contextlib.contextmanager
def damage_named(where: str) -> Iterator[None]:
    """Raise `CheckpointError`, with the files' names, for whatever a decoder raises at damaged bytes."""
    try:
        yield
    except CheckpointError as error:
        if where not in error.message and where.rpartition(": ")[2] not in error.message:
            error.message = f"{where}: {error.message}"
        raise
    except Exception as error:
        why = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise CheckpointError(f"{where} cannot be loaded: {why}; the file is damaged, or of another version") from error


def _decode(
    stored: Mapping[str, str], files: Mapping[str, bytes], codec: Codec, trusted: bool, path: str
) -> dict[str, Any]:
    import cloudpickle

    pickled = sorted(name for name, where in stored.items() if not where.startswith("safe:"))
    if pickled and not trusted:
        raise CheckpointError(
            f"{', '.join(pickled)} in {path} can only be loaded by running code that the file names, because it is a "
            f"class or function that is not the framework's own. {TRUST}"
        )
    values: dict[str, Any] = {}
    for where in sorted(set(stored.values())):
        how, _, name = where.partition(":")
        if name not in files or how not in ("safe", "pickled"):
            raise CheckpointError(
                f"{path} is damaged: its metadata refers to {where!r}, which is not 'safe:' or 'pickled:' with a file"
            )
        with damage_named(f"{path}: {name}"):
            try:
                loaded = codec.loads(files[name]) if how == "safe" else cloudpickle.loads(files[name])
            except ModuleNotFoundError as error:
                package = (error.name or str(error)).partition(".")[0]
                raise CheckpointError(
                    f"{name} in {path} needs the package {package}, which cannot be imported here; install it, or add "
                    "the module of your own to this process's path"
                ) from error
            values.update({key: value for key, value in loaded.items() if stored.get(key) == where})
    return values
