"""Conversion of checkpoints to other formats without changing any weight.

If the target format cannot hold a layer, the conversion raises an error that names the layer.
"""

from hfq.convert.checkpoint import ConvertReport, convert_checkpoint
from hfq.convert.targets import TARGET_FORMATS

__all__ = ["TARGET_FORMATS", "ConvertReport", "convert_checkpoint"]
