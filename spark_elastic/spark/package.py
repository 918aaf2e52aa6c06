"""Bring this package to the executors of a Spark Connect session, as a zip file among the session's artifacts."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import spark_elastic
from spark_elastic.errors import InvalidSettingsError
from spark_elastic.spark.cluster import Cluster
from spark_elastic.spark.connect_session import is_connect


def ship_package(session: Any) -> None:
    """Send this package to the executors of a Spark Connect session that lack it, or have another version of it.

    `run(ship_package=True)` and `run_options={"ship_package": True}` of an estimator do the same. Call it before
    `transform` of a loaded model, or `materialize`, in a session in which nothing was trained. A second call for a
    session sends nothing.

    Args:
        session: a `SparkSession` of Spark Connect.

    Raises:
        InvalidSettingsError: it is none. To a classic session, the package is sent with `spark-submit --py-files`.
    """
    if not is_connect(session):
        raise InvalidSettingsError(
            f"ship_package needs a SparkSession of Spark Connect, not {type(session).__module__}."
            f"{type(session).__name__}; with a classic session, install the package on the executors or use "
            "spark-submit --py-files"
        )
    folder = Path(spark_elastic.__file__).parent
    sources = sorted(path for path in folder.rglob("*") if path.suffix == ".py" or path.name == "py.typed")
    digest = hashlib.sha256()
    for path in sources:
        digest.update(path.relative_to(folder).as_posix().encode() + path.read_bytes())
    name = f"spark_elastic-{digest.hexdigest()[:16]}.zip"
    about = ("package", session.session_id, name)
    if about in Cluster.done:
        return
    with tempfile.TemporaryDirectory(prefix="spark_elastic-ship-") as here:
        archive = Path(here) / name
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
            for path in sources:
                file.write(path, path.relative_to(folder.parent).as_posix())
        session.addArtifacts(str(archive), pyfile=True)
    Cluster.done.add(about)
