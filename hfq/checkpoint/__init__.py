"""Safetensors files: validated headers, byte ranges, a reader, and an atomic writer.

Nothing here depends on a model.
"""

from hfq.checkpoint.header import Header, HeaderLimits, read_header
from hfq.checkpoint.index import Checkpoint
from hfq.checkpoint.reader import Reader
from hfq.checkpoint.writer import write_safetensors

__all__ = ["Checkpoint", "Header", "HeaderLimits", "Reader", "read_header", "write_safetensors"]
