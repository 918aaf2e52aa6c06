"""Compression in TensorFlow programs: the compressors, and where each of them runs.

Casts run on the host, on the memory that is sent, so they need no copy in the graph. Compressors that users have
written run in the graph, on TensorFlow's tensors.
"""

from __future__ import annotations

from spark_elastic.collective.reduction import CastCompressor, Compression, Compressor, NoneCompressor


def graph_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply in the graph."""
    return NoneCompressor if issubclass(compression, CastCompressor) else compression


def host_compressor(compression: type[Compressor]) -> type[Compressor]:
    """Return the compressor to apply on the host, to torch's view of the tensors."""
    return compression if issubclass(compression, CastCompressor) else NoneCompressor


__all__ = ["Compression", "Compressor", "graph_compressor", "host_compressor"]
