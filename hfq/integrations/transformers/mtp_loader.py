"""Loader of layers that predict further tokens (MTP), which stay quantized."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightRenaming,
    WeightTransform,
    convert_and_load_state_dict_in_model,
)

from hfq.checkpoint import Checkpoint
from hfq.errors import FormatError, SetupError
from hfq.integrations.transformers.interpreter import without_torch_modes
from hfq.integrations.transformers.load_lock import one_load
from hfq.loading.config import HfqConfig
from hfq.loading.mapped_tensors import map_named
from hfq.loading.matching.match import CheckpointMatch, match_model
from hfq.loading.matching.renaming import Names
from hfq.loading.model_loader import ModelLoader
from hfq.loading.quantize_on_load.rounding_loader import RoundingLoader

__all__ = ["MtpLoader", "load_mtp_layers"]

_SHARED = ("embed_tokens", "shared_head", "rotary_emb")
"""Modules of the main model that `MtpModel` also holds."""


class MtpLoader(ModelLoader):
    """Loader of the layers of a checkpoint that predict further tokens.

    Args:
        model: The `MtpModel` on the meta device, without the modules of the main model.
        main: The loader of the main model.
    """

    def __init__(self, model: PreTrainedModel, main: ModelLoader) -> None:
        self.model, self._main = model, main
        config = copy.copy(main.config)
        config.modules_to_not_convert = None  # these are names in the main model
        super().__init__(model, config, None, model.dtype)
        self.match.unused.clear()  # copies of the main model's embedding and head

    def conversions(self) -> list[WeightTransform]:
        """Returns the renamings of the stored tensors, those of the main model last."""
        main, first = self._main.model, _count_layers(self._main.model)
        return [
            *(
                WeightRenaming(f"layers.{first + index}.", f"layers.{index}.mtp_block.")
                for index in range(self.model.num_mtp_layers)
            ),
            *get_model_conversion_mapping(self.model, add_legacy=False),
            *get_model_conversion_mapping(main),
        ]

    def load_others(self, device: str) -> None:
        """Loads the unquantized tensors, as transformers does.

        Raises:
            FormatError: A tensor has another shape than the model, or cannot be converted.
        """
        from transformers.modeling_utils import LoadStateDictConfig

        found = map_named(self.checkpoint, self.reader, self.names_to_load(), is_copied=False)
        loading = LoadStateDictConfig(
            weight_mapping=self.conversions(), device_map={"": device}, dtype=self.model.dtype
        )
        info, _ = convert_and_load_state_dict_in_model(self.model, found, loading)
        problems = [f"{name}: {error}" for name, error in info.conversion_errors.items()]
        problems += [
            f"{name}: expected {list(wanted)}, found {list(stored)}"
            for name, stored, wanted in sorted(info.mismatched_keys)
        ]
        if problems:
            raise FormatError(
                "The MTP layers cannot be loaded.",
                file=self.checkpoint.root,
                expected="tensors in the shapes of the model",
                found="the problems below",
                fix="Download the checkpoint again, or leave out use_mtp=True.",
                problems=problems,
            )

    def _match(self, source: dict[str, Any] | None) -> CheckpointMatch:
        names = Names(self.model, conversions=self.conversions())
        # tools that quantize a model often leave these layers unquantized
        return match_model(self.model, self.checkpoint, source or {}, names, is_part=True)

    def _open(self, config: HfqConfig, files: list[str] | None) -> tuple[Checkpoint, dict[str, Any] | None]:
        checkpoint, predicting = self._main.checkpoint, {*self._main.match.predicting}
        tensors = {name: info for name, info in checkpoint.tensors.items() if name in predicting}
        return dataclasses.replace(checkpoint, tensors=tensors), config._source


def load_mtp_layers(cls: Any, main: PreTrainedModel) -> PreTrainedModel:
    """Returns the `MtpModel` of a model that hfq loaded; a later call returns the same one.

    Args:
        cls: `MtpModel`.
        main: The main model.

    Raises:
        HfqError: The checkpoint has no such layers, or they do not match the model.
    """
    loading: ModelLoader = main.hf_quantizer.loading
    with one_load(), without_torch_modes():
        if loading.mtp_model is None:
            _check(loading)
            loading.mtp_model = _load(cls, main, loading)
    return loading.mtp_model


def _load(cls: Any, main: PreTrainedModel, loading: ModelLoader) -> PreTrainedModel:
    model = _build(cls, main)
    for name in _SHARED:
        setattr(model, name, None)
    loader = MtpLoader(model, loading)
    device = str(loading.execution_device_of(_last_layer(main)))
    loader.hide_experts()
    loader.place({"": device})
    loader.load_others(device)
    loader.finish()
    model.eval()
    model.tie_with_main_model(main)
    return model


def _build(cls: Any, main: PreTrainedModel) -> PreTrainedModel:
    from transformers.utils.generic import ContextManagers

    with ContextManagers(cls.get_init_context(main.dtype, False, False, None)):
        return cls(main, main.config.get_text_config().num_mtp_layers)


def _check(loading: ModelLoader) -> None:
    """Checks that the layers of a loaded model's checkpoint can be loaded.

    Raises:
        SetupError: The load was of another kind than with a device map.
        FormatError: The checkpoint has no such layers, or is a GGUF file.
    """
    fix = "Leave out use_mtp=True, and use prompt_lookup_num_tokens or assistant_model."
    if type(loading) not in (ModelLoader, RoundingLoader):
        raise SetupError(
            "use_mtp=True works with a device map alone.",
            expected="a load without quantize_weights, ZeRO-3, and tensor parallelism",
            found=type(loading).__name__,
            fix=fix,
        )
    loading.checkpoint.check_safetensors("No token was generated")
    if not loading.match.predicting:
        raise FormatError(
            "use_mtp=True requires layers that predict further tokens, which this checkpoint does not have.",
            file=loading.checkpoint.root,
            expected=f"tensors such as model.layers.{_count_layers(loading.model)}.eh_proj.weight",
            found="none",
            fix=fix,
        )


def _count_layers(main: PreTrainedModel) -> int:
    return main.config.get_text_config().num_hidden_layers


def _last_layer(main: PreTrainedModel) -> str:
    """Returns the name of the last decoder layer."""
    last: nn.Module = main.get_decoder().layers[-1]
    return next(name for name, module in main.named_modules() if module is last)
