"""Checks of a checkpoint's config.json before a config or a model of its sizes is built.

transformers builds Python objects for some sizes, such as one name for each label, and fetches an attention
kernel that the config names. So both are checked on the JSON.
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from hfq.checkpoint import Checkpoint
from hfq.errors import FormatError

__all__ = ["check_buffers", "check_config", "check_sizes"]

_NEEDED = ("hidden_size", "vocab_size", "d_model", "n_embd")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_SIZES = (
    *_NEEDED,
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "d_ff",
    "ffn_dim",
    "moe_intermediate_size",
    *_EXPERTS,
)
_MAY_BE_ZERO = ("moe_intermediate_size", *_EXPERTS)
_DEPTHS = (
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "decoder_layers",
    "encoder_layers",
    "num_decoder_layers",
    "depth",
)
_NO_CONFIGS = ("quantization_config", "id2label", "label2id")
_MOST_ELEMENTS = 1 << 50
_COUNTED_PARTS = re.compile(
    r"layer|block|depth|stage|attention_types|flows|group|cycles|image_with|levels|networks|outputs"
    r"|conv_pos|coder_n_points|hash_functions|symmetric_num"
)
_COUNTED_CHANNELS = re.compile(r"expert|label|classes|codebook|quantizer|codes")
_NO_COUNT = re.compile(r"size|dim|token|theta|channel|vocab|width|window|position|length|rate|time|inde|_id")
_FEW_PARTS = 1000
_FEW_CHANNELS = 10_000
_MOST_WITHOUT_HEADERS = 1 << 20
_MOST_BUFFER_NBYTES = 1 << 30


def check_config(
    config: Mapping[str, Any],
    file: object,
    checkpoint: Checkpoint | None = None,
    chooses_attention: bool = False,
) -> None:
    """Checks a config before an object of its sizes is built.

    Args:
        config: The JSON of config.json.
        file: The name of the file, for messages.
        checkpoint: The checkpoint with validated headers; None if its files are not known yet.
        chooses_attention: True if the user passes `attn_implementation`, which replaces that of the config.

    Raises:
        FormatError: A size is not a positive integer or does not fit the checkpoint, or the config names an
            attention kernel of the Hub.
    """
    if not chooses_attention:
        _check_attention(config, file)
    for part in _nested(config):
        _check_counts(part, file, checkpoint)
        if checkpoint is not None:
            _check_sizes(part, file, checkpoint)


def check_sizes(checkpoint: Checkpoint, chooses_attention: bool = False) -> None:
    """Checks config.json of a checkpoint, as `check_config`."""
    check_config(checkpoint.config, Path(checkpoint.root) / "config.json", checkpoint, chooses_attention)


def check_buffers(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Checks the sizes of a meta model's tensors that are computed and not stored.

    Raises:
        FormatError: They are larger than the checkpoint and a fixed limit.
    """
    stored = model.state_dict().keys()
    computed = {name: buffer.nbytes for name, buffer in model.named_buffers() if name not in stored}
    limit = max(_MOST_BUFFER_NBYTES, checkpoint.nbytes)
    if sum(computed.values()) > limit:
        largest = max(computed, key=lambda name: computed[name])
        raise FormatError(
            "The sizes in config.json require more memory than this checkpoint can use. Nothing was loaded.",
            file=Path(checkpoint.root) / "config.json",
            tensor=largest,
            expected=f"computed tensors of at most {limit} bytes",
            found=f"{sum(computed.values())} bytes",
            fix="Download config.json of this model again.",
        )


def _check_attention(config: Mapping[str, Any], file: object) -> None:
    """Raises an error if a config names code of the Hub as its attention.

    With the package kernels, transformers also fetches a missing flash attention.
    """
    may_fetch_flash = importlib.util.find_spec("kernels") is not None
    for key, value in _entries(config):
        if "attn_implementation" not in str(key) or not isinstance(value, str):
            continue
        if "/" in value or (may_fetch_flash and "flash" in value):
            raise FormatError(
                "config.json names an attention kernel that transformers may fetch from the Hub and run. "
                "Nothing was loaded.",
                file=file,
                expected="an attention implementation that is part of transformers",
                found=f"{key}={value!r}",
                fix='Pass attn_implementation="sdpa" to from_pretrained, or a kernel that you trust.',
            )


def _entries(value: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yields each simple value of a JSON object with its key.

    The key of `{"attn_implementation": {part: value}}` is "attn_implementation".
    """
    pending = [(key, value)]
    while pending:
        key, value = pending.pop()
        if isinstance(value, Mapping):
            inner = key if "attn_implementation" in key else None
            pending += [(inner or str(name), item) for name, item in value.items()]
        elif isinstance(value, list):
            pending += [(key, item) for item in value]
        else:
            yield key, value


def _check_counts(config: Mapping[str, Any], file: object, checkpoint: Checkpoint | None) -> None:
    """Raises an error for a number of parts that the stored tensors do not support."""
    most_parts = most_channels = _MOST_WITHOUT_HEADERS
    if checkpoint is not None:
        most_parts = max(len(checkpoint.tensors), _FEW_PARTS)
        shapes = {info.shape for info in checkpoint.tensors.values()}
        most_channels = max(_largest(shapes), len(checkpoint.tensors), _FEW_CHANNELS)
    for key, value in config.items():
        if _NO_COUNT.search(str(key)):
            continue
        if _COUNTED_CHANNELS.search(str(key)):
            bound = most_channels
        elif _COUNTED_PARTS.search(str(key)):
            bound = most_parts
        else:
            continue
        if any(number > bound for number in _numbers(value)):
            raise _impossible(file, key, value, f"numbers of at most {bound}")


def _largest(shapes: Iterable[tuple[int, ...]]) -> int:
    """Returns the largest size of a dimension of all tensors that are not empty."""
    return max((max(shape) for shape in shapes if shape and min(shape) > 0), default=0)


def _numbers(value: object) -> Iterator[int]:
    """Yields the integers of a value and of lists in it."""
    pending = [value]
    while pending:
        value = pending.pop()
        if isinstance(value, list):
            pending += value
        elif isinstance(value, int):
            yield value


def _check_sizes(config: Mapping[str, Any], file: object, checkpoint: Checkpoint) -> None:
    """Raises an error for a size that is not positive, or larger than the checkpoint in bits."""
    bits, count = 8 * checkpoint.nbytes, len(checkpoint.tensors)
    for keys, bound in ((_SIZES, bits), (_DEPTHS, count)):
        for key in keys:
            if key in config and not _is_possible(key, config[key], bound):
                raise _impossible(file, key, config[key], f"a positive size of at most {bound}")
    queries = ("num_attention_heads", "head_dim", "hidden_size")
    sizes = [config.get(key) for key in queries]
    if all(isinstance(size, int) for size in sizes) and math.prod(sizes) > _MOST_ELEMENTS:  # type: ignore[arg-type]
        raise _impossible(file, " × ".join(queries), math.prod(sizes), "sizes that fit in memory")  # type: ignore[arg-type]


def _nested(config: Mapping[str, Any], level: int = 0) -> Iterator[Mapping[str, Any]]:
    """Yields a config and the configs nested in it, for example of a vision tower."""
    yield config
    for key, value in config.items():
        if isinstance(value, dict) and key not in _NO_CONFIGS and level < 4:
            yield from _nested(value, level + 1)


def _is_possible(key: str, value: object, bound: int) -> bool:
    """Returns True if this checkpoint can have a model of this size.

    Some sizes may be None, or a list with one size for each layer.
    """
    if value is None:
        return key not in _NEEDED
    if isinstance(value, list) and key not in _NEEDED:
        return all(_is_possible(key, item, bound) for item in value)
    least = 0 if key in (*_MAY_BE_ZERO, *_DEPTHS) else 1
    return type(value) is int and least <= value <= bound


def _impossible(file: object, key: str, value: object, expected: str) -> FormatError:
    return FormatError(
        f"config.json has {key}={repr(value)[:80]}, which does not fit this checkpoint. Nothing was loaded.",
        file=file,
        expected=expected,
        found=repr(value)[:80],
        fix="Download config.json of this model again.",
    )
