"""Loading of a quantized checkpoint with only public functions of transformers."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hfq.loading.argument_checks import open_local, take_gguf_file
from hfq.loading.config import HfqConfig
from hfq.loading.custom_code import refusing_custom_code
from hfq.loading.gguf.metadata_config import config_of_gguf

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

    path, gguf_file = take_gguf_file(model, kwargs)
    checkpoint = open_local(path, kwargs, gguf_file)
    kwargs["trust_remote_code"] = bool(kwargs.get("trust_remote_code"))
    with refusing_custom_code(path):
        taken = config_of_gguf(path, checkpoint, kwargs) or AutoConfig.from_pretrained(path, **kwargs)
    source = getattr(taken, "quantization_config", None)
    taken.quantization_config = (config or HfqConfig())._with_source(source)._options()
    return taken
