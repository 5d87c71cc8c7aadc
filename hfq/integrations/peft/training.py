"""Prepares a loaded model for adapters that are trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hfq.errors import SetupError
from hfq.loading.loaded_model import loader_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["prepare_model"]


def prepare_model(
    model: PreTrainedModel,
    gradient_checkpointing: bool = True,
    gradient_checkpointing_kwargs: dict[str, Any] | None = None,
) -> PreTrainedModel:
    """Freezes a model and lets gradients reach its adapters; to be called before `peft.get_peft_model`.

    What PEFT's `prepare_model_for_kbit_training` does, but for the casts: every tensor keeps its dtype.

    Args:
        model: A model loaded with `HfqConfig`.
        gradient_checkpointing: Whether each layer is computed again in the backward, so that its activations
            are not kept.
        gradient_checkpointing_kwargs: What `torch.utils.checkpoint.checkpoint` is passed, as
            `{"use_reentrant": False}`.

    Returns:
        The same model.

    Raises:
        SetupError: hfq did not load the model, or it has adapters already.
    """
    loader_of(model)
    if getattr(model, "peft_config", None):
        raise SetupError(
            "prepare_model_for_kbit_training was called on a model that has adapters, which it would freeze.",
            expected="a model without adapters",
            found=", ".join(model.peft_config),
            fix="call prepare_model_for_kbit_training before get_peft_model",
        )
    for parameter in model.parameters():
        parameter.requires_grad = False
    if gradient_checkpointing:
        model.enable_input_require_grads()
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable(gradient_checkpointing_kwargs)
    return model
