"""Rewrites the generated parts of the pages: `python docs/generate.py` from the repository root.

A generated part stands between `<!-- generated: name -->` and `<!-- end -->`; it comes from tables, docstrings and
settings in the code, or from the measurements in `benchmarks/results`. A test compares pages and code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from spark_elastic import errors
from spark_elastic.membership.states import PHASES, WORKERS, Table
from spark_elastic.wire import messages

DOCS = Path(__file__).parent
ROOT = DOCS.parent
RESULTS = ROOT / "benchmarks" / "results"
STORMS = ROOT / "tests" / "storms" / "results"
_PART = re.compile(r"(<!-- generated: (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def diagram(table: Table[Any]) -> str:
    """Return the table as a mermaid state diagram."""
    lines = ["```mermaid", "stateDiagram-v2"]
    states = list(table.meaning)
    lines.append(f"    [*] --> {states[0].value}")
    for (before, after), why in table.transitions.items():
        lines.append(f"    {before.value} --> {after.value}: {why.replace(':', ',').replace('`', '')}")
    lines += [f"    {state.value} --> [*]" for state in states if not table.leaving(state)]
    return "\n".join([*lines, "```", ""])


def states(table: Table[Any]) -> str:
    rows = [f"| {state.name} | {meaning} |" for state, meaning in table.meaning.items()]
    return "\n".join(["| state | meaning |", "|---|---|", *rows, ""])


def message_tables() -> str:
    """Every message with its fields, under the direction that the source gives it."""
    source = inspect.getsource(messages)
    headings = [(source[: m.start()].count("\n"), m[1]) for m in re.finditer(r"^# --- (.*?) -+$", source, re.MULTILINE)]
    sent = {message.__name__ for message in messages.Message.__subclasses__()}
    lines: list[str] = []
    current = ""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name not in sent:
            continue
        heading = [title for line, title in headings if line < node.lineno][-1]
        if heading != current:
            current = heading
            lines += ["", f"**{heading.replace('->', '→')}**", "", "| message | fields | |", "|---|---|---|"]
        lines.append(_row(node))
    return "\n".join([*lines[1:], ""])


def _row(node: ast.ClassDef) -> str:
    fields = ", ".join(ast.unparse(item.target) for item in node.body if isinstance(item, ast.AnnAssign))
    return f"| `{node.name}` | {fields} | {_first_paragraph(ast.get_docstring(node) or '')} |"


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# --- errors.md --------------------------------------------------------------------------------------------------------


def error_tree() -> str:
    """Return the classes of `errors.py`, each indented under its base; the tables below have what they mean."""
    known = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]

    def lines(base: type, depth: int) -> list[str]:
        mine = f"{'    ' * depth}{base.__name__}"
        also = [other.__name__ for other in base.__bases__ if other not in known and other is not Exception]
        mine += f" (also {' and '.join(also)})" if also else ""
        return [mine, *(line for each in known if each.__bases__[0] is base for line in lines(each, depth + 1))]

    return "\n".join(["```text", *lines(errors.SparkElasticError, 0), "```", ""])


# --- settings ---------------------------------------------------------------------------------------------------------


def run_settings() -> str:
    """Return the table of the arguments of `spark_elastic.run`."""
    from spark_elastic.jobs.settings import RunCall
    from spark_elastic.settings import declarations

    rows = []
    for each in declarations(RunCall):
        if each.name not in ("args", "kwargs"):
            default = "" if each.default in (dataclasses.MISSING, None) else f"`{each.default!r}`"
            rows.append(f"| `{each.name}` | {default} | {_cell(each.setting.doc)} |")
    return "\n".join(["| name | default | meaning |", "|---|---|---|", *rows, ""])


def common_settings() -> str:
    """Return the settings that all estimators have, by what they are about."""
    from spark_elastic.ml.estimator import ElasticEstimator

    by_subject: dict[str, list[Any]] = {}
    for cls in ElasticEstimator.__mro__:
        if own := _declared(cls):
            subject = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
            by_subject[subject] = own + by_subject.get(subject, [])  # those of the base first
    parts = [[f"**{subject}**", "", *_setting_lines(own), ""] for subject, own in by_subject.items()]
    return "\n".join(line for part in parts for line in part)


def torch_settings() -> str:
    from spark_elastic import ElasticTorchEstimator
    from spark_elastic.ml.torch.model import HalfPrecision

    return "\n".join([*_setting_lines([*_declared(ElasticTorchEstimator), *_declared(HalfPrecision)]), ""])


def keras_settings() -> str:
    """Return the table of the Keras settings. Importing the class needs no Keras; making one does."""
    from spark_elastic import ElasticKerasEstimator

    return "\n".join([*_setting_lines(_declared(ElasticKerasEstimator)), ""])


def _declared(cls: type) -> list[Any]:
    from pyspark.ml.param import Param

    return [value for value in vars(cls).values() if isinstance(value, Param)]


def _setting_lines(settings: list[Any]) -> list[str]:
    return [
        f"- `{each.name}`{'' if each.default is None else f' (default `{each.default!r}`)'}: {each.doc}"
        for each in settings
    ]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- benchmarks.md ----------------------------------------------------------------------------------------------------


def storms() -> str:
    """Return what `tests/storms/chaos.py` found: a row for each site and loop, and how often each fault was done."""
    by_loop: dict[tuple[str, str], list[dict[str, Any]]] = {}
    counts = Counter[str]()
    for path in sorted(STORMS.glob("chaos-*.json")):
        for each in json.loads(path.read_text())["raw"]["storms"]:
            counts.update(fault["kind"] for fault in each["faults"])
            by_loop.setdefault((each["on"], each["loop"]), []).append(each)
    rows = [f"| {on} | {loop} | {' | '.join(_storm_cells(found))} |" for (on, loop), found in sorted(by_loop.items())]
    heads = ["site", "loop", "storms", "faults", "worlds", "steps", "steps done again", "problems"]
    heads += ["goodput of live workers", "longest time without a step"]
    faults = [f"{name} {counts[name]}" for name in chaos_faults() if counts[name]]
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]
    return "\n".join([*table, "", f"In all {sum(counts.values()):,} faults: {', '.join(faults)}.", ""])


def _storm_cells(found: list[dict[str, Any]]) -> list[str]:
    """Return the cells of a row: counts summed over the storms, the range of goodput, the worst stall."""
    counts = [len(found), sum(len(each["faults"]) for each in found), sum(each["worlds"] for each in found)]
    counts += [sum(each["steps"] for each in found), sum(each["repeated_steps"] for each in found)]
    counts += [sum(len(each["lost_steps"]) + len(each["problems"]) for each in found)]
    live = sorted({f"{each['live_goodput']:.0%}" for each in found if "live_goodput" in each}, key=_percentage)
    stall = max(each["worst_stall_s"] for each in found)
    return [
        *(f"{count:,}" for count in counts),
        " to ".join(dict.fromkeys(live[:1] + live[-1:])) or "–",
        f"{stall:.1f} s",
    ]


def _percentage(text: str) -> float:
    return float(text.rstrip("%"))


def chaos_faults() -> dict[str, Any]:
    """Return the kinds of faults of `tests/storms/chaos.py`."""
    sys.path.insert(0, str(ROOT))
    try:
        return dict(importlib.import_module("tests.storms.chaos_faults").FAULTS)
    finally:
        sys.path.remove(str(ROOT))


def hostile() -> str:
    """Return the medians of `tests/storms/fuzz.py` and `checkpoint_kills.py`: a row for each file."""
    rows = []
    names = ("fuzz", "fuzz-documents", "checkpoint-kills-own")
    for path in (STORMS / f"{name}.json" for name in names):
        if path.exists():
            document = json.loads(path.read_text())
            found = [_hostile_figure(each) for each in document["series"]]
            rows.append(f"| `{path.name}`, {document['machine']['when'][:10]} | {'; '.join(found)} |")
    return "\n".join(["| run | medians |", "|---|---|", *rows, ""])


def _hostile_figure(series: dict[str, Any]) -> str:
    """Return "name: median unit", with the unit once if the name ends with it."""
    unit = "" if series["name"].split()[-1] == series["unit"] else f" {series['unit']}"
    return _cell(f"{series['name']}: {_number(series['p50'])}{unit}".rstrip())


def control_plane() -> str:
    """Return what `benchmarks/control_plane.py` measured: a row for each number of workers, and for each event."""
    path = RESULTS / "control-plane.json"
    if not path.exists():
        return "There is no file of that run in `benchmarks/results`.\n"
    document = json.loads(path.read_text())
    raw, machine = document["raw"], document["machine"]
    rows = []
    for run in raw["runs"]:
        of = {key: statistics.median(loss[key] for loss in run["losses"]) for key in run["losses"][0]}
        cells = [f"{run['size']:,}", f"{_number(run['assemble_s'])} s", f"{_number(of['driver_cpu_s'] * 1e3)} ms"]
        cells += [f"{_number(of['s'] * 1e3)} ms", f"{_number(of['bytes'] / 2**20)} MB"]
        cells += [f"{_number(run['memory_mb'])} MB", f"{run['idle_cpu_share']:.1%}"]
        rows.append(f"| {' | '.join(cells)} |")
    heads = [
        "workers",
        "all agents come at once",
        "a loss: CPU of the driver",
        "until the last survivor holds the next world",
    ]
    heads += ["bytes sent", "memory of the driver", "CPU while nothing happens"]
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]
    when = f"{machine['when'][:10]}, {machine['cores']} cores, load {machine['load_average_1min']}"
    parts = [*table, "", f"Medians ({when}).", ""]
    if (DOCS / "images" / "control_plane.png").exists():
        parts += ["![The same on logarithmic axes, by the number of workers](images/control_plane.png)", ""]
    events = raw.get("machine") or {}
    for size, costs in events.items():
        what, most = max(costs.items(), key=lambda cost: cost[1])
        heartbeat = f"a worker's heartbeat {_number(costs['a heartbeat of a worker'])} us"
        parts.append(
            f"The membership machine alone, {int(size):,} workers: {heartbeat}; at most {_number(most)} us ({what})."
        )
    return "\n".join([*parts, ""])


CONTENDERS = ("spark_elastic", "Horovod Elastic", "TorchDistributor", "torchrun", "Ray Train", "torchft")
"""The contenders in the order of their columns; others follow."""


def compared() -> str:
    """The medians of `benchmarks/peers.py`: a row for each quantity, a column for each contender."""
    path = RESULTS / "peers.json"
    if not path.exists():
        return "There is no file of that run in `benchmarks/results`.\n"
    document = json.loads(path.read_text())
    found: dict[str, dict[str, str]] = {}
    for each in document["series"]:
        what, _, who = each["name"].rpartition(", ")
        found.setdefault(what, {})[who] = f"{_number(each['p50'])} {each['unit']}".replace(" steps", "")
    there = {who for row in found.values() for who in row}
    names = [name for name in CONTENDERS if name in there] + sorted(there - set(CONTENDERS))
    rows = [
        f"| {what.replace('->', '→')} | {' | '.join(row.get(name, '–') for name in names)} |"
        for what, row in found.items()
    ]
    counts = [each["count"] for each in document["series"]]
    load = document["machine"]["load_average_1min"]
    cores = document["machine"]["cores"]
    times = f"{min(counts)}" if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"
    told = f"Each was measured {times} times, on {cores} cores with a load of {load}."
    return "\n".join([f"| | {' | '.join(names)} |", f"|{'---|' * (1 + len(names))}", *rows, "", told, ""])


def _number(value: float) -> str:
    """Return the value with three significant digits, from 100 on as a whole number."""
    if value == 0:
        return "0"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def versions() -> str:
    """Return the rows that `scripts/test_matrix.py` has recorded, and what its checks are."""
    path = DOCS / "versions.json"
    if not path.exists():
        return "No row has been recorded.\n"
    document = json.loads(path.read_text())
    checks, rows = document["checks"], document["rows"]
    heads = ["row", "Python", "pyspark", "torch", "Keras, TensorFlow", "pandas", "pyarrow", "numpy", "passed"]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    notes = []
    for name, row in rows.items():
        found = {what: version.partition("+")[0] for what, version in row["versions"].items()}
        keras = ", ".join(found[what] for what in ("keras", "tensorflow-cpu") if what in found)
        cells = [name, row["python"], *(found.get(what, "–") for what in ("pyspark", "torch")), keras or "–"]
        cells += [found.get(what, "–") for what in ("pandas", "pyarrow", "numpy")]
        lines.append(f"| {' | '.join([*cells, _passed(row['checks'], checks)])} |")
        missing: dict[str, list[str]] = {}
        for check, outcome in row["checks"].items():
            if outcome not in ("passed", "failed"):
                missing.setdefault(outcome, []).append(check)
        skipped = [
            f"{left_out[0] if len(left_out) == 1 else 'others'} not run: {why}" for why, left_out in missing.items()
        ]
        if row["remarks"] or skipped or row["about"] != f"Spark {found.get('pyspark', '')[:3]}":
            notes.append(f"- **{name}**: {'; '.join([row['about'], *row['remarks'], *skipped])}.")
    explained = [f"| {name} | {about} |" for name, about in checks.items()]
    return "\n".join([*lines, "", *notes, "", "| check | what it shows |", "|---|---|", *explained, ""])


def _passed(outcomes: dict[str, str], checks: dict[str, str]) -> str:
    """Return which of the checks passed, and those that failed."""
    others = [check for check in checks if outcomes.get(check) != "passed"]
    passed = [check for check in checks if check not in others]
    named = f"all but {', '.join(others)}" if len(others) < len(passed) else ", ".join(passed)
    failed = "".join(f"; **{check} failed**" for check in others if outcomes.get(check) == "failed")
    return (named if others else "all") + failed


PARTS: dict[str, Callable[[], str]] = {
    "phase_diagram": lambda: diagram(PHASES),
    "phase_states": lambda: states(PHASES),
    "worker_diagram": lambda: diagram(WORKERS),
    "worker_states": lambda: states(WORKERS),
    "messages": message_tables,
    "error_tree": error_tree,
    "run_settings": run_settings,
    "common_settings": common_settings,
    "torch_settings": torch_settings,
    "keras_settings": keras_settings,
    "storms": storms,
    "hostile": hostile,
    "compared": compared,
    "control_plane": control_plane,
    "versions": versions,
}
"""The generated parts, by their name in the pages."""


def generated(page: str) -> str:
    """Return the page with its generated parts as the code has them now."""
    return _PART.sub(lambda match: f"{match[1]}{PARTS[match[2]]()}{match[4]}", page)


def pictures() -> dict[Path, str]:
    """Return the drawn files: path -> content."""
    import timeouts

    return {DOCS / "images" / "timeouts.svg": timeouts.svg()}


def write() -> list[Path]:
    """Write the generated parts and pictures; return the files that have changed."""
    changed = []
    for path, drawn in pictures().items():
        if not path.exists() or path.read_text() != drawn:
            path.parent.mkdir(exist_ok=True)
            path.write_text(drawn)
            changed.append(path)
    for path in [DOCS.parent / "README.md", *sorted(DOCS.rglob("*.md"))]:
        old = path.read_text()
        new = generated(old)
        if new != old:
            path.write_text(new)
            changed.append(path)
    return changed


if __name__ == "__main__":
    for path in write():
        print(f"written: {path}", file=sys.stderr)
