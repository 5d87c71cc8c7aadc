"""hfq: any quantized checkpoint in any placement, packed everywhere, exact, nothing silent.

    from hfq import HfqConfig
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map="auto")

`import hfq` registers with transformers and imports neither torch nor transformers itself.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hfq.errors import CheckpointError, FormatError, HfqError, PlacementError, SetupError
from hfq.import_hook import register as _register
from hfq.version import __version__ as __version__

if TYPE_CHECKING:
    from hfq.checkpoint import Checkpoint
    from hfq.evaluation.compare import verify
    from hfq.formats import FORMATS, Format
    from hfq.integrations import fms
    from hfq.integrations.peft.training import prepare_for_training
    from hfq.integrations.transformers.pretrained_config import take_over
    from hfq.integrations.transformers.quantizer import HfqQuantizer
    from hfq.loading.config import HfqConfig
    from hfq.placement.plan import Plan
    from hfq.runtime.report import report
    from hfq.runtime.run_batches import layer_major
    from hfq.runtime.timeline import timeline

__all__ = [
    "FORMATS", "Checkpoint", "CheckpointError", "Format", "FormatError", "HfqConfig", "HfqError", "HfqQuantizer", "Plan",
    "PlacementError", "SetupError", "fms", "layer_major", "prepare_for_training", "quantize", "report", "take_over", "timeline",
    "verify",
]  # fmt: skip

_LAZY = {
    "Checkpoint": "hfq.checkpoint",
    "FORMATS": "hfq.formats",
    "Format": "hfq.formats",
    "HfqConfig": "hfq.loading.config",
    "HfqQuantizer": "hfq.integrations.transformers.quantizer",
    "Plan": "hfq.placement.plan",
    "layer_major": "hfq.runtime.run_batches",
    "quantize": "hfq.quantization.driver",
    "prepare_for_training": "hfq.integrations.peft.training",
    "report": "hfq.runtime.report",
    "take_over": "hfq.integrations.transformers.pretrained_config",
    "timeline": "hfq.runtime.timeline",
    "verify": "hfq.evaluation.compare",
}

_SUBMODULES = {"fms": "hfq.integrations.fms"}

_register()


def __getattr__(name: str):
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hfq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_SUBMODULES])
