"""Output heads that are tied to a quantized embedding, whose bytes both modules read."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from transformers import PreTrainedModel

from hfq.loading.matching.target_modules import QuantizedModuleMatch, target_module_of

__all__ = ["shared_heads", "untie"]


def shared_heads(
    model: PreTrainedModel, quantized: Mapping[str, QuantizedModuleMatch], unquantized: Mapping[str, object]
) -> dict[str, QuantizedModuleMatch]:
    """Returns the layers that are tied to a quantized layer instead of stored, and unties them.

    The tie must go, since no parameter is left to share. A product with the head reads the same rows as a
    lookup. Tensors that are stored once are saved once.

    Args:
        model: The meta model, before any module is replaced; it loses these ties.
        quantized: Quantized modules, keyed by the name in the model.
        unquantized: Unquantized tensors, keyed by the name in the model; a stored head stays a conflict.

    Returns:
        The layers, keyed by module name, each with the tensors of the layer that it is tied to.
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
        untie(model, pair[0])
    return found


def untie(model: PreTrainedModel, target: str) -> None:
    """Removes the tie of a parameter to another one, before transformers makes it."""
    del model.all_tied_weights_keys[target]
    ties = model._tied_weights_keys or {}
    # transformers reads the ties a second time
    model._tied_weights_keys = {name: other for name, other in ties.items() if name != target}
