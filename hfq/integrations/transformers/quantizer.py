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
from hfq.import_hook import run_pending
from hfq.kernels.registry import check_kernel
from hfq.placement.device_map import AUTOMATIC, check_device
from hfq.recipes.recipe import RECIPE_OPTIONS, Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from hfq.loading.model_loader import Loading

__all__ = ["HfqConfig", "HfqQuantizer", "register_with", "take_over"]

METHOD = "hfq"
_UNLIMITED = 1 << 62
_CHOICES = {
    "activations": ("auto", "checkpoint", "none"),
    "execute_on": ("auto", "home", "accelerator"),
    "backing": ("auto", "mapped", "arena", "shared"),
    "stream": ("auto", "direct", "buffered"),
    "verify": ("off", "first", "always"),
    "load": ("ranges", "broadcast"),
    "nvme": ("in_place", "swap"),
}
_OPTIONS = (*_CHOICES, "kernel", "modules_to_not_convert", "expert_cache_nbytes", "outlier_threshold", *RECIPE_OPTIONS)


class HfqConfig(QuantizationConfigMixin):
    """Asks `from_pretrained` to load a quantized checkpoint with hfq, whatever its dialect.

    Args:
        kernel: `"auto"` for the best kernel there is for each layer, `"reference"` for plain torch and results that are the same
            on every machine with the same torch, or the name of another kernel (`hfq.kernels.registry`).
        activations: `"checkpoint"` quantizes activations as the checkpoint's config declares; `"none"` leaves them as they
            are, and so does `"auto"`.
        modules_to_not_convert: Modules that must not be packed. A module that the checkpoint stores packed is refused.
        backing: How packed rows rest in CPU memory: `"mapped"` uses them where they lie in the mapped checkpoint (no copy,
            shared by processes), `"arena"` reads them into private memory, `"shared"` into memory that all processes of the
            node that load them share, `"auto"` maps whatever is aligned and in a local file, and reads the rest (into shared
            memory where a launcher has started several processes on the node). While a DeepSpeed config is alive it maps nothing.
        stream: How blocks that rest on disk are read: `"direct"` past the page cache, `"buffered"` through it, `"auto"` through it
            where all that is streamed fits into half of the available memory.
        verify: Whether what is streamed is compared with checksums that are taken while loading (which reads all of it once):
            `"off"`, at the `"first"` read of each block, or `"always"`.
        expert_cache_nbytes: The most bytes of routed experts that are kept where they compute while they rest elsewhere; None
            takes a tenth of the memory that is available when the model is loaded.
        load: Under ZeRO-3: with `"ranges"` every rank reads the bytes of its own shards; with `"broadcast"` rank 0 reads all and
            deals it out, for clusters of which one node alone has the files.
        execute_on: Where packed layers compute that rest in CPU memory beside an accelerator: `"accelerator"` brings their bytes
            to it, `"home"` brings their activations to the CPU, `"auto"` chooses call by call (`hfq.modules.cpu_execution`).
        outlier_threshold: For bitsandbytes' 8-bit checkpoints under `activations="checkpoint"`: from which amplitude on LLM.int8()
            leaves an input channel as it is; None takes the checkpoint's own, 0 rounds every channel.
        nvme: Under ZeRO-3 with `offload_param.device` `nvme`: with `"in_place"` shards are swapped in from the checkpoint's own
            files, and nothing is written; with `"swap"` DeepSpeed copies them to `nvme_path` when the model is loaded.
        source: The checkpoint's own `quantization_config`; filled in while loading, and written back by `save_pretrained`.
        method: How `hfq.quantize` quantizes a float checkpoint, and `from_pretrained` packs one while loading it, where the method
            needs no calibration; its options are those of `hfq.recipes.recipe.Recipe`: `num_bits`, `group_size`, `symmetric`,
            `act_order`, `static_groups`, `group_order`, `damping`, `clip_search`, `recovery`. `modules_to_not_convert` then stay
            floats.

    Raises:
        SetupError: An option is unknown or has an unusable value.
    """

    def __init__(
        self,
        kernel: str = "auto",
        activations: str = "auto",
        modules_to_not_convert: list[str] | None = None,
        backing: str = "auto",
        stream: str = "auto",
        verify: str = "off",
        expert_cache_nbytes: int | None = None,
        load: str = "ranges",
        nvme: str = "in_place",
        execute_on: str = "accelerator",
        outlier_threshold: float | None = None,
        source: Mapping[str, Any] | None = None,
        method: str | None = None,
        **others: Any,
    ) -> None:
        others.pop("quant_method", None)
        for name in others.keys() - set(RECIPE_OPTIONS):
            raise SetupError(
                f"HfqConfig has no option {name!r}{nearest(name, _OPTIONS)}.", expected=", ".join(_OPTIONS), found=name,
                fix="remove or correct the option",
            )  # fmt: skip
        check_kernel(kernel)
        chosen = {
            "activations": activations,
            "backing": backing,
            "stream": stream,
            "verify": verify,
            "load": load,
            "nvme": nvme,
            "execute_on": execute_on,
        }
        _check_choices(chosen)
        _check_values(modules_to_not_convert, expert_cache_nbytes, outlier_threshold, source)
        self.quant_method = METHOD  # transformers takes any string that is registered
        self.kernel, self.activations, self.backing = kernel, activations, backing
        self.stream, self.verify, self.expert_cache_nbytes = stream, verify, expert_cache_nbytes
        self.load, self.nvme = load, nvme
        self.execute_on, self.outlier_threshold = execute_on, outlier_threshold
        self.modules_to_not_convert = list(modules_to_not_convert) if modules_to_not_convert is not None else None
        self.source = copy.deepcopy(dict(source)) if source is not None else None
        self.method = method
        self._set_recipe(others)

    def _set_recipe(self, options: Mapping[str, Any]) -> None:
        given = {name: value for name, value in options.items() if value is not None}
        if given and self.method is None:
            raise SetupError(
                f"HfqConfig({next(iter(given))}=…) says how to quantize, and no method is given.", expected="method=… beside it",
                found=", ".join(given), fix="pass method, or leave these out to load a quantized checkpoint",
            )  # fmt: skip
        if self.method is not None:
            Recipe.of({**given, "method": self.method})
        for name in RECIPE_OPTIONS[1:]:
            setattr(self, name, given.get(name))

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


def _check_choices(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if not isinstance(value, str) or value not in _CHOICES[name]:
            raise SetupError(
                f"HfqConfig({name}={value!r}) is not a choice{nearest(str(value), _CHOICES[name])}.",
                expected=" or ".join(map(repr, _CHOICES[name])), found=repr(value), fix="correct the option",
            )  # fmt: skip


def _check_values(modules: Any, expert_cache_nbytes: Any, outlier_threshold: Any, source: Any) -> None:
    is_list = isinstance(modules, (list, tuple, set)) and all(isinstance(name, str) and name for name in modules)
    if modules is not None and not is_list:
        raise SetupError(
            "HfqConfig(modules_to_not_convert=…) wants a list of module names.", expected="['lm_head', …]",
            found=repr(modules)[:80], fix="pass a list",
        )  # fmt: skip
    is_size = isinstance(expert_cache_nbytes, int) and not isinstance(expert_cache_nbytes, bool) and expert_cache_nbytes >= 0
    if expert_cache_nbytes is not None and not is_size:
        raise SetupError(
            "HfqConfig(expert_cache_nbytes=…) wants a number of bytes.", expected="an int, 0 or more; or None",
            found=repr(expert_cache_nbytes)[:80], fix="pass bytes, as 2 * 2**30",
        )  # fmt: skip
    is_number = isinstance(outlier_threshold, (int, float)) and not isinstance(outlier_threshold, bool)
    if outlier_threshold is not None and not (is_number and 0 <= outlier_threshold < float("inf")):
        raise SetupError(
            "HfqConfig(outlier_threshold=…) wants an amplitude.", expected="a number, 0 or more; or None",
            found=repr(outlier_threshold)[:80], fix="pass a number, as 6.0",
        )  # fmt: skip
    if source is not None and not isinstance(source, Mapping):
        raise SetupError(
            "HfqConfig(source=…) wants the checkpoint's quantization_config.", expected="a dict", found=repr(source)[:80],
            fix="leave source out; it is filled in while loading",
        )  # fmt: skip


class HfqQuantizer(HfQuantizer):
    """The hooks of `from_pretrained`; each hands over to `hfq.loading.model_loader.Loading`."""

    quantization_config: HfqConfig

    def __init__(self, quantization_config: HfqConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.pre_quantized = True
        self.loading: Loading | None = None
        self._dtype: torch.dtype | None = None
        self._max_memory: dict[int | str, int] | None = None

    def validate_environment(self, *args: Any, device_map: Any = None, **kwargs: Any) -> None:
        """Called twice: with the user's device_map, and, for an automatic one, with the map that transformers inferred."""
        if isinstance(device_map, str) and device_map not in AUTOMATIC:
            check_device(device_map)
        if self.loading is not None and isinstance(device_map, dict):
            self.loading.place(device_map, self._max_memory)

    def adjust_max_memory(self, max_memory: dict) -> dict:
        """Called for an automatic device_map: keeps what each device may hold, to plan with once a map is inferred.

        transformers' own plan knows no ring. It is told that everything fits where it computes, so that it has nothing to plan
        and to warn of; several accelerators without offload are left to it.
        """
        from hfq.loading.automatic_map import computing_device

        computing = computing_device(max_memory)
        if computing is None:
            return max_memory
        self._max_memory = dict(max_memory)
        return {computing: _UNLIMITED}

    def update_device_map(self, device_map: Any) -> Any:
        """A copy of the user's map: hfq hands transformers the devices that compute, in place of the homes that rest."""
        return dict(device_map) if isinstance(device_map, dict) else device_map

    def preprocess_model(self, model, dtype=None, **kwargs):
        """Keeps the dtype, which the base class does not pass on."""
        self._dtype = dtype
        super().preprocess_model(model, dtype=dtype, **kwargs)

    def _process_model_before_weight_loading(self, model, device_map=None, checkpoint_files=None, **kwargs):
        from hfq.integrations.deepspeed.zero3_loader import ShardedLoading
        from hfq.integrations.deepspeed.zero_config import is_zero3
        from hfq.loading.meta_model import SkeletonReached, stop_at_skeleton
        from hfq.loading.model_loader import Loading
        from hfq.loading.quantize_on_load.quantizing_loader import PackingLoading
        from hfq.loading.quantize_on_load.requirements import check_packing
        from hfq.loading.tensor_parallel.sliced_loader import SlicedLoading
        from hfq.loading.tensor_parallel.slices import tensor_parallel_size

        is_packing = self.quantization_config.method is not None
        if is_packing:
            check_packing(self.quantization_config, tensor_parallel_size(model) > 1)
        kind = ShardedLoading if is_zero3() else SlicedLoading if tensor_parallel_size(model) > 1 else Loading
        kind = PackingLoading if is_packing else kind
        self.loading = kind(model, self.quantization_config, checkpoint_files, self._dtype)
        self.quantization_config = self.loading.config
        if stop_at_skeleton.get():
            raise SkeletonReached(self.loading)
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

    from hfq.loading.argument_checks import open_local

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
