"""The options of a load, as users pass them to `from_pretrained`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from hfq.errors import SetupError, nearest
from hfq.kernels.registry import check_kernel
from hfq.recipes.recipe import RECIPE_OPTIONS, Recipe

__all__ = ["METHOD", "HfqConfig"]

METHOD = "hfq"
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
