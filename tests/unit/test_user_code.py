"""pyright --strict finds nothing in the recipes and the notebooks, and does find a mistake that is put there.

It sees the package as they see it on a user's machine, through `py.typed`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import user_code
from tests.pages import ROOT

PYRIGHT = {
    "include": ["."],
    "extraPaths": [str(ROOT)],
    "stubPath": "stubs",
    "typeCheckingMode": "strict",
    # Other packages' missing annotations: nothing that this package can mend.
    **dict.fromkeys(
        [
            "reportIncompleteStub",  # of STUBS
            "reportMissingTypeStubs",
            "reportUnknownArgumentType",
            "reportUnknownLambdaType",
            "reportUnknownMemberType",
            "reportUnknownParameterType",
            "reportUnknownVariableType",
        ],
        "none",
    ),
}
_ANYTHING = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
_FRAME = """\
from typing import Any
class {name}:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __getattr__(self, name: str) -> Any: ...
    def __getitem__(self, key: Any) -> Any: ...
    def __iter__(self) -> Any: ...
"""
STUBS = {
    **dict.fromkeys(["sklearn/__init__", "sklearn/datasets", "matplotlib/__init__", "matplotlib/pyplot"], _ANYTHING),
    "pandas/__init__": f"from pandas.core.frame import DataFrame as DataFrame\n{_ANYTHING}",
    "pandas/core/__init__": "",
    "pandas/core/frame": _FRAME.format(name="DataFrame"),
    "pandas/core/series": _FRAME.format(name="Series"),
}
"""Packages without types, by module. pyright would infer some from their code, and contradict itself."""

MISTAKES = """\
import spark_elastic
from spark_elastic import ElasticKerasEstimator, ElasticTorchEstimator, ElasticTorchModel
def use(model: ElasticTorchModel) -> None:
    ElasticTorchEstimator(raw_prediction="rawPrediction")
    ElasticTorchEstimator(epochs="3")
    ElasticTorchEstimator("model")
    ElasticTorchEstimator().setEpochs("3")
    ElasticTorchEstimator().setEpoch(3)
    ElasticTorchEstimator().fit("df")
    ElasticKerasEstimator(train_fn=len)
    ElasticTorchEstimator(optimizer="adam")
    ElasticTorchEstimator().setParams(epoch=3)
    ElasticKerasEstimator(output_type="vectors")
    spark_elastic.run(print, num_procs=2)
    spark_elastic.run(print, num_proc="2")
    spark_elastic.run_async(3, num_proc=2)
    model.histry
    model.history["loss"][0].upper()
    model.setOutputCol("logits")
"""
FIRST = MISTAKES.split("    ")[0].count("\n") + 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs, beside a file with mistakes."""
    made = tmp_path_factory.mktemp("user_code")
    user_code.write(made)
    (made / "mistakes.py").write_text(MISTAKES)
    (made / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    for name, code in STUBS.items():
        stub = made / "stubs" / f"{name}.pyi"
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(code)
    return made


def check(found: list[tuple[str, int, str]]) -> None:
    """Compare the errors (file, line, words) with the mistakes: each line has its error, and nothing else has one."""
    assert [error for error in found if error[0] != "mistakes.py"] == []
    lines = MISTAKES.splitlines()
    wrong = {line for _, line, _ in found}
    assert wrong == set(range(FIRST, len(lines) + 1)), [lines[line - 1] for line in wrong]


@pytest.mark.nightly
def test_pyright_strict_finds_the_mistakes_and_nothing_else(folder: Path) -> None:
    pytest.importorskip("pyright")
    command = [sys.executable, "-m", "pyright", "-p", str(folder), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    found = json.loads(done.stdout)["generalDiagnostics"]
    errors = [each for each in found if each["severity"] == "error"]
    check([(Path(e["file"]).name, e["range"]["start"]["line"] + 1, e["message"]) for e in errors])
