"""Names in the checkpoint and in the model, by transformers' renamings."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

__all__ = ["Names", "owner_of"]

_OLD_BUFFERS = (r"rotary_emb\.inv_freq", r"(^|\.)position_ids$", r"(^|\.)attn\.(masked_)?bias$")
"""Buffers in files of older versions, which models do not have today."""

_PREDICTING = r"(^|\.)mtp[._]"
"""Layers that predict further tokens (DeepSeek-V4, Qwen3-Next: `mtp.`; Hunyuan, ERNIE: `mtp_`)."""

_NUMBERED = re.compile(r"layers\\?\.\d")
"""A pattern of a model class for one layer that it does not have, such as the 92nd of GLM-4.5."""


class Names:
    """Map from stored names to names in one model.

    Args:
        model: The meta model, before any module is replaced.
        key_mapping: Argument of `from_pretrained`, {pattern of a stored name: replacement}; None for no
            renaming.
        conversions: The renamings of the model; None for those that transformers has for its class.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        key_mapping: dict[str, str] | None = None,
        conversions: Sequence[WeightTransform] | None = None,
    ) -> None:
        if conversions is None:
            conversions = get_model_conversion_mapping(model, key_mapping)
        self._renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
        self._experts: dict[str, str] = {}
        self._prefix, self._tensors = model.base_model_prefix, model.state_dict()
        unexpected = {*(model._keys_to_ignore_on_load_unexpected or ())}
        numbered = {pattern for pattern in unexpected if _NUMBERED.search(pattern)}
        predicting = {_PREDICTING, *numbered, *_predicting_layers(model)}
        ignored = {*unexpected, *_OLD_BUFFERS, *predicting}
        if not any("lm_head" in name for name in self._tensors):
            ignored.add(r"(^|\.)lm_head\.")  # only the class with a head has one
        self._ignored = re.compile("|".join(f"({pattern})" for pattern in ignored))
        self._predicting = re.compile("|".join(f"({pattern})" for pattern in predicting))

    def in_model(self, stored: str) -> tuple[str, bool]:
        """Returns the name in the model, and True if transformers merges or splits the tensor."""
        name, pattern = rename_source_key(
            stored, self._renamings, self._converters, self._prefix, self._tensors
        )
        if name not in self._tensors and stored in self._tensors:
            name, pattern = stored, None
        return name, pattern is not None

    def experts(self, stored: str) -> str:
        """Returns the name in the model of fused experts, from their path in the checkpoint.

        All experts of a layer share it.
        """
        if stored not in self._experts:
            locals = ("gate_up_proj", "up_proj", "expert_0.wi.weight")
            names = {local: self.in_model(f"{stored}.{local}")[0] for local in locals}
            found = next((local for local in locals if names[local] in self._tensors), locals[0])
            self._experts[stored] = names[found].removesuffix(f".{found}")
        return self._experts[stored]

    def is_ignored(self, stored: str) -> bool:
        """Returns True if the model class or its config allows this tensor to match no parameter."""
        return self._ignored.search(stored) is not None

    def is_predicting(self, stored: str) -> bool:
        """Returns True if this tensor belongs to a layer that predicts further tokens."""
        return self._predicting.search(stored) is not None

    def is_within(self, name: str, submodules: Mapping[str, nn.Module]) -> bool:
        """Returns True if a name that matches nothing is inside a submodule of the model."""
        return owner_of(name, submodules) not in ("", self._prefix)


def _predicting_layers(model: PreTrainedModel) -> list[str]:
    """Returns patterns of extra layers that predict further tokens (DeepSeek-V3, GLM-4.5).

    transformers does not have these layers.
    """
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None)
    more = getattr(config, "num_nextn_predict_layers", None)
    if not isinstance(count, int) or not isinstance(more, int):
        return []
    return [rf"(^|\.)layers\.{layer}\." for layer in range(count, count + more)]


def owner_of(name: str, submodules: Mapping[str, nn.Module]) -> str:
    """Returns the innermost module of the model that contains a name."""
    while name not in submodules:
        name = name.rpartition(".")[0]
    return name
