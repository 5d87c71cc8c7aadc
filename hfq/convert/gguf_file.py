"""A GGUF file of a model, with the metadata of another GGUF file of it.

Names and layouts come from the tables by which a file is read: the header of the new file is read as any
other, and each tensor is stored so that this reading returns it. Norms, biases, and a few small matrices are
float32, as the converter of llama.cpp writes them. Other floats keep their dtype.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

import functools
import re
import struct
from collections import Counter
from collections.abc import Mapping, Sequence

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.gguf.architectures import Architecture
from hfq.checkpoint.gguf.block_types import BLOCK_TYPES, block_type
from hfq.checkpoint.gguf.header import GgufHeader
from hfq.checkpoint.gguf.named_model import name_tensors
from hfq.checkpoint.write_checkpoint import Made, NewFile
from hfq.convert.gguf_template import check_model, metadata_entries, template_header
from hfq.convert.layer_plan import LayerPlan, NewTensor, as_bytes, refusal
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.gguf.block_rows import positions
from hfq.formats.gguf.stored_values import model_values, stored_values
from hfq.modules.flat_buffer import read_tensor
from hfq.tensor_spec import Blocks, ByteRange, TensorInfo

__all__ = ["gguf_file"]

_FILE = "model.gguf"
_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+\.\w+)")
_LAYER = re.compile(r"\.(\d+)\.")
_FLOATS = ("F32", "F16", "BF16")
_IN_FLOAT32 = ("ffn_gate_inp", "ssm_conv1d")
_ALIGNMENT = 32
_TYPE_NUMBERS = {found.name: number for number, found in BLOCK_TYPES.items()}


def gguf_file(
    tensors: Mapping[str, NewTensor], plans: Mapping[str, LayerPlan], template: Checkpoint, reader: Reader
) -> NewFile:
    """Returns the GGUF file of a model.

    Args:
        tensors: All tensors under their names in the model; weights of `plans` are rows of blocks.
        plans: The plans of quantized layers, whose options are the types of their blocks.
        template: A GGUF file of the same model.
        reader: Reader of the tensors.

    Raises:
        FormatError: The template is not of this model, or a file cannot hold a tensor.
    """
    header, known = template_header(template)
    types = {f"{module}.weight": str(plan.options) for module, plan in plans.items()}
    tensors, types = _stack_experts(tensors, types, reader)
    stored = {_stored_name(name, known): name for name in tensors}
    own = {
        name: _stored_info(name, tensors[stored[name]], types.get(stored[name]), known)
        for name in sorted(stored, key=_position)
    }
    copied = {} if template.gguf is None else template.gguf.checked
    infos = own | copied
    named = name_tensors([GgufHeader(header.file, infos, {}, 0, header.identity, header.keys)]).tensors
    check_model(template, tensors, named)
    aligned = header.keys.get("general.alignment")
    alignment = aligned if isinstance(aligned, int) else _ALIGNMENT
    copies = Reader(template)
    parts: list[ByteRange | Made] = []
    for name, info in infos.items():
        parts.append(
            _constant(as_bytes(read_tensor(copies, info)))
            if name in copied
            else _part(tensors[stored[name]], info, named[stored[name]].blocks, reader)
        )
        parts.append(_constant(memoryview(bytes(-info.nbytes % alignment))))
    return NewFile(_FILE, _head(header, infos, alignment), tuple(parts))


def _constant(raw: memoryview) -> Made:
    return Made(raw.nbytes, lambda: raw)


def _stack_experts(
    tensors: Mapping[str, NewTensor], types: Mapping[str, str], reader: Reader
) -> tuple[dict[str, NewTensor], dict[str, str]]:
    """Returns tensors and types of blocks, with the experts of a layer in one tensor.

    Raises:
        FormatError: An expert is missing, or differs from others in its type or shape.
    """
    stacked, kinds = dict[str, NewTensor](), dict[str, str]()
    experts: dict[str, dict[int, str]] = {}
    for name, tensor in tensors.items():
        found = _EXPERT.fullmatch(name)
        if found is None:
            stacked[name] = tensor
            kinds |= {name: types[name]} if name in types else {}
        else:
            experts.setdefault(f"{found[1]}.{found[3]}", {})[int(found[2])] = name
    for name, names in experts.items():
        parts = [tensors[names[number]] for number in sorted(names)]
        described = {(tensors[each].dtype, tensors[each].shape, types.get(each)) for each in names.values()}
        if sorted(names) != list(range(len(names))) or len(described) != 1:
            raise refusal(
                name,
                "all experts of a layer, in one type and shape",
                f"{len(names)} experts in {len(described)} types",
                "Keep the checkpoint unchanged.",
            )
        ((dtype, shape, kind),) = described
        make = functools.partial(_stack, parts, reader)
        stacked[name] = NewTensor(dtype, (len(parts), *shape), make)
        kinds |= {} if kind is None else {name: kind}
    return stacked, kinds


def _stack(parts: Sequence[NewTensor], reader: Reader) -> torch.Tensor:
    stacked = torch.empty((len(parts), *parts[0].shape), dtype=torch_dtype(parts[0].dtype))
    for place, part in zip(stacked, parts, strict=True):
        place.copy_(part.values(reader))
    return stacked


def _stored_name(name: str, known: Architecture) -> str:
    """Returns the name of a tensor of the model in the file."""
    layer = _LAYER.search(name)
    general = name if layer is None else f"{name[: layer.start()]}.N.{name[layer.end() :]}"
    module, _, suffix = general.rpartition(".")
    targets = {target: found for found, target in known.tensors.items()}
    modules = {target: found for found, target in known.modules.items()}
    if general in targets:
        found = targets[general]
    elif module in modules and suffix in ("weight", "bias"):
        found = f"{modules[module]}.{suffix}"
    else:
        raise refusal(
            name,
            "tensors of the language model, each a layer of its own",
            "a tensor that GGUF files of this architecture do not have",
            "Keep the checkpoint unchanged.",
        )
    return found if layer is None else found.replace(".N.", f".{layer[1]}.")


def _position(name: str) -> tuple[int, str]:
    """Returns the place of a tensor in the file: embeddings, layers in order, head."""
    layer = re.match(r"blk\.(\d+)\.", name)
    if layer is not None:
        return int(layer[1]), name
    return (1 << 32 if name.startswith("output") else -1), name


def _stored_info(name: str, tensor: NewTensor, kind: str | None, known: Architecture) -> TensorInfo:
    """Returns a tensor as the header describes it."""
    general = re.sub(r"^blk\.\d+\.", "blk.N.", name)
    layouts = known.layouts.get(general) or known.layouts.get(general.rpartition(".")[0], ())
    shape = tensor.shape
    if "transposed layer" in layouts or (kind is None and tensor.dtype not in _FLOATS):
        is_float = tensor.dtype in _FLOATS
        raise refusal(
            name,
            "weights [out, in]" if is_float else f"numbers in {', '.join(_FLOATS)}",
            "the transpose" if is_float else tensor.dtype,
            "Keep the checkpoint unchanged.",
        )
    if "matrix of one row" in layouts and shape[0] == 1:
        shape = shape[1:]
    if "convolution" in layouts:
        shape = (shape[0], *shape[2:])
    is_wide = kind is None and (len(shape) == 1 or any(part in name for part in _IN_FLOAT32))
    dtype = "F32" if is_wide else tensor.dtype
    nbytes = torch.Size(shape).numel() * torch_dtype(dtype).itemsize
    blocks = Blocks(kind or dtype, is_layer=kind is not None)
    return TensorInfo(name, dtype, shape, ByteRange("", 0, nbytes), blocks=blocks)


def _part(tensor: NewTensor, info: TensorInfo, blocks: Blocks | None, reader: Reader) -> ByteRange | Made:
    """Returns the bytes of a tensor in the order of the file.

    Raises:
        FormatError: The function of the values that a file stores would round them.
    """
    changed = blocks is not None and (blocks.rows, blocks.columns, blocks.function) != (None, None, None)
    if isinstance(tensor.data, ByteRange) and tensor.dtype == info.dtype and not changed:
        return tensor.data

    def make() -> memoryview:
        value = stored_values(tensor.values(reader), blocks)
        if blocks is not None and blocks.columns is not None:
            value = _with_columns(value, blocks)
        return as_bytes(value.to(torch_dtype(info.dtype)))

    if blocks is not None and blocks.function is not None:
        value = tensor.values(reader).to(torch.float32)
        if not torch.equal(model_values(stored_values(value, blocks), blocks), value):
            raise refusal(
                info.name,
                "values for which (x + 1) - 1 equals x in float32"
                if blocks.function == "plus one"
                else "values for which log(exp(x)) equals x in float32",
                "a value of NaN" if value.isnan().any() else "a value that would be rounded",
                "Keep the checkpoint unchanged.",
            )
    return Made(info.nbytes, make)


def _with_columns(value: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Returns rows of numbers or of whole blocks with the columns in the order of the file."""
    kind, order = block_type(blocks.type), positions(blocks.columns, value.device)  # type: ignore[arg-type]
    if kind.dtype != "U8":
        return torch.empty_like(value).index_copy_(1, order, value)
    grouped = value.unflatten(1, (-1, kind.nbytes))
    return torch.empty_like(grouped).index_copy_(1, order[:: kind.size] // kind.size, grouped).flatten(1)


def _head(header: GgufHeader, infos: Mapping[str, TensorInfo], alignment: int) -> bytes:
    """Returns the header of the file: metadata, and an entry for each tensor."""
    types = Counter[str]()
    described, end = b"", 0
    for name, info in infos.items():
        kind = info.blocks.type if info.blocks is not None else info.dtype
        found, raw = block_type(kind), name.encode()
        columns = info.shape[-1] // found.nbytes * found.size if info.dtype == "U8" else info.shape[-1]
        shape = (columns, *info.shape[-2::-1])  # the file has the fastest one first
        described += struct.pack(f"<Q{len(raw)}s", len(raw), raw)
        described += struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, _TYPE_NUMBERS[kind], end)
        end += -(-info.nbytes // alignment) * alignment
        types[kind] += info.nbytes
    entries = metadata_entries(header, max(types, key=types.__getitem__))
    head = b"GGUF" + struct.pack("<IQQ", 3, len(infos), len(entries)) + b"".join(entries) + described
    return head + bytes(-len(head) % alignment)
