"""Refuses the one call that FMS's attention computes wrongly without a word.

`_sdpa_compute_op` (fms/modules/attention.py of FMS 1.13) tells keys that come from a cache, [batch, heads,
tokens, …], from those that do not, [batch, tokens, heads, …], by their sizes: without a cache, as many tokens
as key heads are taken for heads.
"""

from __future__ import annotations

import functools
from typing import Any

from fms.modules.attention import MultiHeadAttention
from torch import nn

from hfq.errors import SetupError
from hfq.modules.linear import QuantizedLinear

__all__ = ["guard_attention"]

_MARK = "_hfq_is_guarded"


def guard_attention(model: nn.Module | None = None) -> None:
    """Makes FMS's attention check its calls: that of a model, and wherever its layers are hfq's; any other
    stays as it is.

    Args:
        model: A model whose attention is checked whatever its layers are.
    """
    for module in model.modules() if model is not None else ():
        if isinstance(module, MultiHeadAttention):
            setattr(module, _MARK, True)
    original = MultiHeadAttention.forward
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def forward(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        # the arguments after q: k, v, position_ids, past_key_value_state, use_cache
        use_cache = kwargs.get("use_cache", args[4] if len(args) > 4 else False)
        is_ours = isinstance(self.dense, QuantizedLinear) or getattr(self, _MARK, False)
        if is_ours and not use_cache and q.size(1) == self.kvheads > 1:
            raise SetupError(
                "FMS's attention would take heads for tokens, and give wrong logits.",
                found=f"{q.size(1)} tokens without a cache",
                expected=f"use_cache=True, or another number of tokens than the {self.kvheads} key heads",
                fix="pass use_cache=True to the model",
            )
        return original(self, q, *args, **kwargs)

    MultiHeadAttention.forward = forward
