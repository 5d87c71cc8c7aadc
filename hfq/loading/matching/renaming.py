"""Stored names and names in the model, by transformers' own renamings."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

__all__ = ["Names", "owner_of"]

_OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"(^|\.)attn\.(masked_)?bias$")
"""What files of older versions hold, and no model of today has a place for."""


class Names:
    """Stored names → names in one model.

    Args:
        model: The skeleton, before any module was replaced.
        key_mapping: As given to `from_pretrained`: {pattern of a stored name: replacement}.
    """

    def __init__(self, model: PreTrainedModel, key_mapping: dict[str, str] | None = None) -> None:
        conversions = get_model_conversion_mapping(model, key_mapping)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._experts: dict[str, str] = {}
        self._prefix, self._tensors = model.base_model_prefix, model.state_dict()
        ignored = {
            *(model._keys_to_ignore_on_load_unexpected or ()),
            *_OLD_BUFFERS,
            *_predicting_layers(model),
        }
        if not any("lm_head" in name for name in self._tensors):
            ignored.add(r"(^|\.)lm_head\.")  # of the class with a head, wherever that keeps it
        self._ignored = re.compile("|".join(f"({pattern})" for pattern in ignored))

    def in_model(self, stored: str) -> tuple[str, bool]:
        """The name in the model, and whether transformers would merge or split the tensor on the way."""
        name, pattern = rename_source_key(
            stored, self._renamings, self._converters, self._prefix, self._tensors
        )
        if name not in self._tensors and stored in self._tensors:
            name, pattern = stored, None
        return name, pattern is not None

    def experts(self, stored: str) -> str:
        """The name in the model of the fused experts whose path in the checkpoint this is; all experts of a
        layer share it.
        """
        if stored not in self._experts:
            names = [self.in_model(f"{stored}.{local}")[0] for local in ("gate_up_proj", "up_proj")]
            self._experts[stored] = next(
                (name for name in names if name in self._tensors), names[0]
            ).rpartition(".")[0]
        return self._experts[stored]

    def is_ignored(self, stored: str) -> bool:
        """Whether the model's class, or its config, says that this tensor may stand in a checkpoint without a
        place.
        """
        return self._ignored.search(stored) is not None

    def is_within(self, name: str, submodules: Mapping[str, nn.Module]) -> bool:
        """Whether a name without a place lies inside a part that the model has, and not beside its parts."""
        return owner_of(name, submodules) not in ("", self._prefix)


def _predicting_layers(model: PreTrainedModel) -> list[str]:
    """Patterns of layers behind the last, which predict further tokens (DeepSeek-V3, GLM-4.5); transformers
    has none of them.
    """
    config = model.config.get_text_config()
    count, more = (
        getattr(config, "num_hidden_layers", None),
        getattr(config, "num_nextn_predict_layers", None),
    )
    if not isinstance(count, int) or not isinstance(more, int):
        return []
    return [rf"(^|\.)layers\.{layer}\." for layer in range(count, count + more)]


def owner_of(name: str, submodules: Mapping[str, nn.Module]) -> str:
    """The innermost module of the model that a name lies in."""
    while name not in submodules:
        name = name.rpartition(".")[0]
    return name
