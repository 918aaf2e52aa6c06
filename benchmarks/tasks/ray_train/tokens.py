"""Tokens of variable length, with padding, with Ray Train."""

import numpy as np
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

LONGEST = 12


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(1_000, 16, padding_idx=0)
        self.head = nn.Linear(16, 2)

    def forward(self, tokens):
        lengths = (tokens != 0).sum(dim=1, keepdim=True).clamp(min=1)
        return self.head(self.embedding(tokens).sum(dim=1) / lengths)


spark = SparkSession.builder.master("local[3]").getOrCreate()
texts = spark.createDataFrame(
    [("good film", 1), ("a bad film", 0), ("good", 1), ("bad bad", 0)] * 50, ["text", "label"]
)
words = F.transform(F.split("text", " "), lambda word: F.pmod(F.hash(word), F.lit(999)) + 1)
rows = texts.withColumn("tokens", F.slice(words, 1, LONGEST))
rows = rows.withColumn("tokens", F.slice(F.concat("tokens", F.array_repeat(F.lit(0), LONGEST)), 1, LONGEST))
rows.write.mode("overwrite").parquet("rows.parquet")

net = Mean()


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_fn = nn.CrossEntropyLoss()
    train = ray.train.get_dataset_shard("train")
    for _ in range(3):
        for batch in train.iter_torch_batches(batch_size=32, local_shuffle_buffer_size=1_000):
            optimizer.zero_grad()
            loss_fn(model(batch["tokens"]), batch["label"]).backward()
            optimizer.step()
    return {name: value.numpy() for name, value in net.state_dict().items()}


def predict(batch):
    with torch.no_grad():
        prediction = net(torch.tensor(np.stack(batch["tokens"]))).argmax(dim=1)
    return {"label": batch["label"], "prediction": prediction.numpy()}


data = ray.data.read_parquet("rows.parquet", columns=["tokens", "label"])
trainer = TorchTrainer(train_loop, scaling_config=ray.train.ScalingConfig(num_workers=2), datasets={"train": data})
net.load_state_dict({name: torch.from_numpy(value) for name, value in trainer.fit().return_value.items()})
assert data.map_batches(predict).filter(expr="label != prediction").count() == 0
