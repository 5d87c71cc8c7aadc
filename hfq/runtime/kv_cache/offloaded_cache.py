"""A KV cache that keeps keys and values in CPU memory or in files."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicIndexedLayer, DynamicLayer, DynamicSlidingWindowLayer

from hfq.errors import HfqError, SetupError, nearest
from hfq.modules.offloaded_parameter import no_copy
from hfq.offload.copy_stream import CopyStream
from hfq.offload.reader_threads import Pool
from hfq.runtime.kv_cache.first_pass import FirstPass
from hfq.runtime.kv_cache.kv_codec import KV_CACHE_DTYPES, KvCodec
from hfq.runtime.kv_cache.kv_rows import FileRows, KvRows, MemoryRows
from hfq.runtime.kv_cache.offloaded_layer import OffloadedLayer
from hfq.runtime.kv_cache.saved_cache import CacheFolder, identity_of, send
from hfq.runtime.kv_cache.whole_pass import WholePass

__all__ = ["OffloadedCache"]


_COUNTING = (OffloadedLayer, DynamicSlidingWindowLayer)
"""Layers that count their tokens, all of which compute in each forward pass."""


class OffloadedCache(DynamicCache):
    """A KV cache outside of the execution device, whose layers are onloaded one by one.

    While a layer computes, the keys and values of the next one are read. So at most two layers are held on
    the execution device, and with a folder also in CPU memory. Keys and values are bit-identical to those of
    transformers' `DynamicCache`, unless `kv_cache_dtype` quantizes them. Layers with a sliding window and
    layers with a recurrent state are small and stay where they compute. No gradient reaches the tokens of
    earlier passes.

        with hfq.OffloadedCache(model, "conversation") as cache:
            tokens = model.generate(**inputs, past_key_values=cache)
            cache.save(tokens)

        with hfq.OffloadedCache(model, "conversation") as cache:  # in another process
            inputs = torch.cat([cache.tokens, more], dim=1)
            tokens = model.generate(inputs, past_key_values=cache)

    Args:
        model: A model that hfq loaded.
        folder: Folder of the files, which is made if it does not exist. If `save` wrote to it, the cache
            starts with the saved tokens. None keeps keys and values in CPU memory.
        kv_cache_dtype: `"auto"` stores the dtype of the model; `"fp8"` and `"int8"` quantize with one scale
            per head and token. Quantized keys and values are used for new tokens, too, so that results do not
            depend on where a conversation was interrupted.

    Attributes:
        tokens: Token ids [batch, tokens] that `save` stored; None if there are none.

    Raises:
        SetupError: hfq did not load the model, the folder belongs to another model or is in use, or
            `kv_cache_dtype` is unknown.
        CheckpointError: A file of the folder is damaged.
    """

    tokens: torch.Tensor | None

    def __init__(
        self, model: PreTrainedModel, folder: str | Path | None = None, *, kv_cache_dtype: str = "auto"
    ) -> None:
        if kv_cache_dtype not in KV_CACHE_DTYPES:
            raise SetupError(
                f"kv_cache_dtype={kv_cache_dtype!r} is not valid.{nearest(kv_cache_dtype, KV_CACHE_DTYPES)}",
                expected=", ".join(KV_CACHE_DTYPES),
                found=kv_cache_dtype,
                fix='Pass kv_cache_dtype="auto", or another of these.',
            )
        identity = identity_of(model)
        super().__init__(config=model.config)
        self.tokens, self._restored = None, set[int]()
        self._is_torn = self._is_closed = self._has_beams = False
        self._first_pass = FirstPass(model)
        self._pool = Pool(1)
        self._finalizer = weakref.finalize(self, Pool.close, self._pool)
        self._folder = None if folder is None else CacheFolder(Path(folder), identity, kv_cache_dtype)
        for index, layer in enumerate(self.layers):
            if type(layer) is DynamicLayer:
                self.layers[index] = OffloadedLayer(index, kv_cache_dtype, self._rows_of(index))
        self._offloaded = [i for i, layer in enumerate(self.layers) if isinstance(layer, OffloadedLayer)]
        self._counting = [i for i, layer in enumerate(self.layers) if type(layer) in _COUNTING]
        self._whole_pass = WholePass(None if len(self._offloaded) == len(self.layers) else model, self)
        weakref.finalize(self, self._whole_pass.close)
        if self._folder is not None:
            try:
                self.tokens = self._folder.restore(self.layers)
            except BaseException:
                self.close()
                raise
            self._restored = set(range(len(self.layers))).difference(self._offloaded)

    def __enter__(self) -> OffloadedCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise no_copy("a KV cache outside of the execution device")

    def save(self, tokens: torch.Tensor | None = None) -> None:
        """Saves the cache in its folder, so that a later `OffloadedCache` of it resumes.

        Args:
            tokens: Token ids of the conversation: [batch, tokens], at least those in the cache.

        Raises:
            SetupError: The cache has no folder, the disk is full, tokens are missing, or the cache holds the
                beams of a search.
        """
        if self._folder is None:
            raise SetupError(
                "This KV cache has no folder to save to.",
                expected="OffloadedCache(model, folder)",
                found="OffloadedCache(model)",
                fix="Make the cache with a folder.",
            )
        self._check_open()
        self._whole_pass.settle()
        self._check_lengths()
        if self._has_beams and tokens is not None:
            raise SetupError(
                "After a beam search, a KV cache holds the beams, and not the sequences of generate.",
                expected="a cache that no beam search has reordered",
                found=f"{list(tokens.shape)} token ids of other sequences or in another order",
                fix="Compute the tokens with a new cache, by a forward pass, and save that one.",
            )
        self._folder.save(self.layers, tokens, self._length())
        self.tokens = None if tokens is None else tokens.cpu()

    def close(self) -> None:
        """Ends the reader threads and releases the folder; what was not saved is forgotten."""
        self._is_closed = True
        self._finalizer()
        self._first_pass.forget()
        self._whole_pass.close()
        if self._folder is not None:
            self._folder.close()

    @property
    def nbytes(self) -> int:
        """Bytes of the stored keys and values of all offloaded layers."""
        return sum(self.layers[index].nbytes for index in self._offloaded)

    def activate_past_recording(self) -> None:
        super().activate_past_recording()
        self._first_pass.expect(self)  # with drafted tokens, a pass follows

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if layer_idx == next(iter(self._counting), None):
            self._first_pass.check(key_states.shape[-2], self.get_seq_length())
            self._check_lengths()
        self._enter(layer_idx, key_states.device)
        try:
            found = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        except HfqError:
            self._forget_pass(layer_idx)
            raise
        following = self._following(layer_idx)
        if following is not None:  # now that the stored rows of this layer are freed
            following.start(self._pool)
        return found

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._enter(layer_idx, conv_states.device)
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        self._enter(layer_idx, recurrent_states.device)
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self._check_open()
        before = self._lengths()
        try:
            super().crop(*args, **kwargs)
        except BaseException:
            self._is_torn = self._is_torn or self._lengths() != before
            raise
        finally:
            if self._folder is not None and min(self._lengths(), default=0) < self._folder.saved_length:
                self._invalidate()  # before later tokens overwrite saved rows

    def reset(self) -> None:
        self._invalidate()
        super().reset()
        for layer in self.layers:
            if isinstance(layer, DynamicLayer):  # transformers 5.17 keeps zeros, to which it appends
                layer.is_initialized = False
                if isinstance(layer, DynamicIndexedLayer):
                    layer.is_indexer_initialized = False
        self._is_torn = self._has_beams = False
        self._whole_pass.forget()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        with self._changing_batch():
            self._has_beams = True
            super().reorder_cache(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        with self._changing_batch():
            super().batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        with self._changing_batch():
            super().batch_select_indices(indices)

    def _forget_pass(self, index: int) -> None:
        """Forgets the tokens of a forward pass that failed in a layer, unless earlier layers cannot."""
        if any(each not in self._offloaded for each in range(index)):
            self._is_torn = True
            return
        shortest = min(self.layers[each].get_seq_length() for each in self._offloaded)
        for each in self._offloaded:
            self.layers[each].truncate(shortest)
        self._whole_pass.forget_pass()

    @contextlib.contextmanager
    def _changing_batch(self) -> Iterator[None]:
        """Forgets the saved state, and marks the cache as torn if a layer fails."""
        self._invalidate()
        was_torn, self._is_torn = self._is_torn, True
        yield
        self._is_torn = was_torn

    def _check_lengths(self) -> None:
        """Raises an error if an interrupted forward pass added tokens to some of the layers.

        Raises:
            SetupError: The layers hold different numbers of tokens.
        """
        lengths = set(self._lengths())
        if len(lengths) > 1 or self._is_torn or self._whole_pass.has_failed:
            raise SetupError(
                "The last forward pass with this KV cache did not end, so that its layers differ.",
                expected="layers with the same tokens",
                found=f"{min(lengths)} to {max(lengths)} tokens" if len(lengths) > 1 else "an error before",
                fix="Call reset(), or make the cache again, which starts with the last save.",
            )

    def _check_open(self) -> None:
        """Raises an error after `close`, since another cache may use the folder.

        Raises:
            SetupError: The cache was closed.
        """
        if self._is_closed:
            raise SetupError(
                "This KV cache was closed.",
                expected="an open cache",
                found="a cache after close(), or after its with statement",
                fix="Make the cache again, which starts with the last save.",
            )

    def _lengths(self) -> list[int]:
        """Returns the numbers of tokens of the layers that count them."""
        # a crop by a tensor leaves one in transformers 5.17
        return [int(self.layers[index].get_seq_length()) for index in self._counting]

    def _length(self) -> int:
        return max(self._lengths(), default=0)

    def _enter(self, index: int, device: torch.device) -> None:
        """Prepares for the new states of a layer."""
        self._check_open()
        if self._is_torn or self._whole_pass.has_failed:
            self._check_lengths()
        self._whole_pass.note_change()
        self._send_restored(index, device)

    def _rows_of(self, index: int) -> Any:
        folder = self._folder

        def make(codec: KvCodec, stream: CopyStream) -> KvRows:
            if folder is None:
                return MemoryRows(codec.row_nbytes, stream.host_buffer)
            return FileRows(codec.row_nbytes, folder.file_of(index))

        return make

    def _following(self, index: int) -> OffloadedLayer | None:
        """Returns the offloaded layer that computes after a layer; None if there is no other one."""
        if not self._offloaded:
            return None
        following = next((each for each in self._offloaded if each > index), self._offloaded[0])
        return None if following == index else self.layers[following]

    def _send_restored(self, index: int, device: torch.device) -> None:
        """Sends the restored state of a layer that is not offloaded to its device, once."""
        if index in self._restored:
            self._restored.discard(index)
            send(self.layers[index], device)

    def _invalidate(self) -> None:
        """Forgets the saved state before its rows change."""
        self._check_open()
        if self._folder is not None:
            self._folder.invalidate()
