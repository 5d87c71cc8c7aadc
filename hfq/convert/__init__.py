"""Rewrites a checkpoint in another format that holds the same numbers, or says which layer that dialect
cannot hold.
"""

from hfq.convert.checkpoint import ConvertReport, convert_checkpoint
from hfq.convert.targets import TARGET_FORMATS

__all__ = ["TARGET_FORMATS", "ConvertReport", "convert_checkpoint"]
