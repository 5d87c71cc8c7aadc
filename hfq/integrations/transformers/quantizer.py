"""`HfqQuantizer`, the hooks that transformers calls during `from_pretrained`."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer

from hfq.import_hook import run_pending
from hfq.integrations.transformers.interpreter import without_torch_modes
from hfq.loading.config import METHOD, HfqConfig
from hfq.loading.context import load_context
from hfq.placement.device_map import AUTOMATIC, check_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from hfq.loading.model_loader import ModelLoader

__all__ = ["HfqQuantizer", "register_with"]

_UNLIMITED = 1 << 62


class HfqQuantizer(HfQuantizer):
    """Hooks of `from_pretrained`, which call `hfq.loading.model_loader.ModelLoader`."""

    quantization_config: HfqConfig

    def __init__(self, quantization_config: HfqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True
        self.loading: ModelLoader | None = None
        self._dtype: torch.dtype | None = None
        self._max_memory: dict[int | str, int] | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Checks the device map of the user.

        transformers calls it a second time with the map that it inferred. This is the only call between the
        inference of an automatic map and the load of the weights, so it places the model.
        """
        if isinstance(device_map, str) and device_map not in AUTOMATIC:
            check_device(device_map)
        if self.loading is not None and isinstance(device_map, dict):
            self._place_model(device_map)

    def _place_model(self, device_map: dict[str, Any] | None) -> None:
        """Places every tensor, and passes the map of execution devices to transformers.

        Args:
            device_map: The map of the user, or the map that transformers inferred. transformers keeps this
                dict, so its entries are replaced.
        """
        loading: ModelLoader = self.loading  # type: ignore[assignment]
        with without_torch_modes(), loading.with_experts():
            execution_map = loading.place(device_map, self._max_memory)
        if device_map is not None and execution_map is not None:
            device_map.clear()
            device_map.update(execution_map)

    def update_dtype(self, dtype: torch.dtype | None) -> torch.dtype | None:
        """Returns the dtype of unquantized weights.

        transformers passes None for a GGUF file whose config names none. As upstream does, hfq then takes the
        dtype of the file's weights, or float32 if they are quantized.
        """
        checkpoint = load_context().checkpoint
        if dtype is not None or checkpoint is None or checkpoint.gguf is None:
            return dtype
        types = {info.dtype for info in checkpoint.tensors.values() if info.blocks is not None}
        if "U8" in types or not {"BF16", "F16"} & types:
            return torch.float32
        return torch.bfloat16 if "BF16" in types else torch.float16

    def adjust_max_memory(self, max_memory: dict) -> dict:
        """Keeps the memory limits of an automatic device map, to plan once a map is inferred.

        transformers' own plan does not count the offload buffer. It is told that the whole model fits on the
        execution device, so that it neither plans nor warns.
        """
        from hfq.loading.automatic_map import automatic_limits, computing_devices

        # transformers lowers these limits to parts of the unquantized model, and omits some accelerators
        limits = automatic_limits(load_context().max_memory)
        self._max_memory = limits
        return {computing_devices(limits)[0]: _UNLIMITED}

    def update_device_map(self, device_map: Any) -> Any:
        """Returns a copy of the user's map.

        hfq replaces its entries by execution devices for transformers.
        """
        return dict(device_map) if isinstance(device_map, dict) else device_map

    def preprocess_model(
        self, model: PreTrainedModel, dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        """Stores the dtype, which the base class does not pass on."""
        self._dtype = dtype
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(
        self,
        model: PreTrainedModel,
        device_map: Any = None,
        checkpoint_files: list[str] | None = None,
        **kwargs: Any,
    ) -> PreTrainedModel:
        # imported here, since transformers imports this file during its own import
        from hfq.integrations.transformers.load_kinds import choose_loader
        from hfq.loading.gguf.metadata_config import check_rope_tensors
        from hfq.loading.gguf.stored_floats import convert_tensors
        from hfq.loading.meta_model import MetaModelReached

        with without_torch_modes():
            loader = choose_loader(self.quantization_config, model)
            self.loading = loader(model, self.quantization_config, checkpoint_files, self._dtype)
        self.quantization_config = self.loading.config
        if load_context().stops_at_meta_model:
            raise MetaModelReached(self.loading)
        with without_torch_modes():
            check_rope_tensors(model.config, self.loading.checkpoint, self.loading.reader)
            convert_tensors(self.loading)
        self.loading.hide_experts()
        if not isinstance(device_map, str):
            self._place_model(device_map)
        return model

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **kwargs: Any) -> PreTrainedModel:
        if self.loading is not None:
            self.loading.finish()
        return model

    def _dequantize(self, model: PreTrainedModel, dtype: torch.dtype | None = None) -> PreTrainedModel:
        """Replaces quantized modules by unquantized ones, for `model.dequantize()`."""
        self.loading.dequantize(model, dtype or model.dtype)  # type: ignore[union-attr]
        return model

    def get_state_dict_and_metadata(self, model: PreTrainedModel) -> tuple[dict | None, dict]:
        """Returns the tensors and the file metadata to save.

        Tensors on disk are views of the checkpoint. hfq itself writes GGUF files.
        """
        if self.loading is None:
            return None, {}
        is_adapter = getattr(model, "_hf_peft_config_loaded", False)
        return ({}, {}) if self.loading.checkpoint.gguf and not is_adapter else self.loading.state_dict(model)

    def is_serializable(self) -> bool:
        return True

    @property
    def is_compileable(self) -> bool:
        """True if `generate` may compile the forward pass: all weights stay in memory.

        transformers asks before each generation with a static cache.
        """
        if self.loading is None or self.loading.offloader is not None:
            return False
        return all(module.fits_graph() for module in self.loading.quantized.values())

    @property
    def is_trainable(self) -> bool:
        return True


def register_with(auto: ModuleType) -> None:
    """Registers hfq's config and quantizer with `transformers.quantizers.auto`."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(HfqConfig)
        auto.register_quantizer(METHOD)(HfqQuantizer)


run_pending()
