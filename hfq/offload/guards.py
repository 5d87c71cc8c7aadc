"""What goes into a block and what comes out of it: inputs without values, outputs that lie in the ring,
errors without a name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree

from hfq.errors import HfqError, PlacementError, SetupError

__all__ = ["no_copy", "in_unit", "own_outputs", "refuse_meta"]


def refuse_meta(name: str, inputs: Sequence[object]) -> None:
    """Refuses an input on meta, from which torch computes garbage: model code moved it to where a weight
    rests.

    Raises:
        PlacementError: An input is on meta.
    """
    if any(isinstance(value, torch.Tensor) and value.is_meta for value in inputs):
        raise PlacementError(
            f"{name} was given an input on meta: the model's code moves it to where the weight rests, which "
            f"is on disk.",
            expected="an input with values",
            found="a tensor on meta",
            fix=f'give this module a home in memory: {{"{name}": "cpu"}}',
        )


def own_outputs(outputs: Any, buffer: torch.Tensor) -> Any:
    """The outputs of a block, copied where they are views of its region, which another block will
    overwrite.
    """
    own = buffer.untyped_storage().data_ptr()

    def is_view(value: Any) -> bool:
        return (
            isinstance(value, torch.Tensor)
            and value.device == buffer.device
            and value.untyped_storage().data_ptr() == own
        )

    if buffer.numel() and any(is_view(leaf) for leaf in _pytree.tree_leaves(outputs)):
        return _pytree.tree_map(lambda leaf: leaf.clone() if is_view(leaf) else leaf, outputs)
    return outputs


def in_unit(error: HfqError, name: str) -> HfqError:
    """The same error, with the name of the block that needed the bytes."""
    fields = {
        key: getattr(error, key) for key in ("fix", "file", "tensor", "rank", "expected", "found", "problems")
    }
    return type(error)(f"{name}: {error.message}", **fields)


def no_copy(found: str) -> SetupError:
    """The error of a deep copy: what streams is bound to the modules it was made for."""
    return SetupError(
        "A model with offloaded parts cannot be copied.",
        expected="a model that rests where it computes",
        found=found,
        fix="load it a second time instead",
    )
