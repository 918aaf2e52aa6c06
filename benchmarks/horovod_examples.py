"""Horovod's own elastic examples, run on this package with one worker killed: which of them finish.

    git clone https://github.com/horovod/horovod
    python benchmarks/horovod_examples.py horovod [--only pytorch_mnist ...]

Each example runs unchanged in three local workers, with Horovod's modules standing for ours (`_horovod_names`). Data
sets and models that would be downloaded, or that take a GPU, are replaced by small synthetic ones, and epochs of Keras
have ten steps at most. When the training
has begun, one worker is killed with SIGKILL; another is started in its place. An example passes if the job
ends without an error, with all its epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import types
from pathlib import Path
from typing import Any

from _harness import RESULTS, machine, table

EXAMPLES: dict[str, list[str]] = {
    "pytorch/pytorch_mnist_elastic.py": ["--epochs", "2", "--batch-size", "16"],
    "pytorch/pytorch_synthetic_benchmark_elastic.py": ["--batch-size", "2", "--num-iters", "20"],
    "pytorch/pytorch_imagenet_resnet50_elastic.py": ["--epochs", "2", "--batch-size", "8", "--batches-per-commit", "5"],
    "tensorflow2/tensorflow2_mnist_elastic.py": [],
    "tensorflow2/tensorflow2_keras_mnist_elastic.py": [],
    "tensorflow2/tensorflow2_synthetic_benchmark_elastic.py": [
        *("--model", "MobileNetV2", "--batch-size", "1", "--num-iters", "20"),
        *("--num-batches-per-iter", "2", "--num-warmup-batches", "2", "--no-cuda"),
    ],
    "tensorflow/tensorflow_keras_mnist_elastic.py": ["--epochs", "2", "--batches-per-epoch", "60"],
}
WORKERS = 3
STEPS_OF_AN_EPOCH = 10
KILL_AT = 1
"""Steps after which a worker is killed; the shortest example has about thirty."""


# --- in a worker ------------------------------------------------------------------------------------


def run_example(path: str, options: list[str], folder: str) -> str:
    import runpy

    import _horovod_names

    _horovod_names.install()
    own = Path(folder, str(os.getpid()))
    own.mkdir(exist_ok=True)  # a function whose world broke after its loop is called again in the same process
    os.chdir(own)
    if "pytorch" in path:
        sys.modules.update(_torchvision())
    else:
        _small_mnist(side=28 if path.endswith("tensorflow_keras_mnist_elastic.py") else 8)
    sys.argv = [path, *options]
    runpy.run_path(path, run_name="__main__")
    return "done"


def _small_mnist(side: int) -> None:
    import numpy as np
    import tensorflow as tf

    def load_data(path: str = "") -> Any:
        random = np.random.default_rng(0)
        images = random.integers(0, 255, (512, side, side)).astype("uint8")
        return (images, random.integers(0, 10, 512).astype("uint8")), (images, images)

    tf.keras.datasets.mnist.load_data = load_data
    plain = tf.keras.Model.fit

    def fit(*args: Any, steps_per_epoch: int, **kwargs: Any) -> Any:
        return plain(*args, steps_per_epoch=min(steps_per_epoch, STEPS_OF_AN_EPOCH), **kwargs)

    tf.keras.Model.fit = fit


def _torchvision() -> dict[str, types.ModuleType]:
    """As much of torchvision and tensorboard as the examples use."""
    import torch

    class Images(torch.utils.data.Dataset):  # type: ignore[misc]
        def __init__(self, root: Any, train: bool = True, download: bool = False, transform: Any = None) -> None:
            self.shape, self.classes = ((1, 28, 28), 10) if "mnist" in sys.argv[0] else ((3, 32, 32), 10)

        def __len__(self) -> int:
            return 960

        def __getitem__(self, at: int) -> Any:
            return torch.full(self.shape, at / 960), at % self.classes

    def network(*_: Any, **__: Any) -> Any:
        parts = torch.nn
        return parts.Sequential(
            parts.Conv2d(3, 4, 3, 2),
            parts.BatchNorm2d(4),
            parts.AdaptiveAvgPool2d(4),
            parts.Flatten(),
            parts.Linear(64, 1000),
        )

    class Nothing:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    names: dict[str, dict[str, Any]] = {
        "torchvision": {},
        "torchvision.datasets": {"MNIST": Images, "ImageFolder": Images},
        "torchvision.models": {"resnet50": network},
        "torchvision.transforms": dict.fromkeys(
            ("Compose", "ToTensor", "Normalize", "RandomResizedCrop", "RandomHorizontalFlip", "Resize", "CenterCrop"),
            Nothing,
        ),
        "torch.utils.tensorboard": {"SummaryWriter": Nothing},
    }
    made = {}
    for name, content in names.items():
        made[name] = types.ModuleType(name)
        vars(made[name]).update(content)
    for part in ("datasets", "models", "transforms"):
        setattr(made["torchvision"], part, made[f"torchvision.{part}"])
    return made


# --- in the launching process -----------------------------------------------------------------------


def run_one(path: Path, options: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Run one example; return whether it finished, how many worlds it had, and why it did not finish."""
    from spark_elastic import LocalLauncher, run_async
    from spark_elastic.membership.timeline import WorldStarted

    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "output").open("w+") as output:
        began = time.monotonic()
        job = run_async(
            run_example,
            (str(path.resolve()), options, folder),
            num_proc=WORKERS,
            min_num_proc=WORKERS - 1,
            max_num_proc=WORKERS,
            launcher=LocalLauncher(),
            verbose=0,
            stdout=sys.stdout if args.details else output,
            stderr=sys.stderr if args.details else output,
        )
        killed, why = False, ""
        try:
            while not job.done() and time.monotonic() - began < args.timeout:
                time.sleep(0.05)
                pids = [int(entry.name) for entry in Path(folder).iterdir() if entry.name.isdigit()]
                if not killed and (job.status().progress or 0) >= KILL_AT and len(pids) >= WORKERS:
                    os.kill(max(pids), signal.SIGKILL)
                    killed = True
            job.result(0)
        except Exception as error:
            why = str(error).strip()
        finally:
            job.cancel("it takes too long")
        worlds = sum(isinstance(record, WorldStarted) for record in job.events())
        seconds = round(time.monotonic() - began, 1)
        return {
            "finished": not why and killed,
            "killed": killed,
            "worlds": worlds,
            "seconds": seconds,
            "why": why[-1500:],
        }


def main() -> None:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("checkout", type=Path, nargs="?", help="a checkout of Horovod")
    made.add_argument(
        "--only", nargs="+", default=[], metavar="TEXT", help="examples that have one of these in the name"
    )
    made.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for one example (%(default)s)")
    made.add_argument("--details", action="store_true", help="show what the workers print")
    made.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the JSON file goes")
    args = made.parse_args()
    if args.checkout is None:
        print("left out: it needs the path of a checkout of Horovod")
        return
    path = args.results / "horovod_examples.json"
    document = json.loads(path.read_text()) if path.exists() else {"benchmark": "horovod_examples", "examples": {}}
    rows = []
    for name, options in EXAMPLES.items():
        if args.only and not any(text in name for text in args.only):
            continue
        found = run_one(args.checkout / "examples" / "elastic" / name, options, args)
        document["examples"][name] = {**found, "why": found["why"].splitlines()[-1:]}
        rows.append([name, "yes" if found["finished"] else "no", found["worlds"], found["seconds"]])
        print(f"{'finished' if found['finished'] else 'NOT finished'}: {name}\n{found['why']}", flush=True)
    print("\n" + table(["example", "finished", "worlds", "s"], rows))
    document["machine"] = machine()
    args.results.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")
    print(f"written to {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
