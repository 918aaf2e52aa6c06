"""How fast and how well shuffled batches come from a materialised set, and what memory that takes.

A: 20 float32 and a label, 88 B a row. B: 784 float32 and a label. C: 3 KiB of bytes and a label. Batches of 1,024,
one reader. Resident: the files are in the page cache; each round measures the reader between two gathers with a
ready-made permutation from the same file, `np.take`, which is what it is compared with. Cold: they are not, and the
windows cover a small part of the set, as with sets larger than memory; compared with reading the same files in chunks
of 256 KiB one after another. Remote: from an S3-compatible server on this machine (moto, which is far slower than a
real one), with an empty cache and with the cache that this left.

    python benchmarks/data_read.py [--peer-python PYTHON_WITH_PETASTORM] [--data DIR]
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import mmap
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from _harness import Series, parser, report

from spark_elastic.data.dataset import Dataset, pack
from spark_elastic.data.files import SETTING
from spark_elastic.data.manifest import MANIFEST_NAME, Layout, Manifest, Shard, TensorField
from spark_elastic.data.order.permutation import GlobalOrder
from spark_elastic.data.order.windows import Order, WindowedShuffle, WindowSettings, window_settings
from spark_elastic.data.reader import BatchReader
from spark_elastic.data.store import Store

BATCH = 1024
ROWS = {"A": 2_000_000, "B": 200_000, "C": 50_000}
LANES_NS = {"A": 1e3 / 6.5, "B": 1e3 / 1.2, "C": 1e3 / 1.1}
PEER_TIMES = {"A": 6, "B": 20, "C": 20}
CHUNK = 256 << 10
PARTS = ["resident", "cold", "remote", "quality", "memory", "peer"]
BUCKET = "rows"
PEER = Path(__file__).with_name("peer_petastorm.py")


def values(shape: str, rows: int) -> np.ndarray:
    random = np.random.default_rng(0)
    if shape == "C":
        return random.integers(0, 256, (rows, 3072), dtype=np.uint8)
    return random.random((rows, 20 if shape == "A" else 784), dtype=np.float32)


def made(where: Path, shape: str, rows: int, shards: int = 1) -> Dataset:
    """The set in that folder, written if it is not there yet. label: the row's number."""
    if not (where / MANIFEST_NAME).exists():
        pack({"features": values(shape, rows), "label": np.arange(rows)}, where, shards=shards, shard_bytes=2 << 30)
        os.sync()
    return Dataset.open(where)


def files_of(dataset: Dataset) -> list[Path]:
    return [dataset.store.local_path(shard.file) for shard in dataset.manifest.splits["train"]]


def seconds(action: Callable[[], Any]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def epoch(reader: BatchReader, number: int) -> None:
    rows = 0
    for batch in reader.epoch(number):
        rows += batch.rows
    assert rows == reader.rows


# --- resident -----------------------------------------------------------------------------------


def resident(name: str, dataset: Dataset, rounds: int) -> tuple[list[Series], dict[str, list[float]]]:
    rows, stride = dataset.rows(), dataset.layout.stride
    maps = [np.memmap(file, np.dtype((np.void, stride)), "r") for file in files_of(dataset)]
    whole = maps[0] if len(maps) == 1 else np.concatenate(maps)  # several shards: against one array in memory
    permutation = np.random.default_rng(1).permutation(rows)

    def take() -> None:
        for start in range(0, rows, BATCH):
            np.take(whole, permutation[start : start + BATCH])

    flat = whole.view(np.uint8)
    copy = np.empty(4 << 20, np.uint8)

    def sequential() -> None:
        for start in range(0, len(flat), len(copy)):
            part = flat[start : start + len(copy)]
            copy[: len(part)] = part

    ns: dict[str, list[float]] = {"np.take": [], "global": [], "lanes": [], "sequential copy": []}
    with (
        BatchReader(dataset, batch_size=BATCH, order="global") as true,
        BatchReader(dataset, batch_size=BATCH, order="lanes") as lanes,
    ):
        seen = np.concatenate([batch["label"].copy() for batch in true.epoch(0)])
        assert (np.sort(seen) == np.arange(rows)).all()
        epoch(lanes, 0)
        take()
        for number in range(1, rounds + 1):
            for way, action in (
                ("np.take", take),
                ("global", lambda: epoch(true, number)),  # noqa: B023
                ("np.take", take),
                ("lanes", lambda: epoch(lanes, number)),  # noqa: B023
            ):
                ns[way].append(seconds(action) / rows * 1e9)
        ns["sequential copy"] = [seconds(sequential) / rows * 1e9 for _ in range(3)]
    shape = name[0]
    single = len(maps) == 1
    # each against the gathers before and after it in its round
    takes = np.array(ns["np.take"]).reshape(-1, 2).mean(1)
    ratio = (np.array(ns["global"]) / takes).tolist()
    return [
        Series(f"{name}: np.take, ready-made permutation", ns["np.take"], "ns/row"),
        Series(f"{name}: reader, global", ns["global"], "ns/row"),
        Series(f"{name}: reader, global, over np.take", ratio, "times", target_p50=1 / 0.85),
        Series(f"{name}: reader, lanes", ns["lanes"], "ns/row", target_p50=LANES_NS[shape] if single else None),
        Series(f"{name}: sequential copy", ns["sequential copy"], "ns/row"),
    ], ns


# --- not in memory ------------------------------------------------------------------------------


def dropped(dataset: Dataset) -> None:
    """Takes the set's files out of the page cache."""
    for path in files_of(dataset):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def chunk_reads(dataset: Dataset) -> None:
    buffer = memoryview(bytearray(CHUNK))
    for path in files_of(dataset):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def cold(name: str, dataset: Dataset, rounds: int) -> tuple[list[Series], dict[str, list[float]]]:
    rows, stride = dataset.rows(), dataset.layout.stride
    windows = window_settings(rows, stride, open_bytes=rows * stride // 8)
    ns: dict[str, list[float]] = {"chunks": [], "lanes": [], "global": []}
    for number in range(rounds):
        dropped(dataset)
        ns["chunks"].append(seconds(lambda: chunk_reads(dataset)) / rows * 1e9)
        for way, options in (("lanes", {"order": "lanes", "lanes": windows}), ("global", {"order": "global"})):
            dropped(dataset)
            with BatchReader(dataset, batch_size=BATCH, **options) as reader:
                ns[way].append(seconds(lambda: epoch(reader, number)) / rows * 1e9)  # noqa: B023
            dropped(dataset)
    ratio = (np.array(ns["lanes"]) / np.array(ns["chunks"])).tolist()
    return [
        Series(f"{name}, cold: sequential chunk reads", ns["chunks"], "ns/row"),
        Series(f"{name}, cold: reader, lanes, windows of an eighth", ns["lanes"], "ns/row"),
        Series(f"{name}, cold: lanes over chunk reads", ratio, "times", target_p50=1 / 0.7),
        Series(f"{name}, cold: reader, global", ns["global"], "ns/row"),
    ], ns


# --- a remote store -------------------------------------------------------------------------------


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Run an S3-compatible server on this machine, with a bucket, while the block runs; the value is its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 30
        while True:
            try:
                put = urllib.request.Request(f"http://{address}/{BUCKET}", method="PUT")
                urllib.request.urlopen(put, timeout=5).close()
                break
            except OSError:
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError("the S3 server of moto does not answer; is moto[server] installed?") from None
                time.sleep(0.1)
        yield address
    finally:
        server.terminate()
        server.wait()


def download(dataset: Dataset) -> None:
    for shard in dataset.manifest.splits["train"]:
        with dataset.store.open_input(shard.file) as stream:
            while stream.read(4 << 20):
                pass


def remote(folder: Path, address: str, rounds: int) -> tuple[list[Series], dict[str, list[float]]]:
    rows = 500_000
    options = f"scheme=http&endpoint_override={address}&region=us-east-1"
    tensors = {"features": values("A", rows), "label": np.arange(rows)}
    local = pack(tensors, folder / "local", shards=4)
    far = pack(tensors, f"s3://{BUCKET}/A?{options}", shards=4)
    ns: dict[str, list[float]] = {}

    def measure(way: str, dataset: Dataset, number: int, **more: Any) -> None:
        with BatchReader(dataset, batch_size=BATCH, **more) as reader:
            ns.setdefault(way, []).append(seconds(lambda: epoch(reader, number)) / rows * 1e9)

    for number in range(rounds):
        ns.setdefault("download", []).append(seconds(lambda: download(far)) / rows * 1e9)
        for order in ("global", "lanes"):
            cache = folder / f"cache-{order}-{number}"
            measure(f"{order}, cold", far, number, order=order, cache_dir=cache)
            measure(f"{order}, warm", far, number, order=order, cache_dir=cache)
            measure(f"{order}, local", local, number, order=order)
            shutil.rmtree(cache)
    series = [Series("A, S3: download of its files, one after another", ns["download"], "ns/row")]
    for order in ("global", "lanes"):
        cold, warm, near = (np.array(ns[f"{order}, {way}"]) for way in ("cold", "warm", "local"))
        slower = cold / np.array(ns["download"])
        series += [
            Series(f"A, S3: reader, {order}, empty cache", cold.tolist(), "ns/row"),
            Series(
                f"A, S3: reader, {order}, empty cache, over the download",
                slower.tolist(),
                "times",
            ),
            Series(f"A, S3: reader, {order}, warm cache", warm.tolist(), "ns/row"),
            Series(f"A, S3: reader, {order}, warm cache, over a local dataset", (warm / near).tolist(), "times"),
        ]
    return series, ns


# --- how well it is shuffled ----------------------------------------------------------------------


def spread(labels: np.ndarray) -> float:
    """Return the variance of the label mix between batches, divided by its variance under true shuffles.

    The table is sorted by 10 equally frequent labels.

    Args:
        labels: shape (batches, rows of a batch), each in 0..9.
    """
    counts = np.stack([(labels == label).sum(1) for label in range(10)])
    return float(counts.var(1).mean() / (labels.shape[1] * 0.09))


def quality(order: Order, batches: int) -> float:
    first = (order.rows // 2) // BATCH * BATCH
    rows = [order.take([start, start + BATCH], 0, 1)[0] for start in range(first, first + batches * BATCH, BATCH)]
    return spread(np.stack(rows) // -(-order.rows // 10))


# --- memory -----------------------------------------------------------------------------------------


def endless(where: Path, rows: int) -> Dataset:
    """A set of that many rows of 88 B whose files are holes: no disk holds it, and nothing is read from one."""
    layout = Layout.of([TensorField("features", ("f",), "<f4", (20,)), TensorField("label", ("l",), "<i8", ())])
    per_shard = (512 << 20) // layout.stride
    store, shards = Store.create(where), []
    where.mkdir(parents=True, exist_ok=True)
    for number in range(-(-rows // per_shard)):
        count = min(per_shard, rows - number * per_shard)
        path = where / f"{number}.rows"
        path.touch()
        os.truncate(path, count * layout.stride)
        shards.append(Shard(path.name, count, count * layout.stride, 0))
    store.write_bytes(MANIFEST_NAME, Manifest(layout, {"train": tuple(shards)}).dumps())
    return Dataset.open(where)


def private_bytes() -> int:
    """Memory of this process that no other can share: pages that are not of a file."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def memory_of(where: str, order: str) -> None:
    """In a process of its own: prints the private MB that a reader adds, and ms to the first batch of a resume."""
    dataset = Dataset.open(where)
    before = private_bytes()
    reader = BatchReader(dataset, batch_size=BATCH, order=order)
    batches = reader.epoch(3, reader.rows // 2)
    first = seconds(lambda: next(batches)) * 1e3
    peak, ended = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not ended.wait(0.02):
            peak = max(peak, private_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    for _, _ in zip(range(1000), batches, strict=False):
        pass
    ended.set()
    watcher.join()
    reader.close()
    print(json.dumps({"private_mb": (max(peak, private_bytes()) - before) / 1e6, "first_batch_ms": first}))


def resume(dataset: Dataset) -> list[float]:
    """ms until the rows of the first batch of a resume in the middle of an epoch are known, per world of 8."""
    settings = window_settings(dataset.rows(), dataset.layout.stride)

    def once(number: int) -> None:
        WindowedShuffle(dataset.rows(), 0, number, settings).take(
            [dataset.rows() // 2, dataset.rows() // 2 + BATCH], 3, 8
        )

    return [seconds(lambda: once(number)) * 1e3 for number in range(5)]  # noqa: B023


# --- all of it --------------------------------------------------------------------------------------


def ran(command: list[str], **environment: str) -> Any:
    env = os.environ | {"PYTHONWARNINGS": "ignore"} | environment
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=env)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    arguments = parser(__doc__, repeat=7)
    arguments.add_argument("--peer-python", metavar="PYTHON", help="of an environment with petastorm, see README.md")
    arguments.add_argument("--data", type=Path, metavar="DIR", help="where the sets are kept (a temporary folder)")
    arguments.add_argument("--only", nargs="*", metavar="PART", help=", ".join(PARTS))
    arguments.add_argument("--memory-of", nargs=2, help="(internal)")
    args = arguments.parse_args()
    if args.memory_of:
        memory_of(*args.memory_of)
        return
    parts = args.only or PARTS
    rounds = 2 if args.quick else args.repeat
    series: list[Series] = []
    raw: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        data = args.data or Path(temporary)
        if "resident" in parts:
            for name, shards in (("A", 1), ("B", 1), ("C", 1), ("A in 8 shards", 8)):
                dataset = made(data / name.replace(" ", "-"), name[0], ROWS[name[0]], shards)
                found, raw[name] = resident(name, dataset, rounds)
                series += found
        if "cold" in parts:
            for name, rows in (("A", 8_000_000), ("B", 200_000)):
                dataset = made(data / f"cold-{name}", name, rows, shards=4)
                found, raw[f"{name} cold"] = cold(name, dataset, 2 if args.quick else 3)
                series += found
        if "remote" in parts:
            if importlib.util.find_spec("moto") is None:
                print("remote: left out, because moto is not installed (pip install 'moto[server]')", file=sys.stderr)
            else:
                with s3_server() as address, tempfile.TemporaryDirectory() as folder:
                    found, raw["A, S3"] = remote(Path(folder), address, 2 if args.quick else 3)
                    series += found
        if "quality" in parts:
            large = window_settings(100_000_000, 88)
            orders = {
                "global, 2 M rows": GlobalOrder(2_000_000, 0, 0),
                "lanes, 2 M rows, one window a lane": WindowedShuffle(2_000_000, 0, 0, window_settings(2_000_000, 88)),
                "lanes, 100 M rows (8.8 GB), windows of 1 GiB": WindowedShuffle(100_000_000, 0, 0, large),
                "lanes, 2 M rows, 128 chunks open": WindowedShuffle(2_000_000, 0, 0, WindowSettings(64, 2048, 4096)),
            }
            for name, order in orders.items():
                target = None if "128" in name else 1.3
                series.append(Series(f"spread, {name}", [quality(order, 900)], "times", target_p50=target))
        if "memory" in parts:
            for order, rows in (("lanes", 10_000_000 if args.quick else 1_000_000_000), ("global", 10_000_000)):
                dataset = endless(data / f"endless-{rows}", rows)
                command = [sys.executable, __file__, "--memory-of", str(data / f"endless-{rows}"), order]
                found = ran(command, **{SETTING: "off"})  # the files are holes, and have no checksums to compare with
                name = f"{order}, {rows:.0e} rows of 88 B"
                series.append(Series(f"private memory, {name}", [found["private_mb"]], "MB", target_max=150))
                if order == "lanes":
                    series.append(Series(f"entered in its middle, {name}", resume(dataset), "ms"))
                raw[f"memory, {name}"] = found
        if "peer" in parts and args.peer_python:
            for shape, rows in ROWS.items():
                found = ran([args.peer_python, str(PEER), shape, "--rows", str(rows), "--repeat", "3"])
                ns = [second / rows * 1e9 for second in found["seconds"]]
                raw[f"petastorm {shape}"] = ns
                series.append(Series(f"{shape}: Petastorm, batched loader", ns, "ns/row"))
                if shape in raw:
                    factor = float(np.median(raw[shape]["global"]) / np.median(ns))
                    target = 1 / PEER_TIMES[shape]
                    series.append(Series(f"{shape}: reader over Petastorm", [factor], "times", target_p50=target))
            labels = ran([args.peer_python, str(PEER), "sorted", "--rows", "2000000"])["labels"]
            series.append(
                Series("spread, Petastorm, shuffling queue of 100,000 rows", [spread(np.array(labels))], "times")
            )
    raw["page"] = mmap.PAGESIZE
    name = "_".join(["data_read", *sorted(args.only or [])])  # figures of some parts do not replace those of all
    report(name, args, *series, raw=raw)


if __name__ == "__main__":
    main()
