"""A training loop of one's own in TensorFlow 2: a tape reduces, a plain optimizer applies, rare commits."""

import argparse

import tensorflow as tf
from sklearn.datasets import load_digits

import spark_elastic.tensorflow as hvd

parser = argparse.ArgumentParser()
parser.add_argument("--batches", type=int, default=400)
parser.add_argument("--lr", type=float, default=0.002)
parser.add_argument("--checkpoint-dir", default="./checkpoints")
args = parser.parse_args()

hvd.init()

images, labels = load_digits(return_X_y=True)
images = tf.cast(images[..., tf.newaxis].reshape(-1, 8, 8, 1) / 16.0, tf.float32)
labels = tf.cast(labels, tf.int64)
dataset = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).repeat().shuffle(1000).batch(32)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Conv2D(8, [3, 3], activation="relu"),
        tf.keras.layers.MaxPooling2D(pool_size=(2, 2)),
        tf.keras.layers.Dropout(0.1),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
loss = tf.losses.SparseCategoricalCrossentropy()
opt = tf.optimizers.Adam(args.lr * hvd.size())


@tf.function
def training_step(images, labels, allreduce=True):
    with tf.GradientTape() as tape:
        probs = model(images, training=True)
        loss_value = loss(labels, probs)

    if allreduce:
        tape = hvd.DistributedGradientTape(tape)

    grads = tape.gradient(loss_value, model.trainable_variables)
    opt.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    return loss_value


# The model and the optimizer have their variables before the workers compare them.
for batch_images, batch_labels in dataset.take(1):
    training_step(batch_images, batch_labels, allreduce=False)


@hvd.elastic.run
def train(state):
    start_batch = state.batch
    left = args.batches // hvd.size() - start_batch
    for batch_idx, (batch_images, batch_labels) in enumerate(dataset.skip(state.batch).take(left)):
        state.batch = start_batch + batch_idx
        loss_value = training_step(batch_images, batch_labels)

        if state.batch % 20 == 0 and hvd.local_rank() == 0:
            print(f"batch {state.batch} size {hvd.size()} loss {float(loss_value):.3f}", flush=True)
        if state.batch % 50 == 0:
            state.commit()


def on_state_reset():
    opt.learning_rate.assign(args.lr * hvd.size())


state = hvd.elastic.TensorFlowKerasState(model, opt, batch=0)
state.register_reset_callbacks([on_state_reset])
train(state)

hits = tf.equal(tf.argmax(model(images[1500:]), axis=1), labels[1500:])
accuracy = float(tf.reduce_mean(tf.cast(hits, tf.float32)))
mean = float(hvd.allreduce(tf.constant(accuracy)))
if hvd.rank() == 0:
    checkpoint = tf.train.Checkpoint(model=model, optimizer=opt)
    checkpoint.save(f"{args.checkpoint_dir}/at")
    print(f"size {hvd.size()} accuracy {accuracy:.3f} same {abs(mean - accuracy) < 1e-6}")
