"""FP8 codes as float32, exactly, by integer operations: on a CPU torch's own cast takes eight times as
long.
"""

from __future__ import annotations

import torch

from hfq.formats.codecs.thread_buffers import thread_buffer

__all__ = ["has_nan", "scale_as_float", "widen_into"]

_CHUNK = 1 << 18
_WITHOUT_BIT_14 = ~(1 << 14)


def widen_into(panel: torch.Tensor, codes: torch.Tensor) -> None:
    """Writes codes into a panel as float32, bit for bit what `panel.copy_(codes)` writes.

    The bits of e4m3, shifted by seven and without the lowest bit that its sign was copied to, are a float16
    of 1/256 of the value, subnormal values included; e5m2 is the upper half of a float16. e4m3's NaN would
    become a number, so codes that hold one are cast.

    Args:
        panel: float32 [rows, in_features].
        codes: [rows, in_features], float8_e4m3fn, float8_e5m2, or anything else that can be cast.
    """
    is_e4m3 = codes.dtype == torch.float8_e4m3fn
    if not (is_e4m3 or codes.dtype == torch.float8_e5m2) or codes.device.type != "cpu" or not codes.numel():
        panel.copy_(codes)
        return
    step = max(_CHUNK // codes.shape[1], 1)
    for start in range(0, codes.shape[0], step):
        part, target = codes[start : start + step], panel[start : start + step]
        bits = part.view(torch.int8)
        halves = thread_buffer("fp8", torch.int16, part.device, part.numel()).view(part.shape)
        if is_e4m3 and has_nan(bits, bits.view(torch.uint8)):
            target.copy_(part)
        elif is_e4m3:
            halves.copy_(bits).mul_(1 << 7).bitwise_and_(_WITHOUT_BIT_14)
            target.copy_(halves.view(torch.float16)).mul_(256)
        else:
            target.copy_(halves.copy_(bits).bitwise_left_shift_(8).view(torch.float16))


def has_nan(bits: torch.Tensor, unsigned: torch.Tensor) -> bool:
    """True if any e4m3 code is NaN: 0x7F is the largest of int8, and 0xFF of the same memory as uint8."""
    return int(bits.amax()) == 0x7F or int(unsigned.amax()) == 0xFF


def scale_as_float(scale: torch.Tensor) -> torch.Tensor:
    """The stored scale in float32 and its own shape; a byte is a power of two."""
    if scale.dtype == torch.float32:
        return scale
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).to(torch.float32)
