"""Heads that are tied to an embedding which the checkpoint stores packed: two modules that read the same
bytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from transformers import PreTrainedModel

from hfq.loading.matching.target_modules import QuantizedModuleMatch, target_module_of

__all__ = ["shared_heads"]


def shared_heads(
    model: PreTrainedModel, quantized: Mapping[str, QuantizedModuleMatch], unquantized: Mapping[str, object]
) -> dict[str, QuantizedModuleMatch]:
    """The layers that are not stored, but tied to one that is stored packed, and unties them: no parameter is
    left to share.

    A multiplication with the head reads the rows that a lookup takes: what is stored once is saved once.

    Args:
        model: The skeleton, before any module was replaced; forgets these ties.
        quantized: What is stored packed, by name in the model.
        unquantized: The unquantized tensors, by name in the model; a head among them stays a conflict.

    Returns:
        The layers by name, each of the tensors of the one that it is tied to.
    """
    found = {}
    for pair in list(model.all_tied_weights_keys.items()):
        target, source = (name.removesuffix(".weight") for name in pair)
        missing, stored = (source, target) if target in quantized else (target, source)
        if stored not in quantized or missing in quantized or f"{missing}.weight" in unquantized:
            continue
        target_module, match = target_module_of(missing, model.get_submodule(missing)), quantized[stored]
        if (
            target_module is None
            or target_module.has_bias
            or (target_module.in_features, target_module.out_features)
            != (match.target.in_features, match.target.out_features)
        ):
            continue
        found[missing] = dataclasses.replace(match, target=target_module)
        del model.all_tied_weights_keys[pair[0]]
        ties = model._tied_weights_keys or {}
        model._tied_weights_keys = {
            name: other for name, other in ties.items() if name != pair[0]
        }  # transformers asks again
    return found
