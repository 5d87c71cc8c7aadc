"""Metadata of a new GGUF file, copied from another GGUF file of the same model."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping

from hfq.checkpoint import Checkpoint
from hfq.checkpoint.gguf.architectures import ARCHITECTURES, Architecture
from hfq.checkpoint.gguf.block_types import block_type
from hfq.checkpoint.gguf.header import GgufArray, GgufHeader
from hfq.checkpoint.gguf.layouts import integer_key
from hfq.checkpoint.reader import changed
from hfq.checkpoint.small_file import open_regular
from hfq.convert.layer_plan import NewTensor
from hfq.errors import FormatError
from hfq.tensor_spec import TensorInfo

__all__ = ["check_model", "metadata_entries", "template_header"]

_WRITTEN = frozenset(ARCHITECTURES) - {"deepseek2", "gpt2"}
_OWN_KEYS = re.compile(r"split\.|quantize\.|general\.(file_type|quantization_version)$")
"""Keys that describe the tensors of one file."""
_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q5_0": 8, "BF16": 32, "MXFP4": 38}
"""llama.cpp's number of a file that consists mostly of a type."""
_QUANTIZATION_VERSION = 2
_U32 = 4


def template_header(template: Checkpoint) -> tuple[GgufHeader, Architecture]:
    """Returns the header with the metadata, and the tables of the architecture.

    Raises:
        FormatError: The template is no GGUF file of an architecture that hfq writes, or has no tokenizer.
    """
    header, model = next(iter(template.headers.values())), template.gguf
    if model is None or not isinstance(header, GgufHeader) or model.architecture not in _WRITTEN:
        raise _unusable(
            template,
            f"a GGUF file of {', '.join(sorted(_WRITTEN))}",
            "safetensors" if model is None else model.architecture,
        )
    tokens = header.keys.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, GgufArray) or "tokenizer.ggml.model" not in header.keys:
        raise _unusable(template, "metadata with a tokenizer (tokenizer.ggml.tokens)", "no tokenizer")
    return header, model.known


def check_model(
    template: Checkpoint, tensors: Mapping[str, NewTensor], named: Mapping[str, TensorInfo]
) -> None:
    """Checks that a template is of the same model as the tensors.

    Args:
        template: The template.
        tensors: The tensors by name in the model.
        named: The tensors as the metadata of the template explain them.

    Raises:
        FormatError: A size differs.
    """
    header, known = template_header(template)
    count = integer_key(header, "block_count")
    _check_sizes(template, header, known, _elements(named[f"{known.modules['token_embd']}.weight"]))
    expected = {} if template.gguf is None else template.gguf.tensors
    for name, tensor in tensors.items():
        found = named.get(name)
        if found is None or found.shape != tensor.shape:
            wanted = f"metadata of a model with {name} {list(tensor.shape)}"
            raise _unusable(template, wanted, f"those of {count} layers" if found is None else str(found))
        other = expected.get(name)
        if other is not None and _elements(other) != _elements(found):
            raise _unusable(template, f"a template with {name} of {_elements(found)}", str(_elements(other)))
    numbers = {int(part) for name in tensors for part in re.findall(r"\.layers\.(\d+)\.", name)}
    if numbers != set(range(count)):
        raise _unusable(template, f"metadata of {len(numbers)} layers", f"{count} layers")


def metadata_entries(header: GgufHeader, most: str) -> list[bytes]:
    """Returns the entries of the metadata of a new file.

    Args:
        header: The header of the template with the metadata.
        most: The type of most bytes of the new file.

    Raises:
        CheckpointError: The template changed since its header was read.
    """
    entries = []
    with open_regular(header.file) as stream:  # a Reader refuses files with a header and no weights
        status = os.fstat(stream.fileno())
        found = (status.st_ino, status.st_size, status.st_mtime_ns)
        if found != header.identity:
            raise changed(header.file, str(header.identity), str(found))
        for key, source in header.entries.items():
            if not _OWN_KEYS.match(key):
                stream.seek(source.offset)
                entries.append(stream.read(source.nbytes))
    for key, value in (
        ("general.file_type", _FILE_TYPES[most]),
        ("general.quantization_version", _QUANTIZATION_VERSION),
    ):
        entries.append(struct.pack(f"<Q{len(key)}sII", len(key), key.encode(), _U32, value))
    return entries


def _check_sizes(
    template: Checkpoint, header: GgufHeader, known: Architecture, embedding: tuple[int, ...]
) -> None:
    tokens, width = header.keys["tokenizer.ggml.tokens"], integer_key(header, "embedding_length")
    count = tokens.count if isinstance(tokens, GgufArray) else 0
    if (count, width) == embedding:
        return
    expected = f"metadata of {embedding[0]} tokens, and embeddings of {embedding[1]} channels"
    if known.omits_rows and width == embedding[1] and count < embedding[0]:
        raise FormatError(
            "The template lacks tokens of this model. Nothing was written.",
            file=header.file,
            expected=expected,
            found=f"{count} tokens",
            fix=f"Pass a GGUF file with all {embedding[0]} tokens. Many leave out those without a text.",
        )
    raise _unusable(template, expected, f"{count} tokens, and {width} channels")


def _elements(info: TensorInfo) -> tuple[int, ...]:
    """Returns the shape of a tensor in elements."""
    if info.blocks is None or info.dtype != "U8":
        return info.shape
    kind = block_type(info.blocks.type)
    return (*info.shape[:-1], info.shape[-1] // kind.nbytes * kind.size)


def _unusable(template: Checkpoint, expected: str, found: str) -> FormatError:
    return FormatError(
        "The template cannot be used for this model. Nothing was written.",
        file=next(iter(template.headers)),
        expected=expected,
        found=found,
        fix="Pass a GGUF file of this model.",
    )
