"""Options of one load, as users pass them to `from_pretrained`."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal, get_args

from transformers.utils.quantization_config import QuantizationConfigMixin

from hfq.errors import PlacementError, SetupError, nearest
from hfq.kernels.registry import check_kernel
from hfq.placement.estimate.hardware import parse_size
from hfq.recipes.recipe import Recipe

__all__ = ["METHOD", "HfqConfig"]

METHOD = "hfq"
CpuMemory = Literal["auto", "mmap", "private", "shared"]
DiskIo = Literal["auto", "direct", "buffered"]
DiskChecksum = Literal["off", "first", "always"]
CpuLayerDevice = Literal["accelerator", "cpu", "auto"]
ReaderRanks = Literal["all", "rank0"]
NvmeSource = Literal["checkpoint", "swap_files"]
OutputHeadFormat = Literal["fp8", "int8"]
_CHOICES = {
    "cpu_memory": CpuMemory,
    "disk_io": DiskIo,
    "disk_checksum": DiskChecksum,
    "execute_cpu_layers_on": CpuLayerDevice,
    "reader_ranks": ReaderRanks,
    "nvme_source": NvmeSource,
    "quantize_output_head": OutputHeadFormat,
}
_SOURCE = "_source"
_LOAD_ARGUMENTS = (
    *("attn_implementation", "device_map", "dtype", "gguf_file", "max_memory", "offload_folder"),
    *("revision", "torch_dtype", "trust_remote_code"),
)


class HfqConfig(QuantizationConfigMixin):
    """Options of `from_pretrained` for a model that hfq loads; most loads need none of them.

    Placement is not an option here. Pass `device_map`, `max_memory`, `offload_folder`, and `dtype` to
    `from_pretrained`.

    Args:
        quantize_weights: Name of a method that needs no calibration data, a `Recipe`, or a dict of its
            options. Quantizes a float checkpoint while it is loaded. None, the default, loads the stored
            weights unchanged.
        quantize_output_head: `"fp8"` or `"int8"` rounds the output head (`lm_head`) while it is loaded, with
            one scale per output channel. Results are then not those of the checkpoint. A save writes the head
            of the checkpoint. None (default) leaves the head as it is stored.
        modules_to_not_convert: List of module names that stay unquantized, or None (default). An error is
            raised for a name that matches no module, or a module that the checkpoint stores quantized.
        quantize_activations: True quantizes activations as the config of the checkpoint declares. False
            (default) leaves them in the dtype of the model.
        llm_int8_threshold: Amplitude from which LLM.int8() leaves an input channel unquantized, for 8-bit
            bitsandbytes checkpoints with `quantize_activations`. None (default) uses the value of the
            checkpoint. 0 quantizes every channel.
        kernel: `"auto"` (default) chooses the best kernel for each layer. `"reference"` uses plain PyTorch
            and returns the same results on every machine with the same PyTorch version.
            `hfq.kernels.registry.KERNELS` lists the other names.
        cpu_memory: Memory for weights on the CPU. `"mmap"` maps the checkpoint files. `"private"` reads
            them into memory of this process, and `"shared"` into memory that all processes of the node share.
            `"auto"` (default) maps aligned tensors on a local file system, except under a DeepSpeed config,
            and reads the others. It reads them into shared memory if a launcher started several processes.
        disk_io: Read path for weights on disk. `"direct"` bypasses the page cache, and `"buffered"` uses it.
            `"auto"` (default) uses the page cache if they all fit in half of the memory that is available
            beyond the mapped weights.
        disk_checksum: Compares weights read from disk with checksums that are computed during the load, which
            reads every weight once. `"off"` (default) skips the check, `"first"` checks the first read of
            each unit, and `"always"` checks every read.
        expert_cache_size: Memory for offloaded experts on each execution device, which keeps those that are
            used most: bytes as an int, or text with a unit such as `"4GiB"`. It never holds less than the
            experts that a token is routed to in one layer; on the CPU, in two, so that the next layer is read
            while one computes. None (default) uses the memory that an automatic device map leaves free;
            without such a map, what the accelerator has free, or a tenth of the host's available memory. On
            an accelerator, room for the KV cache and the activations of 2048 tokens stays free.
        execute_cpu_layers_on: Device that computes quantized layers on the CPU if there is an accelerator.
            `"accelerator"` (default) copies their weights there. `"cpu"` computes on the CPU and moves the
            activations. `"auto"` chooses for each call.
        reader_ranks: Ranks that read the checkpoint under ZeRO-3. With `"all"` (default), every rank reads
            its own shards. With `"rank0"`, rank 0 reads and scatters them, for clusters where only one node
            has the files.
        nvme_source: Files that ZeRO-3 reads shards from if `offload_param.device` is `nvme`. `"checkpoint"`
            (default) reads the checkpoint itself. `"swap_files"` reads the files that DeepSpeed writes to
            `nvme_path`.

    Raises:
        SetupError: An option is unknown or has an invalid value.
    """

    def __init__(
        self,
        *,
        quantize_weights: str | Recipe | Mapping[str, Any] | None = None,
        quantize_output_head: OutputHeadFormat | None = None,
        modules_to_not_convert: list[str] | None = None,
        quantize_activations: bool = False,
        llm_int8_threshold: float | None = None,
        kernel: str = "auto",
        cpu_memory: CpuMemory = "auto",
        disk_io: DiskIo = "auto",
        disk_checksum: DiskChecksum = "off",
        expert_cache_size: int | str | None = None,
        execute_cpu_layers_on: CpuLayerDevice = "accelerator",
        reader_ranks: ReaderRanks = "all",
        nvme_source: NvmeSource = "checkpoint",
        **others: Any,
    ) -> None:
        others.pop("quant_method", None)
        _check_known(others)
        check_kernel(kernel)
        self.quant_method = METHOD  # transformers accepts any registered string
        self.quantize_weights = _as_recipe(quantize_weights)
        self.quantize_output_head = (
            None if quantize_output_head is None else _choice("quantize_output_head", quantize_output_head)
        )
        self.modules_to_not_convert = _module_names(modules_to_not_convert)
        self.quantize_activations = _flag("quantize_activations", quantize_activations)
        self.llm_int8_threshold = _threshold(llm_int8_threshold)
        self.kernel = kernel
        self.cpu_memory = _choice("cpu_memory", cpu_memory)
        self.disk_io = _choice("disk_io", disk_io)
        self.disk_checksum = _choice("disk_checksum", disk_checksum)
        self.expert_cache_size = expert_cache_size
        self.execute_cpu_layers_on = _choice("execute_cpu_layers_on", execute_cpu_layers_on)
        self.reader_ranks = _choice("reader_ranks", reader_ranks)
        self.nvme_source = _choice("nvme_source", nvme_source)
        self._source: dict[str, Any] | None = None
        self._expert_cache_nbytes = _size("expert_cache_size", expert_cache_size)

    @property
    def recipe(self) -> Recipe | None:
        """Recipe for a float checkpoint; None if the checkpoint is loaded unchanged."""
        return self.quantize_weights

    @property
    def expert_cache_nbytes(self) -> int | None:
        """`expert_cache_size` in bytes, or None."""
        return self._expert_cache_nbytes

    def to_dict(self) -> dict[str, Any]:
        """Returns the quantization config of the checkpoint if known, else the options.

        `save_pretrained` writes this dict to config.json, so that other tools can read the saved model.
        """
        return copy.deepcopy(self._source if self._source is not None else self._options())

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """Returns the config for a dict from `to_dict` or `hfq.pretrained_config`."""
        options = {**config_dict, **kwargs}
        source = options.pop(_SOURCE, None)
        config = cls(**options)._with_source(source)
        return (config, {}) if return_unused_kwargs else config

    def get(self, key: str, default: Any = None) -> Any:
        """Returns the option with this name, or `default`.

        transformers reads `quant_method` this way from a config that was a dict.
        """
        return self._options().get(key, default)

    def __repr__(self) -> str:
        given = {
            name: value for name, value in self._options().items() if name not in ("quant_method", _SOURCE)
        }
        return f"HfqConfig({', '.join(f'{name}={value!r}' for name, value in given.items())})"

    def _options(self) -> dict[str, Any]:
        """Returns all options as JSON-ready data, and the source quantization config if known."""
        options = {name: value for name, value in self.__dict__.items() if not name.startswith("_")}
        if self.quantize_weights is not None:
            options["quantize_weights"] = self.quantize_weights.chosen()
        if self._source is not None:
            options[_SOURCE] = self._source
        return copy.deepcopy(options)

    def _with_source(self, source: Mapping[str, Any] | None) -> HfqConfig:
        """Returns a copy that carries the quantization config of the checkpoint."""
        carried = copy.deepcopy(self)
        if source is not None:
            carried._source = copy.deepcopy(dict(source))
        return carried


OPTIONS = (
    "quantize_weights",
    "quantize_output_head",
    "modules_to_not_convert",
    "quantize_activations",
    "llm_int8_threshold",
    "kernel",
    "cpu_memory",
    "disk_io",
    "disk_checksum",
    "expert_cache_size",
    "execute_cpu_layers_on",
    "reader_ranks",
    "nvme_source",
)
"""The options of `HfqConfig`, in the order of docs/reference/options.md."""


def _check_known(others: Mapping[str, Any]) -> None:
    for name in others:
        if name in _LOAD_ARGUMENTS:
            raise SetupError(
                f"{name} is not an option of HfqConfig, but an argument of from_pretrained.",
                expected=", ".join(OPTIONS),
                found=name,
                fix=f"Call from_pretrained(model, {name}=…, quantization_config=HfqConfig()).",
            )
        raise SetupError(
            f"HfqConfig has no option {name!r}.{nearest(name, OPTIONS)}",
            expected=", ".join(OPTIONS),
            found=name,
            fix="Remove the option, or use one of the expected names.",
        )


def _as_recipe(given: Any) -> Recipe | None:
    if given is None or isinstance(given, Recipe):
        return given
    if isinstance(given, str):
        return Recipe(given)
    if isinstance(given, Mapping):
        return Recipe.of(given)
    raise SetupError(
        "HfqConfig(quantize_weights=…) requires a method or a recipe.",
        expected='"fp8", Recipe("rtn", bits=4), or None',
        found=repr(given)[:80],
        fix="Pass the name of a method, or a Recipe.",
    )


def _choice(name: str, value: Any) -> Any:
    choices = get_args(_CHOICES[name])
    if not isinstance(value, str) or value not in choices:
        raise SetupError(
            f"{name}={value!r} is not valid.{nearest(str(value), choices)}",
            expected=" or ".join(map(repr, choices)),
            found=repr(value),
            fix="Use one of these values.",
        )
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise SetupError(
            f"{name}={value!r} is not valid.",
            expected="True or False",
            found=repr(value)[:80],
            fix="Use one of these values.",
        )
    return value


def _module_names(given: Any) -> list[str] | None:
    is_list = isinstance(given, (list, tuple, set)) and all(isinstance(name, str) and name for name in given)
    if given is not None and not is_list:
        raise SetupError(
            "HfqConfig(modules_to_not_convert=…) requires a list of module names.",
            expected="['lm_head', …]",
            found=repr(given)[:80],
            fix="Pass a list of module names.",
        )
    return None if given is None else list(given)


def _threshold(given: Any) -> float | None:
    is_number = isinstance(given, (int, float)) and not isinstance(given, bool)
    if given is not None and not (is_number and 0 <= given < float("inf")):
        raise SetupError(
            "HfqConfig(llm_int8_threshold=…) requires an amplitude.",
            expected="a number of at least 0, or None",
            found=repr(given)[:80],
            fix="Pass a number, for example 6.0.",
        )
    return given


def _size(name: str, given: Any) -> int | None:
    if given is None:
        return None
    is_size = isinstance(given, int) and not isinstance(given, bool) and given >= 0
    if is_size:
        return given
    try:
        if isinstance(given, str):
            return parse_size(given, name, least=0)
    except PlacementError as error:
        raise SetupError(error.message, expected=error.expected, found=error.found, fix=error.fix) from error
    raise SetupError(
        f"HfqConfig({name}=…) requires a size.",
        expected='bytes as an int, text such as "4GiB", or None',
        found=repr(given)[:80],
        fix='Pass a size with a unit, for example "4GiB".',
    )
