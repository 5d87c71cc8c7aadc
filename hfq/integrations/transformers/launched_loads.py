"""Loads of a program that does not name hfq, under `hfq launch` or `HFQ_ENABLE=1`.

Every quantized checkpoint that `PreTrainedModel.from_pretrained` meets then gets an `HfqConfig`. Auto classes
call this method, too, once they have chosen a class, so their errors stay those of transformers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.declared_config import declared_config
from hfq.errors import CheckpointError, FormatError, SetupError, nearest
from hfq.formats.configs.source_config import detection_hints, source_config
from hfq.formats.detection.detect import UnquantizedError, detect_formats, tensors_by_module
from hfq.integrations.hub.find import find_checkpoint
from hfq.integrations.transformers.load_lock import one_load
from hfq.launch_environment import CONFIG, is_enabled, read_options, record, say
from hfq.loading.argument_checks import check_arguments
from hfq.loading.config import METHOD, OPTIONS, HfqConfig
from hfq.loading.context import load_context
from hfq.loading.ranks import is_zero3
from hfq.loading.tensor_parallel.slices import ARGUMENTS
from hfq.placement.device_map import AUTOMATIC
from hfq.tables import as_size

__all__ = ["PLACEMENT", "LaunchOptions", "applying_launch_options"]

PLACEMENT = ("device_map", "max_memory", "offload_folder")
"""Options that are arguments of `from_pretrained`; the others are those of `HfqConfig`."""


@dataclass(frozen=True)
class LaunchOptions:
    """Options of every load in a launched program.

    Attributes:
        config: Options of `HfqConfig`, for quantized checkpoints.
        quantize_weights: Its option of this name, for float checkpoints; None leaves these to plain
            transformers.
        placement: Arguments of `from_pretrained`, for loads whose program passes none.
    """

    config: Mapping[str, Any] = field(default_factory=dict)
    quantize_weights: Any = None
    placement: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, options: Mapping[str, Any], source: str = CONFIG) -> LaunchOptions:
        """Returns the options of a JSON object, checked before anything is loaded.

        Args:
            options: Options by name.
            source: Variable, option, or file that they come from, for messages.

        Raises:
            HfqError: An option is unknown or has an invalid value.
        """
        known = (*PLACEMENT, *OPTIONS)
        for name in options:
            if name not in known:
                raise SetupError(
                    f"The options in {source} have the unknown key {name!r}.{nearest(name, known)}",
                    expected=", ".join(known),
                    found=name,
                    fix="Remove the key, or use one of the expected names.",
                )
        given = {name: value for name, value in options.items() if value is not None}
        checked = {name: value for name, value in given.items() if name in OPTIONS}
        HfqConfig(**{"kernel": "reference", **checked})  # another kernel may start a build
        placement = {name: given.pop(name) for name in PLACEMENT if name in given}
        if "max_memory" in placement:
            placement.setdefault("device_map", "auto")
        if isinstance(placement.get("max_memory"), Mapping):
            limits = placement["max_memory"].items()
            placement["max_memory"] = {int(key) if key.isdecimal() else key: size for key, size in limits}
        check_arguments(placement)
        return cls(given, given.pop("quantize_weights", None), placement)


@functools.cache
def _options_of(text: str) -> LaunchOptions:
    return LaunchOptions.of(read_options(text))


def applying_launch_options(original: Callable) -> Callable:
    """Returns `PreTrainedModel.from_pretrained`, which applies the options of the environment.

    Args:
        original: The function of the class method.
    """

    @functools.wraps(original)
    def from_pretrained(
        cls: Any, pretrained_model_name_or_path: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        path = pretrained_model_name_or_path
        has_source = path is not None or kwargs.get("state_dict") is not None
        if not is_enabled() or not has_source:
            return original(cls, path, *args, **kwargs)
        options = _options_of(os.environ.get(CONFIG, ""))
        chosen, reason = None, ""
        if not load_context().is_active:
            chosen, reason = _choose_config(options, path, kwargs)
        if reason:
            placement = " and ".join(options.placement)
            unused = f" It does not use {placement} of hfq launch." if placement else ""
            say(f"plain transformers loads {cls.__name__ if path is None else path}: {reason}.{unused}")
            with one_load():
                return original(cls, path, *args, **kwargs)
        replaced = ""
        if chosen is not None:
            kwargs["quantization_config"] = chosen
            replaced = _place(options.placement, kwargs)
        found = original(cls, path, *args, **kwargs)
        _report(path, found, "" if chosen is not None else " with the program's own HfqConfig", replaced)
        return found

    return from_pretrained


def _choose_config(
    options: LaunchOptions, path: Any, kwargs: Mapping[str, Any]
) -> tuple[HfqConfig | None, str]:
    """Returns the config of a load, or the reason why it stays with plain transformers.

    Both are empty if the program itself passes an `HfqConfig`.
    """
    stored, unseen = _stored_config(kwargs.get("config")), ""
    asked = _method(kwargs.get("quantization_config"))
    if METHOD in (asked, _method(stored)):
        return None, ""
    if kwargs.get("state_dict") is not None:
        return None, "the program passes state_dict"
    for name in ("load_in_4bit", "load_in_8bit"):
        if kwargs.get(name):
            return None, f"the program passes {name}=True"
    if stored is None:
        stored, unseen = _look(path, kwargs)
    if asked is not None and asked != _method(stored):
        return None, f"the program passes quantization_config={type(kwargs['quantization_config']).__name__}"
    if stored is not None:
        return HfqConfig(**options.config), ""
    if options.quantize_weights is not None:
        return HfqConfig(**options.config, quantize_weights=options.quantize_weights), ""
    return None, unseen or "it is not quantized"


def _stored_config(config: Any) -> Any:
    """Returns the quantization config in a model config, or None."""
    for owner in () if config is None or isinstance(config, (str, os.PathLike)) else _configs(config):
        found = getattr(owner, "quantization_config", None)
        if found is not None:
            return found
    return None


def _configs(config: Any) -> list[Any]:
    """Returns a model config and the configs of its parts, such as that of the text model."""
    return [config, *(value for value in vars(config).values() if hasattr(value, "model_type"))]


def _method(config: Any) -> str | None:
    """Returns the `quant_method` of a quantization config or dict, or None without one."""
    if config is None:
        return None
    method = (
        config.get("quant_method") if isinstance(config, Mapping) else getattr(config, "quant_method", None)
    )
    return str(getattr(method, "value", method))


def _look(path: Any, kwargs: Mapping[str, Any], is_base: bool = False) -> tuple[Any, str]:
    """Returns the quantization config of a checkpoint, without a download of weights.

    Args:
        path: The checkpoint, or an adapter; its base then counts.
        kwargs: Arguments of `from_pretrained`.
        is_base: True for the base of an adapter.

    Returns:
        The config: None for a checkpoint that is not quantized, and empty if only the tensors are. The second
        value says why hfq could not look at the tensors, so that config.json decides; empty if it could.
    """
    if kwargs.get("gguf_file") is not None or str(path).endswith(".gguf"):
        return {}, ""
    names = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
    access = {name: kwargs[name] for name in names if kwargs.get(name) is not None}
    try:
        with find_checkpoint(path, **access) as found:
            return _detected(Checkpoint.open(found.folder, variant=kwargs.get("variant"))), ""
    except CheckpointError as error:  # transformers also reads files that hfq does not, such as pickles
        base = _base_of(path, access)
        if base != path and not is_base:
            return _look(base, kwargs, is_base=True)
        why = error.message.partition(". ")[0].rstrip(".")
        if os.sep not in os.fspath(path) and not os.path.lexists(path):  # a legacy id, such as gpt2
            why = "on the Hub, it only looks at models named organization/model"
        return _declared(path, access), f"hfq could not look at its tensors: {why}"


def _detected(checkpoint: Checkpoint) -> Mapping | None:
    """Returns the quantization config of a checkpoint, as `_look` does."""
    source = None
    try:
        source = source_config(checkpoint)
        detect_formats(tensors_by_module(checkpoint.tensors), detection_hints(checkpoint, source))
    except UnquantizedError:
        return None
    except FormatError:  # the load raises it again
        pass
    return source or {}


def _base_of(path: Any, access: Mapping[str, Any]) -> Any:
    """Returns the base of an adapter, as transformers finds it, or the path itself."""
    from transformers.integrations.peft import maybe_load_adapters

    try:
        return maybe_load_adapters(path, access)[1]
    except OSError:  # the load raises it again
        return path


def _declared(path: Any, access: Mapping[str, Any]) -> Any:
    """Returns the quantization config in config.json, as transformers finds it, or None."""
    from transformers import PreTrainedConfig

    try:
        return declared_config(PreTrainedConfig.get_config_dict(path, **access)[0])
    except OSError:  # the load raises it again
        return None


def _place(placement: Mapping[str, Any], kwargs: dict[str, Any]) -> str:
    """Adds the placement to the arguments of a load, where the program leaves it to the loader.

    A `device_map` such as "auto" leaves it to the loader.

    Returns:
        A sentence about options that arguments of the program replace; empty without one.
    """
    if "offload_folder" in placement and kwargs.get("offload_folder") is None:
        kwargs["offload_folder"] = placement["offload_folder"]
    asked = [name for name in ("device_map", "max_memory") if name in placement]
    device_map = kwargs.get("device_map")
    parallel = next((name for name in ARGUMENTS if kwargs.get(name) is not None), None)
    if is_zero3():
        own = "ZeRO-3"
    elif parallel is not None:
        own = f"{parallel}={kwargs[parallel]!r}"
    elif kwargs.get("max_memory"):
        own = f"max_memory={kwargs['max_memory']!r}"
    elif device_map is not None and not (isinstance(device_map, str) and device_map in AUTOMATIC):
        own = f"device_map={device_map!r}"
    else:
        own = ""
    if asked and not own:
        kwargs.update({name: placement.get(name) for name in ("device_map", "max_memory")})
    if not asked or not own or all(kwargs.get(name) == placement[name] for name in asked):
        return ""
    return f" The program's {own[:80]} replaces {' and '.join(asked)} of hfq launch."


def _report(path: Any, found: Any, by: str, replaced: str) -> None:
    """Prints and records one line about a load of hfq."""
    model = found[0] if isinstance(found, tuple) else found  # with output_loading_info
    loading = getattr(getattr(model, "hf_quantizer", None), "loading", None)
    if loading is None:
        return
    devices = loading.plan.nbytes_by_device().items()
    placed = ", ".join(f"{as_size(nbytes)} on {device}" for device, nbytes in devices)
    line = f"loaded {path}{by}: {loading.describe_formats() or 'unquantized'}; {placed}.{replaced}"
    say(line)
    record(line)
