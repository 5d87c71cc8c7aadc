"""Bytes on disk: validated headers, tensors as byte ranges, a reader and an atomic writer. Knows no model."""

from hfq.checkpoint.header import Header, HeaderLimits, read_header
from hfq.checkpoint.index import Checkpoint
from hfq.checkpoint.reader import Reader
from hfq.checkpoint.writer import write_safetensors

__all__ = ["Checkpoint", "Header", "HeaderLimits", "Reader", "read_header", "write_safetensors"]
