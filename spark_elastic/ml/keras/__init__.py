"""Keras models on TensorFlow, trained and served from Spark ML."""
