"""Steps per second with a keyword `DistributedOptimizer` around `fit`, without an elastic loop."""

import argparse
import timeit

import keras
import numpy as np

import spark_elastic.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--fp16-allreduce", action="store_true")
parser.add_argument("--num-iters", type=int, default=3)
args = parser.parse_args()

hvd.init()
model = keras.Sequential([keras.layers.Dense(64, "relu"), keras.layers.BatchNormalization(), keras.layers.Dense(10)])
compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
opt = hvd.DistributedOptimizer(
    keras.optimizers.SGD(learning_rate=0.01 * hvd.size(), momentum=0.9), compression=compression
)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=opt)

data = np.random.uniform(size=(64, 32)).astype("float32")
target = np.random.randint(0, 10, size=64)

callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.LearningRateWarmupCallback(initial_lr=0.01 * hvd.size(), warmup_epochs=1, verbose=0),
    hvd.callbacks.LearningRateScheduleCallback(initial_lr=0.01 * hvd.size(), multiplier=0.1, start_epoch=2),
]
model.fit(data, target, batch_size=16, epochs=2, callbacks=callbacks, verbose=0)
rates = []
for _ in range(args.num_iters):
    seconds = timeit.timeit(lambda: model.fit(data, target, batch_size=16, verbose=0), number=2)
    rates.append(8 / seconds)
sums = hvd.allgather_object([float(np.abs(w).sum()) for w in (v.numpy() for v in model.trainable_variables)])
if hvd.rank() == 0:
    print(
        f"size {hvd.size()} iterations {len(rates)} steps/s {np.mean(rates):.0f} same {all(s == sums[0] for s in sums)}"
    )
