"""Tests of the memory that one layer of an offloaded KV cache takes."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hfq.runtime.kv_cache.kv_rows import FileRows
from hfq.runtime.kv_cache.offloaded_layer import OffloadedLayer

BLOCK = 16 << 20


class LivingBytes(TorchDispatchMode):
    """Follows the bytes of all storages that operators return, until they are freed.

    Attributes:
        peak: Most bytes at one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self._living, self.peak = {}, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        given = {each.untyped_storage()._cdata for each in tensors_of((args, kwargs))}
        found = function(*args, **(kwargs or {}))
        for each in tensors_of(found):
            storage = each.untyped_storage()
            if storage._cdata not in given:
                self._living[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._living = {key: pair for key, pair in self._living.items() if not pair[0].expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._living.values()))
        return found


def tensors_of(tree):
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


@pytest.mark.parametrize("kind", ["auto", "fp8", "int8"])
def test_a_layer_takes_its_rows_its_keys_and_values_and_one_block(kind, tmp_path):
    """A prefill, and the next token: a float32 copy of the keys of this layer would take 64 MiB."""
    tokens, heads, size = 16384, 8, 128
    torch.manual_seed(0)
    layer = OffloadedLayer(0, kind, lambda codec, _: FileRows(codec.row_nbytes, tmp_path / "rows.kv"))
    parts = [torch.randn(1, heads, tokens, size).bfloat16() for _ in range(2)]
    more = [torch.randn(1, heads, 1, size).bfloat16() for _ in range(2)]
    for new in (parts, more):
        with LivingBytes() as memory:
            found = layer.update(*new)
        whole = sum(part.nbytes for part in found)
        assert whole + layer.nbytes / 2 < memory.peak <= whole + layer.nbytes + BLOCK + (1 << 20)
        del found
