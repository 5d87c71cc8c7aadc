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
    model: PreTrainedModel, packed: Mapping[str, QuantizedModuleMatch], dense: Mapping[str, object]
) -> dict[str, QuantizedModuleMatch]:
    """The layers that are not stored, but tied to one that is stored packed, and unties them: no parameter is
    left to share.

    A multiplication with the head reads the rows that a lookup takes: what is stored once is saved once.

    Args:
        model: The skeleton, before any module was replaced; forgets these ties.
        packed: What is stored packed, by name in the model.
        dense: What is stored as it is, by name in the model; a head among it stays the contradiction that it
            is.

    Returns:
        The layers by name, each of the tensors of the one that it is tied to.
    """
    found = {}
    for pair in list(model.all_tied_weights_keys.items()):
        target, source = (name.removesuffix(".weight") for name in pair)
        missing, stored = (source, target) if target in packed else (target, source)
        if stored not in packed or missing in packed or f"{missing}.weight" in dense:
            continue
        slot, match = target_module_of(missing, model.get_submodule(missing)), packed[stored]
        if (
            slot is None
            or slot.has_bias
            or (slot.in_features, slot.out_features) != (match.slot.in_features, match.slot.out_features)
        ):
            continue
        found[missing] = dataclasses.replace(match, slot=slot)
        del model.all_tied_weights_keys[pair[0]]
        ties = model._tied_weights_keys or {}
        model._tied_weights_keys = {
            name: other for name, other in ties.items() if name != pair[0]
        }  # transformers asks again
    return found
