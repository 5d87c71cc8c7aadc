"""An attention implementation of transformers that is faster for one token on a CPU."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch.compiler import assume_constant_result, is_compiling
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from hfq.errors import SetupError

__all__ = ["NAME", "register_attention"]

NAME = "hfq_sdpa"
"""The value of `attn_implementation`."""

_OPTIONS = ("cache", "position_bias", "softcap")
"""Options of `sdpa` that change the scores, or where keys are."""

_COMPARISON = re.compile(r"""_attn_implementation\b[^\n]*["']sdpa["']""")
"""Source of a model that treats `sdpa` differently from other implementations."""


def register_attention() -> None:
    """Lets `from_pretrained` take `attn_implementation="hfq_sdpa"`."""
    AttentionInterface.register(NAME, packed_attention)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Returns what `sdpa` returns, with the query heads of one token packed by key on a CPU.

    Without a mask, transformers passes `enable_gqa=True`, with which torch's CPU kernel is slow for one
    token. Here the heads that share a key are the rows of one product. Sums have another order than those of
    `sdpa`.

    Args:
        module: The attention.
        query: Queries, [batch, heads, tokens, width].
        key: Keys, [batch, key heads, context, width].
        value: Values, [batch, key heads, context, width].
        attention_mask: Mask of the scores, or None.
        dropout: Probability of dropping a score.
        scaling: Factor of the scores; None for the inverse root of the width.
        **options: Other arguments of `sdpa`.

    Raises:
        SetupError: The model's code depends on the name of the implementation, as DeepSeek-V3.2's does. With
            another name it would leave a mask out.
    """
    if _names_sdpa(type(module).__module__):
        raise SetupError(
            f"The code of {type(module).__name__} requires an attention that is named sdpa: "
            "it leaves a mask out for other names.",
            expected='attn_implementation="sdpa"',
            found=f'attn_implementation="{NAME}"',
            fix='Call model.set_attn_implementation("sdpa").',
        )
    is_one_token = query.is_cpu and query.shape[2] == 1 and key.shape[1] < query.shape[1]
    is_plain = attention_mask is None and not any(options.get(name) is not None for name in _OPTIONS)
    if not is_one_token or not is_plain or is_compiling():
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options
        )
    packed = query.reshape(query.shape[0], key.shape[1], -1, query.shape[3])
    output = F.scaled_dot_product_attention(packed, key, value, dropout_p=dropout, scale=scaling)
    return output.reshape(query.shape[0], 1, query.shape[1], value.shape[3]), None


@assume_constant_result  # torch.compile calls it, and does not trace the cached function below
def _names_sdpa(module: str) -> bool:
    """Returns True if the source of a Python module compares the implementation with `sdpa`."""
    return _search_source(module)


@functools.cache
def _search_source(module: str) -> bool:
    try:
        return bool(_COMPARISON.search(inspect.getsource(sys.modules[module])))
    except (KeyError, OSError, TypeError):  # a class without a file
        return False
