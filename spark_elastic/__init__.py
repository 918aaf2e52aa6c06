"""Elastic data-parallel training of PyTorch and Keras models inside Apache Spark."""
