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
from types import ModuleType
from typing import Any

from spark_elastic import errors
from spark_elastic.membership import commands, events
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


def transitions(table: Table[Any]) -> str:
    rows = [f"| {before.name} | {after.name} | {why} |" for (before, after), why in table.transitions.items()]
    return "\n".join(["| from | to | when |", "|---|---|---|", *rows, ""])


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


def dataclass_table(module: ModuleType, name: str) -> str:
    classes = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.ClassDef)]
    rows = [_row(node) for node in classes if node.bases]  # without the base of all
    return "\n".join([f"| {name} | fields | |", "|---|---|---|", *rows, ""])


def _first_paragraph(text: str) -> str:
    return " ".join(text.split("\n\n")[0].split())


# --- errors.md --------------------------------------------------------------------------------------------------------


def error_tree() -> str:
    """The classes of `errors.py`, each with the first line of its docstring, indented under its base."""
    known = [value for value in vars(errors).values() if inspect.isclass(value) and value.__module__ == errors.__name__]

    def lines(base: type, depth: int) -> list[str]:
        mine = f"{'    ' * depth}{base.__name__}"
        also = [other.__name__ for other in base.__bases__ if other not in known and other is not Exception]
        words = _first_paragraph(base.__doc__ or "").replace("`", "").partition(". ")[0].rstrip(".")
        told = f"{mine:<39} {words}" + (f" (also {' and '.join(also)})" if also else "")
        return [told, *(line for each in known if each.__bases__[0] is base for line in lines(each, depth + 1))]

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
    """The settings that all estimators have, by what they are about."""
    from spark_elastic.ml.estimator import ElasticEstimator

    by_subject: dict[str, list[Any]] = {}
    for cls in ElasticEstimator.__mro__:
        if own := _declared(cls):
            subject = (cls.__doc__ or "").strip().splitlines()[0].rstrip(".")
            by_subject[subject] = own + by_subject.get(subject, [])  # those of the base first
    parts = [[f"**{subject}**", "", *_setting_rows(own), ""] for subject, own in by_subject.items()]
    return "\n".join(line for part in parts for line in part)


def torch_settings() -> str:
    from spark_elastic import ElasticTorchEstimator

    return "\n".join([*_setting_rows(_declared(ElasticTorchEstimator)), ""])


def keras_settings() -> str:
    """Return the table of the Keras settings. Importing the class needs no Keras; making one does."""
    from spark_elastic import ElasticKerasEstimator

    return "\n".join([*_setting_rows(_declared(ElasticKerasEstimator)), ""])


def _declared(cls: type) -> list[Any]:
    from pyspark.ml.param import Param

    return [value for value in vars(cls).values() if isinstance(value, Param)]


def _setting_rows(settings: list[Any]) -> list[str]:
    rows = [
        f"| `{each.name}` | {'' if each.default is None else f'`{each.default!r}`'} | {_cell(each.doc)} |"
        for each in settings
    ]
    return ["| name | default | meaning |", "|---|---|---|", *rows]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- benchmarks.md ----------------------------------------------------------------------------------------------------


CAPTIONS = {
    "allreduce.json": "one reduction by size, against Gloo",
    "control-plane.json": "the driver with 10 to 3,000 simulated workers on real connections",
    "data-write.json": "rows from Spark into packed records, against Parquet and against row by row",
    "data_read.json": "shuffled batches of 1,024 from packed records, one group gathered ahead",
    "data_read_peer_resident.json": "shuffled batches of 1,024 from the page cache, two groups gathered ahead",
    "fit.json": "a whole fit of an estimator, 200 k rows × 20, 3 epochs, warm session",
    "fit_kept.json": "a whole fit with keep_workers, and a second fit on the same rows",
    "large-join.json": "the others' pause when a worker joins, by the size of parameters and optimizer state",
    "peers.json": "elastic training compared with its peers, the same small model in two workers",
    "recovery-executor-local-cluster.json": "kill -9 of an executor's JVM, local-cluster",
    "recovery-executor-standalone.json": "kill -9 of an executor's JVM, standalone cluster",
    "recovery-link-namespaces.json": "the link of a host (a network namespace) is taken down, heartbeat_timeout 2 s",
    "recovery-stop-processes.json": "SIGSTOP of a worker, heartbeat_timeout 2 s",
    "recovery-worker-processes.json": "SIGKILL of a worker",
    "recovery-worker-processes-4-32-on-8-hosts.json": "SIGKILL of a worker, 8 hosts (loopback), busy machine",
    "recovery-worker-processes-4-8-12-16.json": "SIGKILL of one of 4, 8, 12 or 16 workers that share two cores",
    "recovery-worker-processes-keras.json": "SIGKILL of a worker in the middle of model.fit",
    "start-local-cluster.json": "from the call to the first step, 2 workers, local-cluster, warm session",
    "start-local-cluster-kept.json": "from the call to the first step, with keep_workers, local-cluster",
    "start-standalone-kept.json": "from the call to the first step, with keep_workers, standalone cluster",
    "start-standalone.json": "from the call to the first step, 2 workers, standalone cluster",
    "step_time.json": "a step, against DistributedDataParallel",
    "transform.json": "rows a second of a fitted model, 1 M rows",
    "workloads.json": "from a DataFrame to a model: rows a second and core, beside the same model on tensors in memory",
}


def results() -> str:
    """Return a row for each file in `benchmarks/results`, with the machine's load when it was measured."""
    rows = []
    for path in sorted(RESULTS.glob("*.json")):
        document = json.loads(path.read_text())
        machine = document["machine"] if "series" in document else {}
        when, load = machine.get("when", "")[:10], machine.get("load_average_1min", document.get("load", [""])[0])
        rows.append(f"| `{path.name}` | {CAPTIONS[path.name]} | {when} | {load} |")
    return "\n".join(["| file | what | when | load |", "|---|---|---|---|", *rows, ""])


def storms() -> str:
    """Return what `tests/storms/chaos.py` found: a row for each storm, and the faults with how often each was done."""
    rows, counts = [], Counter[str]()
    for path in sorted(STORMS.glob("chaos-*.json")):
        document = json.loads(path.read_text())
        for each in document["raw"]["storms"]:
            counts.update(fault["kind"] for fault in each["faults"])
            wrong = len(each["lost_steps"]) + len(each["problems"])
            cells = [each["on"], each["loop"], each["seed"], len(each["faults"]), each["worlds"], f"{each['steps']:,}"]
            live = f"{each['live_goodput']:.1%}" if "live_goodput" in each else "–"
            cells += [each["repeated_steps"], wrong, f"{each['goodput']:.0%}", live, f"{each['worst_stall_s']:.1f} s"]
            rows.append(f"| {' | '.join(map(str, cells))} | {document['machine']['load_average_1min']:.1f} |")
    heads = ["site", "loop", "seed", "faults", "worlds", "steps", "steps done again", "problems", "goodput"]
    heads += ["goodput of live workers", "longest time without a step", "load"]
    faults = [f"| {kind.about} | {counts[name]} |" for name, kind in chaos_faults().items() if counts[name]]
    total = f"In all {sum(counts.values()):,} faults:"
    table = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *rows]
    return "\n".join([*table, "", total, "", "| fault | how often |", "|---|---|", *faults, ""])


def chaos_faults() -> dict[str, Any]:
    """Return the kinds of faults of `tests/storms/chaos.py`."""
    sys.path.insert(0, str(ROOT))
    try:
        return dict(importlib.import_module("tests.storms.chaos_faults").FAULTS)
    finally:
        sys.path.remove(str(ROOT))


def hostile() -> str:
    """Return the figures of `tests/storms/fuzz.py`."""
    rows = []
    names = ("fuzz", "fuzz-documents", "checkpoint-kills-own")
    for name in (f"{each}.json" for each in names):
        path = STORMS / name
        if path.exists():
            document = json.loads(path.read_text())
            when, load = document["machine"]["when"][:10], document["machine"]["load_average_1min"]
            rows += [
                f"| `{name}`, {when}, load {load} | {_cell(s['name'])} | {_number(s['p50'])} {s['unit']} "
                f"| {_number(s['max'])} {s['unit']} |"
                for s in document["series"]
            ]
    return "\n".join(["| run | what | median | largest |", "|---|---|---|---|", *rows, ""])


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
    grows = ", ".join(f"{name} N^{value:.2f}" for name, value in raw["exponents"].items())
    when = f"{machine['when'][:10]}, {machine['cores']} cores, load {machine['load_average_1min']}"
    parts = [*table, "", f"Medians ({when}).{f' With N workers, from 30 on: {grows}.' if grows else ''}", ""]
    if (DOCS / "images" / "control_plane.png").exists():
        parts += ["![The same on logarithmic axes, by the number of workers](images/control_plane.png)", ""]
    events = raw.get("machine") or {}
    if events:
        sizes = list(events)
        parts += ["The membership machine alone, the mean of one event:", ""]
        parts += [
            f"| event | {' | '.join(f'{int(size):,} workers' for size in sizes)} |",
            f"|{'---|' * (1 + len(sizes))}",
        ]
        for what in events[sizes[0]]:
            parts.append(f"| {what} | {' | '.join(f'{_number(events[size][what])} us' for size in sizes)} |")
        parts.append("")
    return "\n".join(parts)


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
    heads = ["row", "Python", "pyspark", "torch", "Keras, TensorFlow", "pandas", "pyarrow", "numpy", *checks]
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    notes = []
    for name, row in rows.items():
        found = {what: version.partition("+")[0] for what, version in row["versions"].items()}
        keras = ", ".join(found[what] for what in ("keras", "tensorflow-cpu") if what in found)
        cells = [name, row["python"], *(found.get(what, "–") for what in ("pyspark", "torch")), keras or "–"]
        cells += [found.get(what, "–") for what in ("pandas", "pyarrow", "numpy")]
        outcomes = row["checks"]
        cells += [_OUTCOMES.get(outcomes.get(check, ""), "–") for check in checks]
        lines.append(f"| {' | '.join(cells)} |")
        missing: dict[str, list[str]] = {}
        for check, outcome in outcomes.items():
            if outcome not in _OUTCOMES:
                missing.setdefault(outcome, []).append(check)
        told = [f"{', '.join(left_out)} not run: {why}" for why, left_out in missing.items()]
        notes.append(f"- **{name}**: {'; '.join([row['about'], *row['remarks'], *told])}.")
    explained = [f"| {name} | {about} |" for name, about in checks.items()]
    return "\n".join([*lines, "", *notes, "", "| check | what it shows |", "|---|---|", *explained, ""])


_OUTCOMES = {"passed": "yes", "failed": "**no**"}

PARTS: dict[str, Callable[[], str]] = {
    "phase_diagram": lambda: diagram(PHASES),
    "phase_states": lambda: states(PHASES),
    "phase_transitions": lambda: transitions(PHASES),
    "worker_diagram": lambda: diagram(WORKERS),
    "worker_states": lambda: states(WORKERS),
    "worker_transitions": lambda: transitions(WORKERS),
    "messages": message_tables,
    "events": lambda: dataclass_table(events, "event"),
    "commands": lambda: dataclass_table(commands, "command"),
    "error_tree": error_tree,
    "run_settings": run_settings,
    "common_settings": common_settings,
    "torch_settings": torch_settings,
    "keras_settings": keras_settings,
    "results": results,
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
