"""Records of cached tokens: keys and values of one token as bytes, exact or quantized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hfq.formats.codecs.dtypes import safetensors_dtype, torch_dtype

__all__ = ["KV_CACHE_DTYPES", "KvCodec"]

KV_CACHE_DTYPES = ("auto", "fp8", "int8")
"""`auto` stores the dtype of the model; `fp8` and `int8` store one scale per head and token."""

_CODES = {"fp8": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}
_SCALE_NBYTES = 4
_ALIGNMENT = 8

_BLOCK_NBYTES = 16 << 20
"""Bytes of the float32 values that are encoded or decoded at a time."""


@dataclass(frozen=True)
class KvCodec:
    """Converts keys and values of a layer to records and back.

    A record has the float32 scales of all heads, the codes of the keys, and the codes of the values.

    Attributes:
        kind: One of `KV_CACHE_DTYPES`.
        dtype: safetensors name of the dtype of keys and values, such as `BF16`.
        batch: Number of sequences.
        heads: Number of KV heads.
        key_size: Elements of a key of one head.
        value_size: Elements of a value of one head.
    """

    kind: str
    dtype: str
    batch: int
    heads: int
    key_size: int
    value_size: int

    @classmethod
    def of(cls, kind: str, keys: torch.Tensor, values: torch.Tensor) -> KvCodec:
        """Returns the codec of these keys and values: [batch, heads, tokens, size]."""
        batch, heads, _, size = keys.shape
        return cls(kind, safetensors_dtype(keys.dtype), batch, heads, size, values.shape[-1])

    def of_batch(self, batch: int) -> KvCodec:
        """Returns the codec of another batch size."""
        return replace(self, batch=batch)

    @property
    def record_nbytes(self) -> int:
        """Bytes of one token of one sequence, a multiple of 8."""
        itemsize = torch_dtype(self.dtype).itemsize if self.kind == "auto" else 1
        nbytes = self._scales_nbytes + self.heads * (self.key_size + self.value_size) * itemsize
        return -(-nbytes // _ALIGNMENT) * _ALIGNMENT

    @property
    def row_nbytes(self) -> int:
        """Bytes of one token of all sequences."""
        return self.batch * self.record_nbytes

    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Returns the records of tokens: uint8 [tokens, batch, record_nbytes].

        Args:
            keys: [batch, heads, tokens, key_size].
            values: [batch, heads, tokens, value_size].
        """
        batch, _, tokens, _ = keys.shape
        records = torch.zeros(tokens, batch, self.record_nbytes, dtype=torch.uint8, device=keys.device)
        for block in self._blocks(tokens):
            self._encode_block(records[block], keys[:, :, block].detach(), values[:, :, block].detach())
        return records

    def decode_into(self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes the keys and values of records into tensors of the dtype of the model.

        Args:
            records: uint8 [tokens, batch, record_nbytes].
            keys: [batch, heads, tokens, key_size].
            values: [batch, heads, tokens, value_size].
        """
        for block in self._blocks(records.shape[0]):
            self._decode_block(records[block], keys[:, :, block], values[:, :, block])

    def _blocks(self, tokens: int) -> Iterator[slice]:
        """Returns slices of tokens, each of a bounded number of values."""
        nbytes = self.batch * self.heads * max(self.key_size, self.value_size) * torch.float32.itemsize
        step = max(_BLOCK_NBYTES // nbytes, 1)
        return (slice(first, min(first + step, tokens)) for first in range(0, tokens, step))

    def _encode_block(self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        start = self._scales_nbytes
        for index, part in enumerate(each.permute(2, 0, 1, 3) for each in (keys, values)):
            if self.kind != "auto":
                part, scale = self._quantize(part)
                flat = scale.contiguous().view(torch.uint8)
                first = index * flat.shape[-1]
                records[..., first : first + flat.shape[-1]] = flat
            flat = part.contiguous().flatten(2).view(torch.uint8)
            records[..., start : start + flat.shape[-1]] = flat
            start += flat.shape[-1]

    def _decode_block(self, records: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        stored = torch_dtype(self.dtype) if self.kind == "auto" else _CODES[self.kind][0]
        start, scales = self._scales_nbytes, self._scales(records)
        for target, scale in zip((keys, values), scales, strict=True):
            nbytes = self.heads * target.shape[-1] * stored.itemsize
            codes = records[..., start : start + nbytes].view(stored)
            part = codes.unflatten(-1, (self.heads, target.shape[-1])).permute(1, 2, 0, 3)
            if scale is None:
                target.copy_(part)
            else:
                target.copy_(part.float().mul_(scale.permute(1, 2, 0).unsqueeze(-1)))
            start += nbytes

    @property
    def _scales_nbytes(self) -> int:
        return 0 if self.kind == "auto" else 2 * self.heads * _SCALE_NBYTES

    def _scales(self, records: torch.Tensor) -> list[torch.Tensor | None]:
        """Returns the scales of the keys and of the values: float32 [tokens, batch, heads]."""
        if self.kind == "auto":
            return [None, None]
        both = records[..., : self._scales_nbytes].view(torch.float32)
        return list(both.split(self.heads, dim=-1))

    def _quantize(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the codes [tokens, batch, heads, size] and their scales [tokens, batch, heads]."""
        dtype, most = _CODES[self.kind]
        values = part.float()
        scale = values.abs().amax(-1) / most
        codes = values / scale.where(scale > 0, 1.0).unsqueeze(-1)
        return (codes.round_() if dtype == torch.int8 else codes).clamp_(-most, most).to(dtype), scale
