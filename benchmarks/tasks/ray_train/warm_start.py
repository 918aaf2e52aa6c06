"""Go on from a fitted model, and train the last layer alone, with Ray Train."""

import copy

import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(1_000).select((F.col("id") % 2 + 1).alias("month"), F.randn(seed=1).alias("x"))
rows = rows.withColumn("y", 2 * F.col("x") + F.col("month"))
rows.write.mode("overwrite").parquet("rows.parquet")


def fitted(net, month):
    def train_loop():
        model = prepare_model(net)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.05)
        loss_fn = nn.MSELoss()
        losses = []
        train = ray.train.get_dataset_shard("train")
        for batch in train.iter_torch_batches(batch_size=50, dtypes=torch.float, local_shuffle_buffer_size=1_000):
            loss = loss_fn(model(batch["x"].unsqueeze(1)).squeeze(1), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return {name: value.numpy() for name, value in net.state_dict().items()}, sum(losses) / len(losses)

    trainer = TorchTrainer(
        train_loop,
        scaling_config=ray.train.ScalingConfig(num_workers=1),
        datasets={"train": ray.data.read_parquet("rows.parquet").filter(expr=f"month == {month}")},
    )
    weights, loss = trainer.fit().return_value
    trained = copy.deepcopy(net)
    trained.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    return trained, loss


january, january_loss = fitted(nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), 1)
torch.save(january, "january.pt")

february, _ = fitted(torch.load("january.pt", weights_only=False), 2)  # perhaps a month later

february.get_submodule("0").requires_grad_(False)
head_only, loss = fitted(february, 2)
assert torch.equal(head_only.get_parameter("0.weight"), february.get_parameter("0.weight"))
assert loss < january_loss
