"""Elastic training with Ray Train, in an environment of its own (see README.md).

Told what to do by lines on its standard input: "go" starts the training on a warm cluster, "add" brings one more node;
at the end of the input everything is taken down.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path

os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")  # 2 by default: how soon a lost worker is seen
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import ray
import ray.train
import ray.train.torch
import torch
from _peer_training import CHECKPOINT_EVERY, StepFile, gradients, parts
from ray.cluster_utils import Cluster


def train(config: dict) -> None:
    model, optimizer, inputs, labels = parts()
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            found = torch.load(Path(folder, "checkpoint.pt"))
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        step = found["step"]
    model = ray.train.torch.prepare_model(model)  # DistributedDataParallel where there is more than one worker
    bare = getattr(model, "module", model)
    context = ray.train.get_context()
    size, rank = context.get_world_size(), context.get_world_rank()
    steps = StepFile(config["folder"])
    while True:
        gradients(model, optimizer, inputs, labels)
        optimizer.step()
        step += 1
        steps.write(size, rank, step)
        if step % CHECKPOINT_EVERY == 0:
            with tempfile.TemporaryDirectory() as folder:
                checkpoint = None
                if rank == 0:
                    document = {"model": bare.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(document, Path(folder, "checkpoint.pt"))
                    checkpoint = ray.train.Checkpoint.from_directory(folder)
                ray.train.report({}, checkpoint=checkpoint)


@ray.remote(num_cpus=1)
def nothing() -> None:
    import torch  # noqa: F401


def main(folder: str, nodes: int) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    for _ in range(nodes - 1):
        cluster.add_node(num_cpus=1)
    ray.init(address=cluster.address, log_to_driver=False)
    ray.get([nothing.remote() for _ in range(nodes)])
    trainer = ray.train.torch.TorchTrainer(
        train,
        train_loop_config={"folder": folder},
        scaling_config=ray.train.ScalingConfig(num_workers=(1, 2), elastic_resize_monitor_interval_s=1.0),
        run_config=ray.train.RunConfig(
            storage_path=str(Path(folder, "storage")),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    print("ready", flush=True)
    for line in sys.stdin:
        if line.strip() == "go":
            threading.Thread(target=trainer.fit, daemon=True).start()
        else:
            cluster.add_node(num_cpus=1)
    ray.shutdown()
    cluster.shutdown()
    os._exit(0)  # `fit` has no way to be told to end


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
