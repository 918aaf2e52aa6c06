"""Compressors for TensorFlow, and where each of them runs.

Casts run on the host, on the memory that is sent, and need no copy in the graph. Compressors written by users run in
the graph, on TensorFlow's tensors.
"""

from __future__ import annotations

from spark_elastic.collective.reduction import CastCompressor, Compression, Compressor, NoneCompressor


def graph_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply in the graph."""
    return NoneCompressor if issubclass(compression, CastCompressor) else compression


def host_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply on the host, to torch tensors with the same memory."""
    return compression if issubclass(compression, CastCompressor) else NoneCompressor


__all__ = ["Compression", "Compressor", "graph_compressor", "host_compressor"]
