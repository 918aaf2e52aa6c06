"""The models and rows of `workloads.py`, and the same rows as tensors for those who train by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

NUMBERS = [f"n{index}" for index in range(40)]
IDS = [f"id{index}" for index in range(5)]
ID_SIZES = (10_000, 1_000, 500, 100, 20)
FEW = [f"f{index}" for index in range(10)]
LONGEST, WORDS = 64, 5_000


# --- models ---------------------------------------------------------------------------------------


def table_net() -> Any:
    import torch
    from torch import nn

    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embeddings = nn.ModuleList(nn.Embedding(size, 16) for size in ID_SIZES)
            self.layers = nn.Sequential(
                nn.Linear(40 + 5 * 16, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1)
            )

        def forward(self, numbers: Any, ids: Any) -> Any:
            embedded = [each(ids[:, index]) for index, each in enumerate(self.embeddings)]
            return self.layers(torch.cat([numbers, *embedded], dim=1)).squeeze(1)

    return Wide()


def image_net() -> Any:
    from torch import nn

    class Block(nn.Module):
        def __init__(self, channels: int, made: int, stride: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, made, 3, stride, 1, bias=False),
                nn.GroupNorm(4, made),
                nn.ReLU(),
                nn.Conv2d(made, made, 3, 1, 1, bias=False),
                nn.GroupNorm(4, made),
            )
            self.way = nn.Identity() if stride == 1 else nn.Conv2d(channels, made, 1, stride, bias=False)
            self.end = nn.ReLU()

        def forward(self, x: Any) -> Any:
            return self.end(self.body(x) + self.way(x))

    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Conv2d(3, 16, 3, 1, 1),
                Block(16, 16, 1),
                Block(16, 32, 2),
                Block(32, 64, 2),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(64, 10),
            )

        def forward(self, pixels: Any) -> Any:
            return self.layers(pixels.float() / 127.5 - 1)

    return Residual()


def token_net() -> Any:
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 64, padding_idx=0)
            self.places = nn.Parameter(torch.zeros(LONGEST, 64))
            layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(64, 2)

        def forward(self, tokens: Any) -> Any:
            empty = tokens == 0
            longest = int((~empty).sum(1).max())
            tokens, empty = tokens[:, :longest], empty[:, :longest]
            encoded = self.layers(self.words(tokens) + self.places[:longest], src_key_padding_mask=empty)
            encoded = encoded.masked_fill(empty.unsqueeze(2), 0.0)
            return self.head(encoded.sum(1) / (~empty).sum(1, keepdim=True))

    return Encoder()


def logistic_net() -> Any:
    from torch import nn

    return nn.Sequential(nn.Linear(len(FEW), 1), nn.Flatten(0))


# --- rows -----------------------------------------------------------------------------------------


def table_rows(spark: Any, rows: int) -> Any:
    from pyspark.sql import functions as F

    numbers = [(F.rand(index) * 2 - 1).cast("float").alias(name) for index, name in enumerate(NUMBERS)]
    ids = [
        (F.rand(100 + index) * size).cast("int").alias(name)
        for index, (name, size) in enumerate(zip(IDS, ID_SIZES, strict=True))
    ]
    df = spark.range(0, rows, 1, 4).select(*numbers, *ids)
    return df.withColumn("label", (F.col("n0") + F.col("n1") + F.col("id4") / 20.0 > 0.5).cast("float"))


def image_rows(spark: Any, rows: int) -> Any:
    from pyspark.sql import functions as F

    noise = F.expr("unhex(array_join(transform(sequence(1, 96), i -> sha2(id || '-' || i, 256)), ''))")
    return spark.range(0, rows, 1, 4).select(noise.alias("pixels"), (F.col("id") % 10).alias("label"))


def token_rows(spark: Any, rows: int) -> Any:
    from pyspark.sql import functions as F

    length = f"8 + cast(pmod(hash(id), {LONGEST - 7}) as int)"
    words = F.expr(f"transform(sequence(1, {length}), i -> cast(1 + pmod(hash(id, i), {WORDS - 1}) as int))")
    return spark.range(0, rows, 1, 4).select(words.alias("tokens"), (F.col("id") % 2).alias("label"))


def logistic_rows(spark: Any, rows: int) -> Any:
    from pyspark.sql import functions as F

    numbers = [(F.rand(index) * 2 - 1).cast("float").alias(name) for index, name in enumerate(FEW)]
    df = spark.range(0, rows, 1, 4).select(*numbers)
    return df.withColumn("label", (F.col("f0") + F.col("f1") > 0).cast("float"))


# --- by hand: Parquet to tensors ------------------------------------------------------------------


def stacked(found: Any, names: list[str]) -> Any:
    import torch

    return torch.from_numpy(np.stack([found[name].to_numpy() for name in names], axis=1))


def table_tensors(found: Any) -> list[Any]:
    return [stacked(found, NUMBERS), stacked(found, IDS).long(), stacked(found, ["label"]).squeeze(1)]


def image_tensors(found: Any) -> list[Any]:
    import torch

    values = found["pixels"].combine_chunks()
    pixels = np.frombuffer(values.buffers()[2], np.uint8)[: 3072 * len(values)].reshape(-1, 3, 32, 32).copy()
    return [torch.from_numpy(pixels), torch.from_numpy(found["label"].to_numpy())]


def token_tensors(found: Any) -> list[Any]:
    import torch

    tokens = np.zeros((found.num_rows, LONGEST), np.int64)
    column = found["tokens"].combine_chunks()
    lengths = np.diff(column.offsets.to_numpy())
    tokens[np.arange(LONGEST) < lengths[:, None]] = column.flatten().to_numpy()
    return [torch.from_numpy(tokens), torch.from_numpy(found["label"].to_numpy())]


def logistic_tensors(found: Any) -> list[Any]:
    return [stacked(found, FEW), stacked(found, ["label"]).squeeze(1)]


# --- the workloads --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Workload:
    rows: int
    scale: float  # the default share of the rows
    batch: int  # rows of a global batch
    epochs: int
    make_rows: Callable[[Any, int], Any]
    tensors: Callable[[Any], list[Any]]
    net: Callable[[], Any]
    loss: str
    settings: dict[str, Any]

    def seeded_net(self) -> Any:
        import torch

        torch.manual_seed(1)
        return self.net()

    def loss_function(self) -> Any:
        from torch import nn

        return getattr(nn, self.loss)()


WORKLOADS = {
    "table": Workload(
        2_000_000,
        0.1,
        2048,
        3,
        table_rows,
        table_tensors,
        table_net,
        "BCEWithLogitsLoss",
        {"feature_cols": [NUMBERS, IDS], "label_cols": ["label"], "input_dtypes": ["float32", "int64"]},
    ),
    "images": Workload(
        60_000,
        0.1,
        128,
        3,
        image_rows,
        image_tensors,
        image_net,
        "CrossEntropyLoss",
        {
            "feature_cols": ["pixels"],
            "label_cols": ["label"],
            "input_shapes": [(3, 32, 32)],
            "transformation_fn": lambda columns: columns,  # bytes are numbers here, and not files of images
        },
    ),
    "tokens": Workload(
        200_000,
        0.05,
        128,
        3,
        token_rows,
        token_tensors,
        token_net,
        "CrossEntropyLoss",
        {
            "feature_cols": ["tokens"],
            "label_cols": ["label"],
            "input_dtypes": ["int64"],
            "data_options": {"pad_to": {"features_0": LONGEST}},
        },
    ),
    "logistic": Workload(
        50_000_000,
        0.1,
        16_384,
        3,
        logistic_rows,
        logistic_tensors,
        logistic_net,
        "BCEWithLogitsLoss",
        {"feature_cols": FEW, "label_cols": ["label"]},
    ),
}
