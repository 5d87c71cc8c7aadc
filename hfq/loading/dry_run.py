"""Plan of a checkpoint from its headers, made by the loader's own steps."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from hfq.formats import Format
from hfq.loading.automatic_map import experts_per_token, map_of
from hfq.loading.kv_layers import activation_sizes, kv_layers
from hfq.loading.meta_model import load_meta_model
from hfq.loading.model_loader import ModelLoader
from hfq.modules.linear import QuantizedLinear
from hfq.modules.output_head import OutputHead, replace_head
from hfq.placement.budget import Budget
from hfq.placement.estimate.best_format import Shapes
from hfq.placement.estimate.estimate import ModelSizes
from hfq.placement.plan import Plan

__all__ = [
    "PlannedModel",
    "count_calls",
    "count_products",
    "kind_of_layer",
    "kind_of_weight",
    "measure_sizes",
    "open_model",
    "routed_share",
]


@dataclass(frozen=True)
class PlannedModel:
    """Sizes of a checkpoint, and the plans of the loader for it.

    Attributes:
        loading: The load, stopped at its meta model.
        sizes: Sizes that a placement depends on.
        uncounted: Number of layers whose state is not counted.
    """

    loading: ModelLoader
    sizes: ModelSizes
    uncounted: int

    def device_map(self, budget: Budget) -> dict[str, Any]:
        """Returns the map for `from_pretrained`, with accelerators as numbers."""
        devices = set(budget.executes.values()) - {"cpu", "disk"}
        keys = {device: int(device.partition(":")[2] or 0) for device in devices}
        return map_of(budget, self.loading.model, keys)

    def plan(self, device_map: Mapping[str, Any], kind: str = "cuda") -> Plan:
        """Returns the loader's plan for a map; its devices may be absent from this machine.

        Args:
            device_map: The map.
            kind: Device type of the accelerators that it names by number.
        """
        named = {
            name: f"{kind}:{device}" if isinstance(device, int) else device
            for name, device in device_map.items()
        }
        return self.loading.plan_for(named)

    def modules(self, device_map: Mapping[str, Any], kind: str = "cuda") -> list[dict]:
        """Returns each module's bytes on each device, in model order, as JSON-ready data."""
        order = (name for name, _ in self.loading.model.named_modules())
        return [asdict(module) for module in self.plan(device_map, kind).modules(order)]

    def weights_by_device(self, device_map: Mapping[str, Any], main: str) -> dict[str, int]:
        """Returns the planned bytes on each device.

        Buffers that no file stores count toward the execution device `main`.
        """
        plan, model = self.plan(device_map, main.partition(":")[0]), self.loading.model
        planned = {entry.name for entry in plan.entries}
        computed = sum(buffer.nbytes for name, buffer in model.named_buffers() if name not in planned)
        devices = plan.nbytes_by_device()
        return devices | {main: devices.get(main, 0) + computed}

    def shapes(self) -> Shapes:
        """Returns the shapes of the model's linear layers in any format, for `best_format`."""
        model = self.loading.model
        layers = []
        bits = []
        for name, module in model.named_modules():
            if isinstance(module, QuantizedLinear):
                layers.append((module.out_features, module.in_features))
                bits.append(sum(info.nbytes for info in module.infos.values()) * 8)
            elif isinstance(module, nn.Linear) and "lm_head" not in name:
                layers.append((module.out_features, module.in_features))
                bits.append(module.weight.numel() * module.weight.element_size() * 8)
        count = sum(out * into for out, into in layers)
        other = sum(unit.nbytes for unit in self.sizes.units) - sum(bits) // 8
        return Shapes(layers, max(other, 0), sum(bits) / max(count, 1))

    def describe(self) -> dict:
        """Returns a description of the checkpoint as JSON-ready data."""
        loading = self.loading
        return {
            "path": loading.checkpoint.root,
            "class": type(loading.model).__name__,
            "formats": loading.describe_formats(),
            "changes": loading.describe_changes(),
            "file_nbytes": loading.checkpoint.nbytes,
            "packed_modules": len(loading.quantized),
            "dtype": self.sizes.dtype,
            "layers": self.sizes.layers,
            "layers_with_an_uncounted_state": self.uncounted,
            "mtp_nbytes": sum(loading.checkpoint.tensors[name].nbytes for name in loading.match.predicting),
        }


def open_model(
    path: str | os.PathLike, dtype: Any = "auto", quantize_output_head: Any = None
) -> PlannedModel:
    """Returns the sizes of a checkpoint, from its config and headers alone.

    Args:
        path: Folder with weights or with headers alone (`hfq.integrations.hub.find`). It must exist while the
            model is planned.
        dtype: Dtype of the planned load, as in `from_pretrained`.
        quantize_output_head: Option of the planned load, as in `HfqConfig`.

    Raises:
        HfqError: The checkpoint fails a check that a load makes before it reads weights.
    """
    loading = load_meta_model(path, dtype, quantize_output_head)
    if loading.quantized:
        replace_head(loading.model)  # as a load with the default kernel does
    sizes, uncounted = measure_sizes(loading)
    return PlannedModel(loading, sizes, uncounted)


def measure_sizes(loading: ModelLoader) -> tuple[ModelSizes, int]:
    """Returns the sizes of a model, and the number of layers whose state is not counted.

    The load must have built its meta model.
    """
    model = loading.model
    layers, uncounted = kv_layers(model)
    dtype = str(model.dtype).removeprefix("torch.")
    config = model.config.get_text_config(decoder=True)
    routed = routed_share(config)
    units = tuple(loading.gather_units())
    sizes = activation_sizes(model)
    weights = count_products(model, dtype, routed)
    calls = count_calls(model, dtype, routed)
    positions = getattr(config, "max_position_embeddings", None)
    found = ModelSizes(units, tuple(layers), sizes, weights, routed, dtype, sizes.layers, calls, positions)
    return found, uncounted


def count_products(model: nn.Module, dtype: str, routed: float = 1.0) -> dict[str, tuple[int, int]]:
    """Returns the weights that one step multiplies by, as {kind of weight: (weights, bytes)}.

    Counts quantized and unquantized linear layers, and a share of the experts.

    Args:
        model: The model or its meta model.
        dtype: Dtype of its activations.
        routed: Share of the experts that one token is routed to.
    """
    found: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for kind, share, weights, nbytes in _products(model, dtype, routed):
        found[kind][0] += share * weights
        found[kind][1] += share * nbytes
    return {kind: (int(count), int(nbytes)) for kind, (count, nbytes) in found.items()}


def count_calls(model: nn.Module, dtype: str, routed: float = 1.0) -> dict[str, int]:
    """Returns {kind of weight: number of products} of one step.

    The arguments are those of `count_products`.
    """
    found: dict[str, float] = defaultdict(float)
    for kind, share, _, _ in _products(model, dtype, routed):
        found[kind] += share
    return {kind: round(count) for kind, count in found.items()}


def _products(model: nn.Module, dtype: str, routed: float) -> Iterator[tuple[str, float, int, int]]:
    """Yields (kind of weight, share that a step computes, weights, bytes) for each linear layer."""
    for name, module in model.named_modules():
        share = routed if ".experts." in f".{name}." else 1.0
        if isinstance(module, QuantizedLinear):
            nbytes = sum(info.nbytes for info in module.infos.values())
            yield kind_of_layer(module, dtype), share, module.in_features * module.out_features, nbytes
        elif isinstance(module, nn.Linear):
            yield kind_of_layer(module, dtype), share, module.weight.numel(), module.weight.nbytes


def kind_of_layer(module: QuantizedLinear | nn.Linear, dtype: str) -> str:
    """Returns the name in a machine profile of products with a layer and this dtype."""
    if isinstance(module, QuantizedLinear):
        return kind_of_weight(module.weight_format, dtype)
    return f"{'head' if isinstance(module, OutputHead) else 'dense'} {dtype}"


def kind_of_weight(weight_format: Format, dtype: str) -> str:
    """Returns the name in a machine profile of products with such weights and this dtype."""
    return f"{weight_format.name} {weight_format.bits_per_code}-bit {dtype}"


def routed_share(config: Any) -> float:
    """Returns the share of a layer's experts that one token is routed to; 1 without experts."""
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    experts = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    chosen = experts_per_token(config)
    return min(1.0, chosen / experts) if experts and chosen else 1.0
