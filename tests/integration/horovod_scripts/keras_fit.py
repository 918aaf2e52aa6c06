"""`model.fit` with the three elastic callbacks, in the order in which Horovod's documentation has them."""

import argparse

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import spark_elastic.tensorflow.keras as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.002)
args = parser.parse_args()

hvd.init()

images, labels = load_digits(return_X_y=True)
images = (images / 16.0).reshape(-1, 8, 8, 1).astype("float32")
dataset = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).repeat().shuffle(1000).batch(32)

model = keras.Sequential(
    [
        keras.layers.Conv2D(8, [3, 3], activation="relu"),
        keras.layers.MaxPooling2D(pool_size=(2, 2)),
        keras.layers.Dropout(0.1),
        keras.layers.Flatten(),
        keras.layers.Dense(10, activation="softmax"),
    ]
)

scaled_lr = args.lr * hvd.size()
opt = keras.optimizers.Adam(scaled_lr)
opt = hvd.DistributedOptimizer(opt, backward_passes_per_step=1, average_aggregated_gradients=True)
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(), optimizer=opt, metrics=["accuracy"])

# The model and the optimizer have their variables before the workers compare them.
model.build((None, 8, 8, 1))
opt.build(model.trainable_variables)


def on_state_reset():
    model.optimizer.learning_rate = args.lr * hvd.size()


state = hvd.elastic.KerasState(model, batch=0, epoch=0)
state.register_reset_callbacks([on_state_reset])

callbacks = [
    hvd.callbacks.MetricAverageCallback(),
    hvd.elastic.CommitStateCallback(state, batches_per_commit=5),
    hvd.elastic.UpdateBatchStateCallback(state),
    hvd.elastic.UpdateEpochStateCallback(state),
]


class Prints(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print(f"epoch {state.epoch} size {hvd.size()} accuracy {logs['accuracy']:.3f}", flush=True)


if hvd.rank() == 0:
    callbacks.append(Prints())


@hvd.elastic.run
def train(state):
    state.model.fit(
        dataset, steps_per_epoch=48 // hvd.size(), epochs=args.epochs - state.epoch, callbacks=callbacks, verbose=0
    )


train(state)
_, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
everyone = hvd.allgather_object((float(accuracy), int(model.optimizer.iterations), state.epoch))
if hvd.rank() == 0:
    print(f"size {hvd.size()} epochs {state.epoch} accuracy {accuracy:.3f} same {len(set(everyone)) == 1}")
