"""Bring this package to the executors of a Spark Connect session, as a zip file among the session's artifacts."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import spark_elastic

_shipped: set[tuple[str, str]] = set()
"""(session id, name of the file) of what was sent already."""


def ship(session: Any) -> None:
    """Send the package, once per session. Executors then import it from the zip, also if they have another version."""
    folder = Path(spark_elastic.__file__).parent
    sources = sorted(path for path in folder.rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    name = f"spark_elastic-{digest.hexdigest()[:16]}.zip"
    if (session.session_id, name) in _shipped:
        return
    with tempfile.TemporaryDirectory(prefix="spark_elastic-ship-") as here:
        archive = Path(here) / name
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sources:
                file.write(path, path.relative_to(folder.parent).as_posix())
        session.addArtifacts(str(archive), pyfile=True)
    _shipped.add((session.session_id, name))
