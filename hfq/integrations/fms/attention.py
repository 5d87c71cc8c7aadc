"""A guard against calls for which FMS's attention silently returns wrong logits.

`_sdpa_compute_op` (fms/modules/attention.py of FMS 1.13) uses sizes to distinguish cached keys, [batch,
heads, tokens, …], from other keys, [batch, tokens, heads, …]. Without a cache, it mistakes tokens for heads
if there are as many tokens as key heads.
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
    """Makes FMS's attention check its calls.

    The check applies to all attention of `model`, and to any attention that contains hfq's layers. Other
    attention is unchanged.

    Args:
        model: A model whose attention is checked even without hfq's layers, or None.
    """
    for module in model.modules() if model is not None else ():
        if isinstance(module, MultiHeadAttention):
            setattr(module, _MARK, True)
    original = MultiHeadAttention.forward
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def forward(self: Any, q: Any, *args: Any, **kwargs: Any) -> Any:
        # Arguments after q: k, v, position_ids, past_key_value_state, use_cache.
        use_cache = kwargs.get("use_cache", args[4] if len(args) > 4 else False)
        is_ours = isinstance(self.dense, QuantizedLinear) or getattr(self, _MARK, False)
        if is_ours and not use_cache and q.size(1) == self.kvheads > 1:
            raise SetupError(
                "FMS's attention would mistake tokens for heads and return wrong logits.",
                found=f"{q.size(1)} tokens without a cache",
                expected=f"use_cache=True, or a number of tokens other than the {self.kvheads} key heads",
                fix="Pass use_cache=True to the model.",
            )
        return original(self, q, *args, **kwargs)

    MultiHeadAttention.forward = forward
