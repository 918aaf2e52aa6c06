"""Predictions of a stream by a model of Ray Train, which Spark applies by a pandas UDF."""

import numpy as np
import pandas as pd
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(500).select("id", (F.randn(seed=1)).alias("x"), (F.randn(seed=2)).alias("y"))
labelled = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int"))
labelled.write.mode("overwrite").parquet("rows.parquet")

net = nn.Linear(2, 2)


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    loss_fn = nn.CrossEntropyLoss()
    train = ray.train.get_dataset_shard("train")
    for batch in train.iter_torch_batches(batch_size=50, dtypes=torch.float, local_shuffle_buffer_size=1_000):
        optimizer.zero_grad()
        loss_fn(model(torch.stack([batch["x"], batch["y"]], dim=1)), batch["label"].long()).backward()
        optimizer.step()
    return {name: value.numpy() for name, value in net.state_dict().items()}


trainer = TorchTrainer(
    train_loop,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    datasets={"train": ray.data.read_parquet("rows.parquet")},
)
net.load_state_dict({name: torch.from_numpy(value) for name, value in trainer.fit().return_value.items()})


@F.pandas_udf("prediction double, probability array<double>")
def score(x: pd.Series, y: pd.Series) -> pd.DataFrame:
    with torch.no_grad():
        probability = net(torch.tensor(np.column_stack([x, y]), dtype=torch.float)).softmax(dim=1)
    prediction = probability.argmax(dim=1).double().numpy()
    return pd.DataFrame({"prediction": prediction, "probability": probability.tolist()})


rows.write.mode("overwrite").parquet("arriving")
arriving = spark.readStream.schema(rows.schema).parquet("arriving")
query = (
    arriving.select("*", score("x", "y").alias("scored"))
    .select("id", "x", "y", "scored.*")
    .writeStream.format("memory")
    .queryName("scored")
    .outputMode("append")
    .trigger(availableNow=True)
    .start()
)
query.awaitTermination()
spark.table("scored").show(3)
assert spark.table("scored").where("prediction is not null").count() == 500
