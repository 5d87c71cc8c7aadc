"""Loading of a quantized checkpoint by public functions of transformers alone."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hfq.loading.argument_checks import open_local
from hfq.loading.config import HfqConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["pretrained_config"]


def pretrained_config(
    model: str | os.PathLike, config: HfqConfig | None = None, **kwargs: Any
) -> PreTrainedConfig:
    """The config of a quantized checkpoint, made to name hfq; the way to load one by public API alone.

        AutoModelForCausalLM.from_pretrained(path, config=hfq.pretrained_config(path))

    Args:
        model: The checkpoint's folder or its name on the hub.
        config: The options to load it with.
        kwargs: Passed on to `AutoConfig.from_pretrained`.
    """
    from transformers import AutoConfig

    open_local(model, kwargs)
    taken = AutoConfig.from_pretrained(model, **kwargs)
    source = getattr(taken, "quantization_config", None)
    taken.quantization_config = (config or HfqConfig())._with_source(source)._options()
    return taken
