"""Quantized checkpoints in any placement: weights stay quantized, and results bit-identical.

    from hfq import HfqConfig
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map="auto")

`import hfq` registers with transformers. It imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from hfq.errors import CheckpointError, FormatError, HfqError, PlacementError, SetupError
from hfq.import_hook import register as _register
from hfq.version import __version__ as __version__

if TYPE_CHECKING:
    from hfq.evaluation.compare import compare
    from hfq.evaluation.evaluate import evaluate
    from hfq.evaluation.perplexity import perplexity
    from hfq.integrations import fms
    from hfq.integrations.transformers.pretrained_config import pretrained_config
    from hfq.loading.config import HfqConfig
    from hfq.quantization.driver import quantize
    from hfq.recipes.recipe import Recipe
    from hfq.runtime.kv_cache.offloaded_cache import OffloadedCache
    from hfq.runtime.record_routing import record_routing
    from hfq.runtime.report import report
    from hfq.runtime.run_batches import run_batches
    from hfq.runtime.timeline import timeline

__all__ = [
    "CheckpointError",
    "FormatError",
    "HfqConfig",
    "HfqError",
    "OffloadedCache",
    "PlacementError",
    "Recipe",
    "SetupError",
    "compare",
    "evaluate",
    "fms",
    "perplexity",
    "pretrained_config",
    "quantize",
    "record_routing",
    "report",
    "run_batches",
    "timeline",
]

_LAZY = {
    "HfqConfig": "hfq.loading.config",
    "OffloadedCache": "hfq.runtime.kv_cache.offloaded_cache",
    "Recipe": "hfq.recipes.recipe",
    "compare": "hfq.evaluation.compare",
    "evaluate": "hfq.evaluation.evaluate",
    "perplexity": "hfq.evaluation.perplexity",
    "pretrained_config": "hfq.integrations.transformers.pretrained_config",
    "quantize": "hfq.quantization.driver",
    "record_routing": "hfq.runtime.record_routing",
    "report": "hfq.runtime.report",
    "run_batches": "hfq.runtime.run_batches",
    "timeline": "hfq.runtime.timeline",
}

_SUBMODULES = {"fms": "hfq.integrations.fms"}

_register()


def __getattr__(name: str) -> object:
    if name in _SUBMODULES:
        return importlib.import_module(_SUBMODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'hfq' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY, *_SUBMODULES])
