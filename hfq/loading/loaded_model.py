"""Access to the loader that hfq keeps on a loaded model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from hfq.errors import SetupError

if TYPE_CHECKING:
    from hfq.loading.model_loader import ModelLoader

__all__ = ["loader_of"]


def loader_of(model: nn.Module) -> ModelLoader:
    """Returns the loader of a model, or of the model inside a wrapper such as PEFT's.

    Raises:
        SetupError: hfq did not load the model.
    """
    for module in model.modules() if isinstance(model, nn.Module) else ():
        loading = getattr(vars(module).get("hf_quantizer"), "loading", None)
        if loading is not None:
            return loading
    raise SetupError(
        "This model was not loaded by hfq.",
        expected="a model loaded with quantization_config=HfqConfig()",
        found=type(model).__name__,
        fix="Load it with from_pretrained(..., quantization_config=HfqConfig()).",
    )
