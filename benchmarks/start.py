"""From the call of `run` to the first optimizer step, on a warm SparkContext; TorchDistributor in turns with it.

python benchmarks/start.py
python benchmarks/start.py --on local-cluster
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import peer_torch_distributor
from _harness import Series, parser, report
from peer_torch_distributor import first_step_with_torch_distributor
from pyspark import cloudpickle

import spark_elastic
from tests.integration import clusters

cloudpickle.register_pickle_by_value(peer_torch_distributor)  # executors do not have this folder


def one_step(path: str) -> None:
    """Train for one step and write down when it was done."""
    import torch

    import spark_elastic.torch as hvd

    hvd.init()
    model = torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = hvd.elastic.TorchState(model=model, optimizer=optimizer)

    @hvd.elastic.run
    def loop(state: Any) -> None:
        torch.nn.functional.cross_entropy(model(torch.randn(64, 784)), torch.randint(0, 10, (64,))).backward()
        optimizer.step()
        Path(path, f"first-step-{hvd.rank()}").write_text(repr(time.time()))

    loop(state)


def first_step(spark: Any, num_proc: int) -> float:
    """Seconds from the call to the first step of the last worker."""
    with tempfile.TemporaryDirectory() as folder:
        start = time.time()
        spark_elastic.run(one_step, (folder,), num_proc=num_proc, spark=spark, verbose=0)
        return max(float(path.read_text()) for path in Path(folder).iterdir()) - start


def main() -> None:
    arguments = parser(__doc__, repeat=7)
    arguments.add_argument("--on", choices=["local-cluster", "standalone"], default="standalone")
    args = arguments.parse_args()
    repeat = 2 if args.quick else args.repeat
    ours, theirs = [], []
    make = {
        "local-cluster": lambda: clusters.local_cluster(2, 1),
        "standalone": lambda: clusters.standalone(workers=2, cores=1),
    }[args.on]
    with make() as cluster:
        cluster.sc.parallelize(range(2), 2).map(
            lambda x: x
        ).collect()  # warm: executors and their Python daemons are up
        for _ in range(repeat):
            ours.append(first_step(cluster.spark, 2))
            theirs.append(first_step_with_torch_distributor(cluster.spark, 2))
            print(f"{ours[-1]:.2f} s, TorchDistributor {theirs[-1]:.2f} s", file=sys.stderr)
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    report(
        f"start-{args.on}",
        args,
        Series("run -> first step", ours, "s"),
        Series("TorchDistributor -> first step", theirs, "s"),
        Series("ratio of neighbours", ratios, "", target_p50=0.5),
        raw={"ours": ours, "torch_distributor": theirs},
    )


if __name__ == "__main__":
    main()
