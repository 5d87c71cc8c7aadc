"""Predicted memory of a loaded model while it runs."""

from __future__ import annotations

from collections import Counter

from hfq.loading.kv_layers import activation_sizes, kv_layers
from hfq.loading.model_loader import ModelLoader
from hfq.placement.estimate.kv_cache import activation_nbytes, kv_nbytes

__all__ = ["predict_memory"]


def predict_memory(loading: ModelLoader, rows: int, context: int) -> dict[str, int]:
    """Predicts the bytes of weights, buffers, KV cache, and activations of each device.

    Args:
        loading: The load of the model.
        rows: The most tokens that one forward pass computes.
        context: The most tokens in the KV cache; 0 for none.

    Returns:
        Bytes by device; no entry for the disk.
    """
    model, offloader = loading.model, loading.offloader
    dtype = str(model.dtype).removeprefix("torch.")
    running: Counter[str] = Counter()
    if offloader is not None:
        for buffers in offloader.buffers.values():
            running.update(buffers.nbytes_by_device())
        running.update(offloader.experts.nbytes_by_device())
    if context:
        running[loading.main] += kv_nbytes(kv_layers(model)[0], 1, context, dtype)
    if rows:
        running[loading.main] += activation_nbytes(activation_sizes(model), 1, rows, dtype)
    found = {device: nbytes for device, nbytes in loading.plan.nbytes_by_device().items() if device != "disk"}
    return {device: found.get(device, 0) + running[device] for device in {**found, **running}}
