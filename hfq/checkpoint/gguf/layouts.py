"""Layouts of tensors that a GGUF file stores differently than the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from hfq.checkpoint.gguf.architectures import Layout
from hfq.checkpoint.gguf.block_types import block_type
from hfq.checkpoint.gguf.header import GgufArray, GgufHeader
from hfq.errors import FormatError
from hfq.tensor_spec import Blocks, StoredOrder, TensorInfo

__all__ = ["apply_layout", "integer_key"]

_FLOATS = ("F32", "F16", "BF16")


def apply_layout(info: TensorInfo, blocks: Blocks, layout: Layout, header: GgufHeader) -> TensorInfo:
    """Returns a tensor with what the file stores differently.

    Args:
        info: The tensor, under its name in the file.
        blocks: Its type.
        layout: The layout.
        header: The header with the metadata.

    Raises:
        FormatError: The metadata or the shape contradict the layout.
    """
    return _LAYOUTS[layout](info, blocks, header)


def integer_key(header: GgufHeader, key: str, layer: int | None = None) -> int:
    """Returns a number of the metadata of an architecture.

    Args:
        header: The header.
        key: The key, without the architecture.
        layer: The layer, for keys that may have a number for each.

    Raises:
        FormatError: There is no such number.
    """
    name = f"{header.keys['general.architecture']}.{key}"
    value = header.keys.get(name)
    if isinstance(value, GgufArray) and value.values is not None and layer is not None:
        value = value.values[layer] if 0 <= layer < value.count else None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise FormatError(
            "The metadata of the GGUF file lacks a number. Nothing was loaded.",
            file=header.file,
            expected=f"{name}, a positive integer",
            found=repr(value)[:80] if name in header.keys else "nothing",
            fix="Download the file again.",
        )
    return value


def _heads(key: str) -> Callable[[TensorInfo, Blocks, GgufHeader], TensorInfo]:
    """Returns the layout of rows that alternate between the halves of a head."""

    def layout(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
        layer = int(info.name.split(".")[1])
        heads = integer_key(header, key, layer)
        pairs = _divided(info, info.shape[0], 2 * heads)
        return _with_rows(info, blocks, StoredOrder(0, heads, pairs, 2, 1))

    return layout


def _value_heads(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    return _with_rows(info, blocks, _of_value_heads(info, info.shape[0], header))


def _queries_keys_and_value_heads(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    start = info.shape[0] - integer_key(header, "ssm.inner_size")
    if start < 0:
        raise _other_size(info, f"at least {info.shape[0] - start} rows", f"{info.shape[0]} rows")
    order = _of_value_heads(info, info.shape[0] - start, header)
    return _with_rows(info, blocks, dataclasses.replace(order, start=start))


def _columns_of_value_heads(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    kind = block_type(blocks.type)
    columns = info.shape[1] // kind.nbytes * kind.size if kind.dtype == "U8" else info.shape[1]
    order = _of_value_heads(info, columns, header)
    return _as_layer(info, dataclasses.replace(blocks, columns=None if _is_same(order) else order))


def _of_value_heads(info: TensorInfo, size: int, header: GgufHeader) -> StoredOrder:
    keys, values = integer_key(header, "ssm.group_count"), integer_key(header, "ssm.time_step_rank")
    return StoredOrder(0, 1, _divided(info, values, keys), keys, _divided(info, size, values))


def _plus_one(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    return _with_function(info, dataclasses.replace(blocks, function="plus one"))


def _minus_exponential(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    return _with_function(info, dataclasses.replace(blocks, function="minus exponential"))


def _with_function(info: TensorInfo, blocks: Blocks) -> TensorInfo:
    if info.dtype not in _FLOATS:
        raise _other_size(info, " or ".join(_FLOATS), str(info))
    return info._replace(blocks=blocks)


def _transposed_layer(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    return _as_layer(info, blocks)


def _matrix_of_one_row(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    return info._replace(shape=(1, *info.shape)) if len(info.shape) == 1 else info


def _convolution(info: TensorInfo, blocks: Blocks, header: GgufHeader) -> TensorInfo:
    is_squeezed = len(info.shape) == 2 and info.dtype != "U8"
    return info._replace(shape=(info.shape[0], 1, info.shape[1])) if is_squeezed else info


def _with_rows(info: TensorInfo, blocks: Blocks, order: StoredOrder) -> TensorInfo:
    found = dataclasses.replace(blocks, rows=None if _is_same(order) else order)
    return _as_layer(info, found) if len(info.shape) == 2 else info._replace(blocks=found)


def _as_layer(info: TensorInfo, blocks: Blocks) -> TensorInfo:
    return info._replace(blocks=dataclasses.replace(blocks, is_layer=True))


def _is_same(order: StoredOrder) -> bool:
    return order.first == 1 or order.second == 1


def _divided(info: TensorInfo, size: int, count: int) -> int:
    if size % count:
        raise _other_size(info, f"a multiple of {count}", str(size))
    return size // count


def _other_size(info: TensorInfo, expected: str, found: str) -> FormatError:
    return FormatError(
        "A tensor of the GGUF file does not fit its metadata. Nothing was loaded.",
        file=info.range.file,
        tensor=info.name,
        expected=expected,
        found=found,
        fix="Download the file again.",
    )


_LAYOUTS: dict[Layout, Callable[[TensorInfo, Blocks, GgufHeader], TensorInfo]] = {
    "query heads": _heads("attention.head_count"),
    "key heads": _heads("attention.head_count_kv"),
    "value heads": _value_heads,
    "columns of value heads": _columns_of_value_heads,
    "queries, keys, and value heads": _queries_keys_and_value_heads,
    "transposed layer": _transposed_layer,
    "plus one": _plus_one,
    "minus exponential": _minus_exponential,
    "matrix of one row": _matrix_of_one_row,
    "convolution": _convolution,
}
