"""Preparation of a loaded model for the training of adapters."""

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
    """Freezes a model and lets gradients reach its adapters.

    Call it before `peft.get_peft_model`. It does the same as PEFT's `prepare_model_for_kbit_training`, except
    that every tensor keeps its dtype.

    Args:
        model: A model loaded with `HfqConfig`.
        gradient_checkpointing: True computes each layer again in the backward pass, so that its activations
            are not kept.
        gradient_checkpointing_kwargs: Arguments of `torch.utils.checkpoint.checkpoint`, such as
            `{"use_reentrant": False}`; None for the defaults.

    Returns:
        The same model.

    Raises:
        SetupError: hfq did not load the model, or it already has adapters.
    """
    loader_of(model)
    if getattr(model, "peft_config", None):
        raise SetupError(
            "prepare_model_for_kbit_training would freeze the adapters of this model.",
            expected="a model without adapters",
            found=", ".join(model.peft_config),
            fix="Call prepare_model_for_kbit_training before get_peft_model.",
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
