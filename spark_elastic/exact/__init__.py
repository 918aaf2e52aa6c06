"""Training in PyTorch whose result has the same bits for any number of workers.

Each batch is cut into a fixed number of shards. Start reading in `shards`: `VirtualWorkers` computes this worker's
shards. `sums` adds up their gradients in an order that no world changes, `buffers` combines what they leave in a
model's buffers, `random_state` seeds the random generators for each, and `environment` compares what bits depend on.
"""
