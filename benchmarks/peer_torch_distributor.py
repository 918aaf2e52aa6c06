"""How long Spark's own TorchDistributor takes from the call to the first training step, for comparison.

python benchmarks/peer_torch_distributor.py [standalone|local_cluster|local] [repeats]
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def train_until_first_step(folder: str) -> None:
    """A small MLP under DistributedDataParallel on Gloo; each rank writes the time of its first step."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    model = DistributedDataParallel(
        torch.nn.Sequential(torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 784)), torch.randint(10, (64,)))
    loss.backward()
    optimizer.step()
    Path(folder, f"rank-{dist.get_rank()}").write_text(repr(time.time()))
    dist.destroy_process_group()


def first_step_with_torch_distributor(spark: Any, num_proc: int) -> float:
    """Seconds from the call of `TorchDistributor(...).run` to the moment the last rank has done its first step.

    `spark` has to be the active session, and its executors have to share this machine's clock and file system.

    Raises:
        RuntimeError: not every rank did a step.
    """
    from pyspark.ml.torch.distributor import TorchDistributor

    with tempfile.TemporaryDirectory(prefix="torch-distributor-") as folder:
        start = time.time()
        TorchDistributor(num_processes=num_proc, local_mode=False, use_gpu=False).run(train_until_first_step, folder)
        stamps = [float(path.read_text()) for path in Path(folder).glob("rank-*")]
    if len(stamps) != num_proc:
        raise RuntimeError(f"{len(stamps)} of {num_proc} ranks did a step")
    return max(stamps) - start


def main(kind: str = "standalone", repeats: int = 3) -> None:
    from tests.integration import clusters

    with getattr(clusters, kind)() as cluster:
        seconds = [first_step_with_torch_distributor(cluster.spark, 2) for _ in range(repeats)]
    print(json.dumps({"cluster": kind, "first_step_s": seconds, "median_s": statistics.median(seconds)}))


if __name__ == "__main__":
    main(*sys.argv[1:2], *(int(word) for word in sys.argv[2:3]))
