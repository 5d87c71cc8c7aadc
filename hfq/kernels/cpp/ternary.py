"""Rows of QMoE, decoded by the C++ library."""

from __future__ import annotations

import struct
from collections.abc import Mapping

import torch

from hfq.errors import SetupError
from hfq.formats.codecs.constants import table
from hfq.formats.codecs.pair_dictionary import entry_words
from hfq.formats.codecs.thread_buffers import thread_buffer
from hfq.formats.qmoe import Qmoe, wrong_width
from hfq.kernels.cpp.library import library

__all__ = ["fill_rows"]

_ARGUMENTS = struct.Struct("=9q")
"""The struct `TernaryRows` of src/ternary.h."""

_CPU = torch.device("cpu")


def fill_rows(
    tensors: Mapping[str, torch.Tensor], weight_format: Qmoe, dtype: torch.dtype, start: int, rows: int
) -> torch.Tensor | None:
    """Returns rows [start, start + rows) of a weight, bit-identical to `Qmoe.dequantize_into`.

    Args:
        tensors: The module's tensors by local name, on the CPU.
        weight_format: The format of the tensors.
        dtype: float32 or bfloat16.
        start: The first row.
        rows: The number of rows.

    Returns:
        [rows, in_features] in a buffer of this thread, valid until the next call. None if the library is
        unavailable.

    Raises:
        FormatError: The codes of a row have more or fewer columns.
        SetupError: The system has too little memory.
    """
    compiled = library()
    if compiled is None:
        return None
    columns = weight_format.size[1]
    panel = thread_buffer("panel", torch.float32, _CPU, rows * columns).view(rows, columns)
    words = table("qmoe words", lambda: torch.from_numpy(entry_words().view("int32")), _CPU)
    codes, offsets, bounds = (tensors[name] for name in ("w_comp", "row_off", "ter_minmax"))
    addresses = words.data_ptr(), codes.data_ptr(), codes.numel()
    first = offsets.data_ptr() + 4 * start, bounds.data_ptr() + 4 * start, panel.data_ptr()
    status = compiled.hfq_ternary(_ARGUMENTS.pack(*addresses, *first, rows, columns, torch.get_num_threads()))
    if status == -2:
        raise wrong_width(start, rows, columns)
    if status:
        raise SetupError(
            "The system has too little memory to decode a panel of weights.",
            expected="memory for the scratch of each thread",
            found="none",
            fix="Free memory, or use a smaller batch.",
        )
    if dtype == torch.float32:
        return panel
    return thread_buffer("panel", dtype, _CPU, panel.numel()).view(panel.shape).copy_(panel)
