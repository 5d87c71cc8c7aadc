"""LoRA on quantized modules, whose base weights are read and never written.

Uses that would write them raise an error. `patches` imports this module once PEFT is imported, never earlier.
Tested with peft 0.21.2.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import peft
import torch
from packaging.version import Version
from peft.tuners.lora import layer as lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfq.errors import SetupError
from hfq.integrations.peft.adapter_checks import check_adapter, check_replication, is_fixed, linears_of
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule

__all__ = [
    "FixedLoraEmbedding",
    "FixedLoraLinear",
    "dispatching",
    "gathering",
    "including",
    "keeping_devices",
    "refuse_merge",
    "refuse_replication",
]

_OLDEST = "0.21"


class _Fixed:
    """Base of both LoRA layers: places their adapters, and never writes the base weight.

    PEFT reads the device and dtype of the base's `weight`. This would dequantize a quantized weight. The
    device of a weight on disk is meta, where adapters would have no data.
    """

    get_base_layer: Callable[[], nn.Module]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_state_dict_post_hook(_leave_out)  # type: ignore[attr-defined]

    @property
    def weight(self) -> torch.Tensor:
        """Weight of the base in the dtype of the model, for model code that reads it."""
        return self.get_base_layer().weight  # type: ignore[return-value]

    def _get_in_out_features(self, module: nn.Module) -> tuple[int, int]:
        if isinstance(module, QuantizedEmbedding):
            return module.num_embeddings, module.embedding_dim
        if isinstance(module, QuantizedModule):
            return module.in_features, module.out_features
        return super()._get_in_out_features(module)  # type: ignore[misc]

    def _get_base_layer_device_and_dtype(self, base: nn.Module) -> tuple[torch.device, torch.dtype]:
        if isinstance(base, QuantizedModule):
            return base.compute_device, base.dtype
        return super()._get_base_layer_device_and_dtype(base)  # type: ignore[misc]

    def merge(self, *_: Any, **__: Any) -> None:
        """Raises an error, since quantized weights are never rewritten.

        Raises:
            SetupError: Always.
        """
        raise _no_merge(type(self.get_base_layer()).__name__)

    def unmerge(self) -> None:
        """Raises an error, since nothing can be merged.

        Raises:
            SetupError: Always.
        """
        raise _no_merge(type(self.get_base_layer()).__name__)


class FixedLoraLinear(_Fixed, lora.Linear):
    """LoRA on a quantized or offloaded linear layer, with PEFT's own forward."""


class FixedLoraEmbedding(_Fixed, lora.Embedding):
    """LoRA on a quantized or offloaded embedding, with PEFT's own forward."""


def dispatching(original: Callable) -> Callable:
    """Wraps `LoraModel._create_new_module` to support quantized and offloaded modules."""

    @functools.wraps(original)
    def create_new_module(lora_config: Any, adapter_name: str, target: nn.Module, **kwargs: Any) -> nn.Module:
        base = target.get_base_layer() if isinstance(target, BaseTunerLayer) else target
        if not is_fixed(base):
            return original(lora_config, adapter_name, target, **kwargs)
        kwargs.pop("parameter_name", None)
        if isinstance(base, (QuantizedEmbedding, nn.Embedding)):
            return FixedLoraEmbedding(target, adapter_name, config=lora_config, **kwargs)
        is_transposed = base.is_transposed if isinstance(base, QuantizedLinear) else isinstance(base, Conv1D)
        if lora_config.fan_in_fan_out != is_transposed:
            warnings.warn(
                f"hfq sets fan_in_fan_out to {is_transposed}, to match the layers of this model.",
                stacklevel=2,
            )
            lora_config.fan_in_fan_out = is_transposed
        return FixedLoraLinear(
            target, adapter_name, config=lora_config, is_target_conv_1d_layer=is_transposed, **kwargs
        )

    return create_new_module


def keeping_devices(original: Callable) -> Callable:
    """Wraps `LoraModel._replace_module` to keep adapters on their device.

    PEFT would move them to the device where a quantized base is stored.
    """

    @functools.wraps(original)
    def replace_module(
        self: Any, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        base = child.get_base_layer() if isinstance(child, BaseTunerLayer) else child
        if is_fixed(base):
            setattr(parent, child_name, new_module)
        else:
            original(self, parent, child_name, new_module, child)

    return replace_module


def including(original: Callable) -> Callable:
    """Wraps `_maybe_include_all_linear_layers` to include quantized layers.

    Also checks the adapter before any layer is replaced.
    """

    @functools.wraps(original)
    def maybe_include_all_linear_layers(peft_config: Any, model: nn.Module) -> Any:
        if not any(is_fixed(module) for module in model.modules()):
            return original(peft_config, model)
        if Version(peft.__version__) < Version(_OLDEST):
            raise SetupError(
                "hfq does not support this version of PEFT.",
                expected=f"peft {_OLDEST} or newer",
                found=peft.__version__,
                fix=f"Run pip install 'peft>={_OLDEST}'",
            )
        target = getattr(peft_config, "target_modules", None)
        is_all = isinstance(target, str) and target.lower() == "all-linear"
        peft_config = original(peft_config, model)
        if is_all:
            peft_config.target_modules = {
                *peft_config.target_modules,
                *linears_of(model, peft_config.task_type),
            }
        check_adapter(peft_config, model)
        return peft_config

    return maybe_include_all_linear_layers


def refuse_replication(original: Callable) -> Callable:
    """Wraps `LoraModel._prepare_model` to check replication before any layer is copied."""

    @functools.wraps(original)
    def prepare_model(self: Any, peft_config: Any, model: nn.Module) -> None:
        if peft_config.layer_replication:
            check_replication(model)
        original(self, peft_config, model)

    return prepare_model


def refuse_merge(original: Callable) -> Callable:
    """Wraps `LoraModel._check_merge_allowed` to raise an error for quantized layers.

    PEFT calls it before it merges the first layer.
    """

    @functools.wraps(original)
    def check_merge_allowed(self: Any) -> None:
        fixed = next(
            (name for name, module in self.model.named_modules() if isinstance(module, _Fixed)), None
        )
        if fixed is not None:
            raise _no_merge(fixed)
        original(self)

    return check_merge_allowed


def gathering(original: Callable) -> Callable:
    """Wraps `PeftModel.save_pretrained` to gather parameters that ZeRO-3 shards.

    All ranks must call it, and rank 0 writes. PEFT reads the tensors of the model, which are empty on each
    rank, and would write them silently.
    """

    @functools.wraps(original)
    def save_pretrained(self: Any, save_directory: str, *args: Any, **kwargs: Any) -> Any:
        is_sharded = any(hasattr(parameter, "ds_id") for parameter in self.parameters())
        if (
            kwargs.get("state_dict") is not None
            or not is_sharded
            or not any(is_fixed(module) for module in self.modules())
        ):
            return original(self, save_directory, *args, **kwargs)
        from hfq.integrations.deepspeed.private_api import gather_state
        from hfq.loading.ranks import raise_together

        error, is_main = None, torch.distributed.get_rank() == 0
        state = gather_state(self, is_kept=is_main)
        try:
            if is_main:
                original(self, save_directory, *args, **kwargs, state_dict=state)
        except Exception as failure:
            error = failure
        raise_together(error, "The saved adapter is incomplete")
        return None

    return save_pretrained


def _leave_out(module: nn.Module, state_dict: dict[str, torch.Tensor], prefix: str, _: Any) -> None:
    """Removes a base on disk from the state dict.

    PEFT saves the base of an embedding with its adapter, and a meta tensor has no values.
    """
    for key in [
        key for key, tensor in state_dict.items() if key.startswith(f"{prefix}base_layer.") and tensor.is_meta
    ]:
        del state_dict[key]


def _no_merge(found: str) -> SetupError:
    return SetupError(
        "Adapters cannot be merged into quantized or offloaded weights, which hfq never rewrites.",
        expected="separate adapters",
        found=found,
        fix="Save only the adapter with save_pretrained, or load it onto the unquantized model and merge it "
        "there.",
    )
