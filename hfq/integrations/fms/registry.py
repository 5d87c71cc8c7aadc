"""FMS's `get_model` with layers of hfq.

hfq extends FMS 1.13 in four places, in addition to its attention (attention.py):

1. `fms.modules.linear`: hfq adds `hfq` to the public registries of linear types and of their tensor parallel
   sharding. FMS passes no name to a factory. The factory therefore returns an `UninitializedModule`, which
   FMS initializes with its name after it has built the model.
2. `hf_config_to_fms_config_params` of `_FMS_MODEL_CONFIG_REGISTRY` (models/hf/config_utils): hfq handles
   configs that name a quantization. FMS would pass them to fms-model-optimizer, which must be installed and
   supports only compressed-tensors FP8.
3. `__adapters` of `fms.utils.serialization`: the public `extend_adapter` adds steps only at the end. By then,
   FMS's step for RoPE has treated words of bit-packed zero points as features, or has failed on them. hfq's
   step therefore runs first and removes the quantized layers.
4. `TPModule.load_weights`: FMS passes it the placeholders that this step returns for sliced layers. It calls
   the sharding of type `hfq`.

FMS loads unquantized tensors itself. It casts copied tensors to `data_type`, so hfq loads quantized tensors
directly into their modules.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from fms.models.hf.config_utils import _FMS_MODEL_CONFIG_REGISTRY
from fms.modules import UninitializedModule, linear
from fms.utils import serialization
from torch import nn
from transformers import PreTrainedConfig

from hfq.checkpoint import Reader
from hfq.errors import FormatError, PlacementError, SetupError
from hfq.integrations.fms.attention import guard_attention
from hfq.integrations.fms.fms_config import read_source
from hfq.integrations.fms.fms_layers import Layers, rank_slice_of
from hfq.integrations.fms.loader import make_meta_model, unquantized_tensors
from hfq.integrations.fms.row_layout import find_layout, stored_name
from hfq.loading.config import HfqConfig
from hfq.loading.quantize_on_load.requirements import refuse_quantize_on_load
from hfq.modules.linear import QuantizedLinear

__all__ = ["ARCHITECTURES", "TYPE", "install"]

TYPE = "hfq"
ARCHITECTURES = ("llama", "granite", "mistral")
"""FMS architectures whose decoder layers create all linear layers through the registry."""

_LAYERS = "hfq_layers"
_options: list[HfqConfig] = []


def install(config: HfqConfig | None) -> None:
    """See `hfq.fms.register`."""
    if config is not None:
        refuse_quantize_on_load(config, "hfq.fms.register")
    is_installed = bool(_options)
    _options[:] = [config or HfqConfig()]
    if is_installed:
        return
    guard_attention()
    linear.register_linear_type_to_module_map(TYPE, _Unnamed)
    linear.register_linear_type_to_sharding_map(TYPE, _shard)
    registry = _FMS_MODEL_CONFIG_REGISTRY
    registry.hf_config_to_fms_config_params = _asking(registry.hf_config_to_fms_config_params)
    adapters = vars(serialization)["__adapters"]
    for architecture in ARCHITECTURES:
        adapters[architecture]["hf"] = functools.partial(_adapt, adapters[architecture]["hf"])


class Placed:
    """Quantized layers of one model that FMS builds.

    Attributes:
        layers: Builder of the layers.
        modules: Layers that FMS has requested, by name in FMS. Each value is the module, and the (out, in)
            that FMS requested.
        stored: Names of the layers in FMS, by name in the checkpoint.
    """

    def __init__(self, layers: Layers, stored: Mapping[str, str]) -> None:
        self.layers, self.stored = layers, dict(stored)
        self.modules: dict[str, tuple[nn.Module, tuple[int, int]]] = {}

    def __deepcopy__(self, memo: dict) -> Placed:
        return self  # FMS copies its configs and the objects in them

    def fill(self, name: str, device: torch.device, rank: int = 0, world: int = 1) -> None:
        """Loads the weights of a layer, or this rank's slice of them."""
        module, shape = self.modules[name]
        part = rank_slice_of(name, shape, self.layers.sizes(name), rank, world)
        self.layers.fill(name, module, device, part)
        module.is_offloaded, module.fetch = False, None  # type: ignore[assignment]

    def is_cut(self, name: str) -> bool:
        """Returns True if ranks hold slices of a layer."""
        return self.modules[name][1] != self.layers.sizes(name)


class _Unnamed(UninitializedModule):
    """Placeholder for FMS's registry until a layer has a name."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, linear_config: Mapping[str, Any]
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.has_bias = bias
        self.placed: Placed | None = linear_config.get(_LAYERS)

    def initialize(self, name: str) -> nn.Module:
        if self.placed is None:
            raise SetupError(
                f"linear_type={TYPE!r} requires a quantized checkpoint.",
                tensor=name,
                found="no quantized checkpoint",
                expected="hf_pretrained and a config.json that names a quantization",
                fix="Omit linear_config, or call hfq.fms.load(path).",
            )
        if name not in self.placed.layers.layout.layers:
            return nn.Linear(self.in_features, self.out_features, self.has_bias)
        module = self.placed.layers.build(name)
        if isinstance(
            module, QuantizedLinear
        ):  # an empty layer leaves FMS nothing to allocate or cast before hfq fills it
            module.hold({})
            module.is_offloaded, module.fetch = True, functools.partial(_refuse, name)
        self.placed.modules[name] = module, (self.out_features, self.in_features)
        return module


def _asking(original: Any) -> Any:
    """Wraps `hf_config_to_fms_config_params` to request hfq's layers for quantized checkpoints."""

    @functools.wraps(original)
    def hf_config_to_fms_config_params(config: PreTrainedConfig, model_path: str | None) -> dict[str, Any]:
        if getattr(config, "quantization_config", None) is None:
            return original(config, model_path)
        source = read_source(model_path or config.name_or_path, config)
        if source.architecture not in ARCHITECTURES:
            raise SetupError(
                f"FMS's {source.architecture} does not create its linear layers through the registry. "
                f"Nothing was loaded.",
                expected=", ".join(ARCHITECTURES),
                found=source.architecture,
                fix="Call hfq.fms.load(path).",
            )
        reader = Reader(source.checkpoint)
        plain = make_meta_model(source, None, False, None, None).config
        layout = find_layout(
            source.architecture, plain, source.match, unquantized_tensors(source, reader), source.head_dim
        )
        stored = {
            stored_name(source.match.quantized[part.name]): name
            for name, parts in layout.layers.items()
            for part in parts
        }
        placed = Placed(Layers(source, layout, _options[0], reader), stored)
        chosen = {"linear_type": TYPE, _LAYERS: placed}
        params = source.params | {"linear_config": chosen, "fused_weights": False}
        return params | {"architecture": source.architecture, "model_path": model_path}

    return hf_config_to_fms_config_params


def _adapt(
    original: Any, state: Mapping[str, torch.Tensor], model_config: Any = None, **kwargs: Any
) -> Mapping[str, torch.Tensor]:
    """Runs FMS's adapter on the unquantized tensors of a part of the checkpoint.

    Quantized layers are removed before it runs. Layers that are not sliced are filled here. A placeholder
    makes FMS call `_shard` for each sliced layer.
    """
    placed: Placed | None = (getattr(model_config, "linear_config", None) or {}).get(_LAYERS)
    if placed is None:
        return original(state, model_config=model_config, **kwargs)
    found: dict[str, torch.device] = {}
    rest = {}
    for key, tensor in state.items():
        name = placed.stored.get(key.rpartition(".")[0])
        if name is None:
            rest[key] = tensor
        else:
            found[name] = tensor.device
    adapted = dict(original(rest, model_config=model_config, **kwargs))
    for name, device in found.items():
        if name not in placed.modules:
            raise FormatError(
                "The checkpoint contains a quantized layer that FMS does not create through its registry. "
                "Nothing was loaded.",
                tensor=name,
                expected="a linear layer of a decoder layer",
                found="another layer",
                fix="Call hfq.fms.load(path).",
            )
        if placed.is_cut(name):
            adapted[f"{name}.{TYPE}"] = torch.empty(0, device=device)  # for `_shard`, which knows the rank
        else:
            placed.fill(name, device)
    return adapted


def _shard(tensors: dict[str, torch.Tensor], tp_module: Any, infos: dict[str, Any]) -> set[str] | None:
    """Fills this rank's slices of the layers of one attention or MLP.

    FMS's own sharding slices the unquantized layers.
    """
    unquantized = {
        short: info for short, info in infos.items() if not isinstance(info.linear_module, QuantizedLinear)
    }
    marks = {key for key in tensors if key.endswith(f".{TYPE}")}
    for info in infos.values():
        module = info.linear_module
        mark = f"{getattr(module, 'name', '')}.{TYPE}"
        if isinstance(module, QuantizedLinear) and mark in marks:
            placed: Placed = tp_module.linear_config[_LAYERS]
            placed.fill(module.name, tensors[mark].device, tp_module.rank, tp_module.world_size)
    others = {key: tensor for key, tensor in tensors.items() if key not in marks}
    return linear.shard_torch_linear(others, tp_module, unquantized) if unquantized else set(others)


def _refuse(name: str) -> Mapping[str, torch.Tensor]:
    raise PlacementError(
        "A quantized layer was used before its weights were loaded.",
        tensor=name,
        expected="loaded weights",
        found="no weights",
        fix="Load the model with get_model('hf_pretrained', …) and a device_type other than meta.",
    )
