"""One layer's keys and values, stored off the execution device between forward passes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import DynamicLayer

from hfq.errors import HfqError, SetupError
from hfq.offload.copy_stream import CopyStream, copy_stream_to
from hfq.offload.reader_threads import Pool, Ticket
from hfq.runtime.kv_cache.kv_codec import KvCodec
from hfq.runtime.kv_cache.kv_rows import KvRows

__all__ = ["OffloadedLayer"]

MakeRows = Callable[[KvCodec, CopyStream], KvRows]
"""Returns the empty rows of a layer for its codec and the copy stream of its device."""


class OffloadedLayer(DynamicLayer):
    """A layer of an `OffloadedCache`.

    A thread reads its rows from `start` on, and `update` waits for them, or reads them itself. The rows of
    new tokens are copied from an accelerator while it computes, and are written before the next read.

    Args:
        index: Index of the layer.
        kind: One of `KV_CACHE_DTYPES`.
        make_rows: Makes the rows at the first update.

    Attributes:
        codec: Converts keys and values to rows; unset before the first update.
        rows: The stored rows; unset before the first update.
        reads: Number of reads of the rows.
    """

    codec: KvCodec
    rows: KvRows
    _copy_stream: CopyStream
    _brought: tuple[torch.Tensor, Any]

    def __init__(self, index: int, kind: str, make_rows: MakeRows) -> None:
        super().__init__()
        self._index, self._kind, self._make_rows = index, kind, make_rows
        self.reads = 0
        self._length = 0
        self._unwritten: list[tuple[torch.Tensor, Any]] = []
        self._ticket: Ticket | None = None

    def restore(self, codec: KvCodec, rows: KvRows) -> None:
        """Sets the rows that an earlier process stored."""
        self.codec, self.rows, self._length = codec, rows, rows.count
        self.is_initialized = True

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return self._length * self.codec.row_nbytes if self._length else 0

    def start(self, pool: Pool) -> None:
        """Starts to read the rows, and to copy them to the device of an earlier update."""
        if self._ticket is None and self._length and hasattr(self, "_copy_stream"):
            self._ticket = pool.submit(Ticket([self._bring]))

    def flush(self) -> None:
        """Writes the rows of new tokens."""
        self._stop()
        self._write_new()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        codec = KvCodec.of(self._kind, key_states, value_states)
        stream = self._find_stream(self.device)
        if not self.is_initialized:
            self.codec, self.rows = codec, self._make_rows(codec, stream)
        elif self.codec != codec:
            raise SetupError(
                f"The keys and values of layer {self._index} do not match those that its KV cache holds.",
                expected=self.codec,
                found=codec,
                fix="Pass the batch size and the dtype of the earlier tokens, or use a new cache.",
            )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the keys and values of all tokens: [batch, heads, tokens, size], contiguous."""
        self.lazy_initialization(key_states, value_states)
        past, codec = self._take(), self.codec
        records = codec.encode(key_states, value_states)
        first, tokens = self._length, key_states.shape[-2]
        whole = [
            part.new_empty(*part.shape[:2], first + tokens, part.shape[-1])
            for part in (key_states, value_states)
        ]
        if past is not None:
            codec.decode_into(past, *(part[:, :, :first] for part in whole))
        if self._kind == "auto":
            for part, new in zip(whole, (key_states, value_states), strict=True):
                part[:, :, first:] = new
        else:
            codec.decode_into(records, *(part[:, :, first:] for part in whole))
        self._send(records)
        self._length += tokens
        return whole[0], whole[1]

    def get_seq_length(self) -> int:
        return self._length

    def reset(self) -> None:
        self.truncate(0)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        count = int(tokens_to_remove)  # transformers 5.17 passes a tensor
        self.truncate(count if count > 0 else self._length + count)  # up to 5.17, a final length may be given

    def truncate(self, length: int) -> None:
        """Forgets all tokens but the first ones, without a write."""
        length = max(length, 0)
        if length < self._length:
            self._stop()
            excess = self._length - length
            while excess and self._unwritten:
                host, mark = self._unwritten.pop()
                kept = max(host.shape[0] - excess, 0)
                excess -= host.shape[0] - kept
                if kept:
                    self._unwritten.append((host[:kept], mark))
            self.rows.count = min(self.rows.count, length)
            self._length = length

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.cpu())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._select(indices.cpu())

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.is_initialized:
            self._select(torch.arange(self.codec.batch).repeat_interleave(repeats))

    def _select(self, sequences: torch.Tensor) -> None:
        """Keeps these sequences of the batch: indices, or a mask of bools."""
        if not self.is_initialized:
            return
        self.flush()
        codec, found = self.codec, torch.arange(self.codec.batch)[sequences]
        changed = codec.of_batch(len(found))
        self.rows.rewrite(
            lambda rows: rows.unflatten(1, (codec.batch, codec.record_nbytes))[:, found].flatten(1),
            changed.row_nbytes,
        )
        self.codec = changed

    def _find_stream(self, device: torch.device) -> CopyStream:
        if not hasattr(self, "_copy_stream"):
            self._copy_stream = copy_stream_to(device)
        return self._copy_stream

    def _stop(self) -> None:
        """Ends a read that was started."""
        if self._ticket is not None:
            self._ticket.cancel()
            self._ticket = None
            self.__dict__.pop("_brought", None)

    def _bring(self) -> None:
        """Writes new rows, reads all rows, and starts to copy them; runs in a reader thread."""
        self._write_new()
        stream = self._copy_stream
        rows = self.rows.read(stream.host_buffer)
        self.reads += 1
        self._brought = stream.bring(rows.numel(), [(0, rows)]), stream.mark()

    def _take(self) -> torch.Tensor | None:
        """Waits for the rows: uint8 [tokens, batch, record_nbytes] on the execution device."""
        if not self._length:
            return None
        if self._ticket is None:
            self._bring()
        else:
            try:
                self._ticket.wait()  # an interrupt leaves the ticket to the next call
            except HfqError:
                self._ticket = None
                raise
            self._ticket = None
        memory, mark = self._brought
        del self._brought
        self._copy_stream.compute_after(mark)
        self._copy_stream.record_compute(memory)
        return memory.view(self._length, self.codec.batch, -1)

    def _send(self, records: torch.Tensor) -> None:
        """Starts to copy the records of new tokens to the host."""
        stream = self._copy_stream
        if records.device.type == "cpu":
            self.rows.append(records)
            return
        host = stream.host_buffer(records.numel()).view(records.shape)
        host.copy_(records, non_blocking=True)
        self._unwritten.append((host, stream.mark_compute()))

    def _write_new(self) -> None:
        while self._unwritten:
            host, mark = self._unwritten[0]
            self._copy_stream.synchronize(mark)
            self.rows.append(host)
            del self._unwritten[0]
