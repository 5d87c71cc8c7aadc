"""Loading of a quantized checkpoint with only public functions of transformers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hfq.loading.argument_checks import open_local
from hfq.loading.config import HfqConfig
from hfq.loading.custom_code import refusing_custom_code

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

__all__ = ["pretrained_config"]


def pretrained_config(
    model: str | os.PathLike, config: HfqConfig | None = None, **kwargs: Any
) -> PreTrainedConfig:
    """Returns the model config of a quantized checkpoint, changed to load it with hfq.

    It uses only public functions of transformers:

        AutoModelForCausalLM.from_pretrained(path, config=hfq.pretrained_config(path))

    Args:
        model: Folder of the checkpoint, or its Hub id.
        config: Options of the load; None for the defaults.
        kwargs: Arguments for `AutoConfig.from_pretrained`. `trust_remote_code` is False by default.
    """
    from transformers import AutoConfig

    open_local(model, kwargs)
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
    with refusing_custom_code(model):
        taken = AutoConfig.from_pretrained(model, **kwargs)
    source = getattr(taken, "quantization_config", None)
    taken.quantization_config = (config or HfqConfig())._with_source(source)._options()
    return taken
