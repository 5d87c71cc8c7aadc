"""`HfqConfig` and `HfqQuantizer`: hfq as transformers sees it."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from hfq.errors import SetupError, nearest
from hfq.integrations.registration import run_pending
from hfq.kernels.table import choose_kernel
from hfq.placement.device_map import AUTOMATIC, check_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfq.integrations.loading import Loading

__all__ = ["HfqConfig", "HfqQuantizer", "register_with", "take_over"]

METHOD = "hfq"
_CHOICES = {"activations": ("auto", "checkpoint", "none"), "backing": ("auto", "mapped", "arena")}


class HfqConfig(QuantizationConfigMixin):
    """Asks `from_pretrained` to load a quantized checkpoint with hfq, whatever its dialect.

    Args:
        kernel: `"auto"` for the best kernel there is, or `"reference"` for plain torch.
        activations: `"checkpoint"` quantizes activations as the checkpoint's config declares; `"none"` leaves them as they
            are; `"auto"` quantizes them only where the kernel multiplies quantized activations natively, which none does yet.
        modules_to_not_convert: Modules that must not be packed. A module that the checkpoint stores packed is refused.
        backing: How packed rows rest in CPU memory: `"mapped"` uses them where they lie in the mapped checkpoint (no copy,
            shared by processes), `"arena"` reads each into a private buffer, `"auto"` maps whatever is aligned.
        source: The checkpoint's own `quantization_config`; filled in while loading, and written back by `save_pretrained`.

    Raises:
        SetupError: An option is unknown or has an unusable value.
    """

    def __init__(
        self,
        kernel: str = "auto",
        activations: str = "auto",
        modules_to_not_convert: list[str] | None = None,
        backing: str = "auto",
        source: Mapping[str, Any] | None = None,
        **unknown: Any,
    ) -> None:
        options = ("kernel", "activations", "modules_to_not_convert", "backing")
        unknown.pop("quant_method", None)
        for name in unknown:
            raise SetupError(
                f"HfqConfig has no option {name!r}{nearest(name, options)}.", expected=", ".join(options), found=name,
                fix="remove or correct the option",
            )  # fmt: skip
        choose_kernel(kernel)
        for name, value in (("activations", activations), ("backing", backing)):
            if not isinstance(value, str) or value not in _CHOICES[name]:
                raise SetupError(
                    f"HfqConfig({name}={value!r}) is not a choice{nearest(str(value), _CHOICES[name])}.",
                    expected=" or ".join(map(repr, _CHOICES[name])), found=repr(value), fix="correct the option",
                )  # fmt: skip
        modules = modules_to_not_convert
        is_list = isinstance(modules, (list, tuple, set)) and all(isinstance(name, str) and name for name in modules)
        if modules is not None and not is_list:
            raise SetupError(
                "HfqConfig(modules_to_not_convert=…) wants a list of module names.", expected="['lm_head', …]",
                found=repr(modules)[:80], fix="pass a list",
            )  # fmt: skip
        if source is not None and not isinstance(source, Mapping):
            raise SetupError(
                "HfqConfig(source=…) wants the checkpoint's quantization_config.", expected="a dict", found=repr(source)[:80],
                fix="leave source out; it is filled in while loading",
            )  # fmt: skip
        self.quant_method = METHOD  # transformers takes any string that is registered
        self.kernel, self.activations, self.backing = kernel, activations, backing
        self.modules_to_not_convert = list(modules) if modules is not None else None
        self.source = copy.deepcopy(dict(source)) if source is not None else None

    def to_dict(self) -> dict[str, Any]:
        """The source dialect's config once a checkpoint is loaded, so that what is saved stays readable by others."""
        return copy.deepcopy(self.source if self.source is not None else self.options())

    def options(self) -> dict[str, Any]:
        """All of hfq's own options, and the source."""
        return copy.deepcopy(self.__dict__)

    def with_source(self, source: Mapping[str, Any] | None) -> HfqConfig:
        """A copy that carries the checkpoint's own config."""
        return HfqConfig(**{**self.options(), "source": source if source is not None else self.source})

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict; transformers asks a config it is handed back for its `quant_method`."""
        return self.options().get(key, default)


class HfqQuantizer(HfQuantizer):
    """The hooks of `from_pretrained`; each hands over to `hfq.integrations.loading.Loading`."""

    quantization_config: HfqConfig

    def __init__(self, quantization_config: HfqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True
        self.loading: Loading | None = None
        self._dtype: torch.dtype | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called twice: with the user's device_map, and, for an automatic one, with the map that transformers inferred."""
        if isinstance(device_map, str) and device_map not in AUTOMATIC:
            check_device(device_map)
        if self.loading is not None and isinstance(device_map, dict):
            self.loading.place(device_map)

    def update_device_map(self, device_map: Any) -> Any:
        """A copy of the user's map: hfq hands transformers the devices that compute, in place of the homes that rest."""
        return dict(device_map) if isinstance(device_map, dict) else device_map

    def preprocess_model(self, model, dtype=None, **kwargs):
        """Keeps the dtype, which the base class does not pass on."""
        self._dtype = dtype
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(self, model, device_map=None, checkpoint_files=None, **kwargs):
        from hfq.integrations.loading import Loading

        self.loading = Loading(model, self.quantization_config, checkpoint_files, self._dtype)
        self.quantization_config = self.loading.config
        if not isinstance(device_map, str):
            self.loading.place(device_map)
        return model

    def _process_model_after_weight_loading(self, model, **kwargs):
        if self.loading is not None:
            self.loading.finish()
        return model

    def get_state_dict_and_metadata(self, model):
        """Every tensor that rests in memory as it is, every tensor that rests on disk as a view of the checkpoint."""
        return self.loading.state_dict(model) if self.loading is not None else (None, {})

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


def take_over(path: str | os.PathLike, config: HfqConfig | None = None, **kwargs: Any) -> PreTrainedConfig:
    """The config of a quantized checkpoint, made to name hfq; the way to load one by public API alone.

        AutoModelForCausalLM.from_pretrained(path, config=hfq.take_over(path))

    Args:
        path: The checkpoint's folder or its name on the hub.
        config: The options to load it with.
        kwargs: Passed on to `AutoConfig.from_pretrained`.
    """
    from transformers import AutoConfig

    from hfq.integrations.preflight import open_local

    open_local(path, kwargs)
    taken = AutoConfig.from_pretrained(path, **kwargs)
    source = getattr(taken, "quantization_config", None)
    taken.quantization_config = (config or HfqConfig()).with_source(source).options()
    return taken


def register_with(auto: ModuleType) -> None:
    """Registers hfq's config and quantizer with `transformers.quantizers.auto`."""
    if METHOD not in auto.AUTO_QUANTIZER_MAPPING:
        auto.register_quantization_config(METHOD)(HfqConfig)
        auto.register_quantizer(METHOD)(HfqQuantizer)


run_pending()
