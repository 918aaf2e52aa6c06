"""Tokens of variable length, with padding, with Horovod."""

import torch
from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator
from pyspark.ml.functions import array_to_vector, vector_to_array
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from torch import nn

LONGEST = 12


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1_000, 16, padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        tokens = tokens.long()  # all inputs arrive as floats
        lengths = (tokens != 0).sum(dim=1, keepdim=True).clamp(min=1)
        return self.head(self.embedding(tokens).sum(dim=1) / lengths)


spark = SparkSession.builder.master("local[3]").getOrCreate()
texts = spark.createDataFrame(
    [("good film", 1), ("a bad film", 0), ("good", 1), ("bad bad", 0)] * 50, ["text", "label"]
)
words = F.transform(F.split("text", " "), lambda word: F.pmod(F.hash(word), F.lit(999)) + 1)
rows = texts.withColumn("tokens", F.slice(words, 1, LONGEST))
padded = F.slice(F.concat("tokens", F.array_repeat(F.lit(0), LONGEST)), 1, LONGEST)
rows = rows.withColumn("tokens", array_to_vector(padded.cast("array<double>")))

net = Mean()
estimator = TorchEstimator(
    num_proc=2,
    store=Store.create("/tmp/horovod"),
    model=net,
    optimizer=torch.optim.Adam(net.parameters(), lr=0.05),
    loss=lambda output, label: nn.functional.cross_entropy(output, label.long()),
    feature_cols=["tokens"],
    label_cols=["label"],
    input_shapes=[[-1, LONGEST]],
    batch_size=32,
    epochs=3,
)
outputs = vector_to_array("label__output")
scored = estimator.fit(rows).transform(rows)
assert scored.where(F.col("label") != (outputs[1] > outputs[0]).cast("int")).count() == 0
