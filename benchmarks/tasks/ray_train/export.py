"""Export to ONNX, torch.export and TorchScript, with Ray Train."""

import onnx
import ray.train
import torch
from pyspark.sql import SparkSession
from pyspark.sql import functions as F
from ray.train.torch import TorchTrainer, prepare_model
from torch import nn

spark = SparkSession.builder.master("local[3]").getOrCreate()
rows = spark.range(500).select(F.randn(seed=1).alias("x"), F.randn(seed=2).alias("y"))
rows = rows.withColumn("label", (F.col("x") > F.col("y")).cast("int"))
rows.write.mode("overwrite").parquet("rows.parquet")

net = nn.Sequential(nn.Linear(2, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))


def train_loop():
    model = prepare_model(net)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
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
module = net.eval()

example = torch.randn(4, 2)
shapes = [{0: torch.export.Dim("rows")}]
torch.onnx.export(module, (example,), "points.onnx", input_names=["features"], dynamic_shapes=shapes)
onnx.checker.check_model("points.onnx")

program = torch.export.export(module, (example,), dynamic_shapes=shapes)
torch.export.save(program, "points.pt2")

torch.jit.save(torch.jit.trace(module, example), "points.torchscript")

again = torch.export.load("points.pt2").module()
scripted = torch.jit.load("points.torchscript")
many = torch.randn(100, 2)
assert torch.allclose(again(many), module(many), atol=1e-6)
assert torch.allclose(scripted(many), module(many), atol=1e-6)
