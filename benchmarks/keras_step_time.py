"""Step time of Keras' `model.fit` with DistributedOptimizer, against TensorFlow's own data parallelism.

Two processes on loopback train one model (784-512-512-10, batch 64 a process, SGD with momentum) in short blocks of
`model.fit` that take turns: plain `fit` without any reduction, ours, and `tf.distribute.MultiWorkerMirroredStrategy`
with its ring over gRPC. Reported are medians over the blocks and the median of the ratios of neighbouring blocks.

Keras 3 cannot run `fit` under that strategy as it comes (keras-team/keras#20585): it fails to build the metrics from
distributed values, and to put the replicas' logs together. Both are stepped around here (`_make_keras3_run`), which
makes its steps no slower. With `--steps-per-execution` above 1 it is left out: its graph has no value for a placeholder
there. If `tf_keras` is installed, the Keras 2 that the strategy was made for runs as well.

    python benchmarks/keras_step_time.py [--repeat 12] [--steps 200] [--steps-per-execution 1]
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from _harness import Series, parser, report

BATCH = 64
ADDRESS = "127.0.0.1"
THREADS = {"OMP_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1", "TF_NUM_INTEROP_THREADS": "2"}


def layers(keras: Any) -> list[Any]:
    dense = keras.layers.Dense
    return [keras.layers.Input((784,)), dense(512, activation="relu"), dense(512, activation="relu"), dense(10)]


def compiled(keras: Any, together: int, wrap: Callable[[Any], Any] = lambda optimizer: optimizer) -> Any:
    keras.utils.set_random_seed(1)
    model = keras.Sequential(layers(keras))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    optimizer = wrap(keras.optimizers.SGD(0.01, momentum=0.9))
    model.compile(optimizer, loss, metrics=["accuracy"], steps_per_execution=together)
    return model


def _make_keras3_run(model: Any, strategy: Any) -> None:
    import numpy as np
    import tensorflow as tf
    from keras.src.backend.tensorflow import trainer

    def first(values: Any, strategy: Any, reduction: Any) -> Any:
        return tf.nest.map_structure(lambda value: strategy.experimental_local_results(value)[0], values)

    with strategy.scope():
        model._symbolic_build(data_batch=(np.zeros((BATCH, 784), "f4"), np.zeros(BATCH, "i8")))
    model._maybe_symbolic_build = lambda **_: None
    trainer.reduce_per_replica = lambda values, at, reduction: (
        values if at.num_replicas_in_sync == 1 else first(values, at, reduction)
    )


def worker(rank: int, ports: list[int], repeat: int, steps: int, together: int, out: Path) -> None:
    cluster = {"worker": [f"{ADDRESS}:{port}" for port in ports[1:]]}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    import keras
    import numpy as np
    import tensorflow as tf
    import torch.distributed as dist
    from _fixed_world import FixedLink

    import spark_elastic.keras as hvd
    from spark_elastic.wire import worker_link

    communication = tf.distribute.experimental.CommunicationImplementation.RING
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=communication)
    )
    store = dist.TCPStore(ADDRESS, ports[0], 2, is_master=rank == 0, timeout=timedelta(seconds=60))
    worker_link.install(FixedLink(store, rank, ["127.0.0.1"] * 2))
    hvd.init()

    rng = np.random.default_rng(rank)
    x, y = rng.random((2 * BATCH * steps, 784), "f4"), rng.integers(0, 10, 2 * BATCH * steps)

    def batches(rows: int) -> Any:
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
        # its thread sleeps 10, 20, 40 ms and so on, and each `fit` would end with the end of such a sleep
        options.autotune.enabled = False
        data = tf.data.Dataset.from_tensor_slices((x[: rows * steps], y[: rows * steps])).batch(rows).cache()
        return data.prefetch(2).with_options(options)

    each, whole = batches(BATCH), batches(2 * BATCH)  # the strategy divides the batch among its processes
    plain, ours = compiled(keras, together), compiled(keras, together, hvd.DistributedOptimizer)
    with strategy.scope():
        theirs = compiled(keras, together)
    _make_keras3_run(theirs, strategy)
    runs = {
        "model.fit, no reduction": lambda: plain.fit(each, verbose=0),
        "spark_elastic": lambda: ours.fit(each, verbose=0),
    }
    if together == 1:  # Keras 3 cannot run several steps at once under the strategy
        runs["MultiWorkerMirroredStrategy"] = lambda: theirs.fit(whole, verbose=0)
    try:
        import tf_keras
    except ImportError:
        pass
    else:
        with strategy.scope():
            older = compiled(tf_keras, together)
        runs["MultiWorkerMirroredStrategy, Keras 2"] = lambda: older.fit(whole, verbose=0)
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for number in range(repeat):
        for name in runs if number % 2 else reversed(runs):
            hvd.barrier()
            start = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    hvd.barrier()
    hvd.shutdown()
    if rank == 0:
        out.write_text(json.dumps(times))
    os._exit(0)  # the strategy's servers would wait for one another


def main() -> None:
    arguments = parser(__doc__, repeat=12)
    arguments.add_argument("--steps", type=int, default=200, help="of a block (%(default)s)")
    arguments.add_argument("--steps-per-execution", type=int, default=1, help="as for compile (%(default)s)")
    arguments.add_argument("--worker", help="one of the two processes (for this script itself)")
    args = arguments.parse_args()
    if args.worker:
        rank, out, *ports = args.worker.split(",")
        together = args.steps_per_execution
        worker(int(rank), [int(port) for port in ports], args.repeat, args.steps, together, Path(out))
        return
    repeat = 3 if args.quick else args.repeat
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "times.json"
        ports = ",".join(str(port) for port in _free_ports(3))
        command = [sys.executable, __file__, "--repeat", str(repeat), "--steps", str(args.steps)]
        command += ["--steps-per-execution", str(args.steps_per_execution), "--worker"]
        processes = [
            subprocess.Popen([*command, f"{rank},{out},{ports}"], env={**os.environ, **THREADS}) for rank in range(2)
        ]
        try:
            codes = [process.wait(timeout=900) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            sys.exit(f"the processes have ended with {codes}")
        times = json.loads(out.read_text())
    series = [Series(name, values, "ms") for name, values in times.items()]
    for name, values in times.items():
        if name.startswith("Multi"):
            ratios = [a / b for a, b in zip(times["spark_elastic"], values, strict=True)]
            series.append(Series(f"spark_elastic / {name}", ratios, "", target_p50=1.0))
    alone = [a / b for a, b in zip(times["spark_elastic"], times["model.fit, no reduction"], strict=True)]
    series.append(Series("spark_elastic / no reduction", alone, ""))
    together = args.steps_per_execution
    report("keras_step_time" if together == 1 else f"keras_step_time_{together}_at_once", args, *series, raw=times)


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind((ADDRESS, 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


if __name__ == "__main__":
    main()
