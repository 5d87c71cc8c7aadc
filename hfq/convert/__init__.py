"""Rewrites a checkpoint in another dialect that holds the same numbers, or says which layer that dialect
cannot hold.
"""

from hfq.convert.checkpoint import ConvertReport, convert_checkpoint
from hfq.convert.targets import DIALECTS

__all__ = ["DIALECTS", "ConvertReport", "convert_checkpoint"]
