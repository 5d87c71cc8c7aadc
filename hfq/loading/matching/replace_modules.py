"""Replacement of modules in a meta model by quantized modules."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import nn
from transformers.utils import logging

from hfq.errors import SetupError
from hfq.formats import ActivationScheme, Format
from hfq.kernels.activations import READABLE_DTYPES
from hfq.kernels.registry import Kernel, choose_kernel, explain_kernels
from hfq.loading.config import HfqConfig
from hfq.loading.matching.match import CheckpointMatch, QuantizedModuleMatch
from hfq.loading.matching.target_modules import (
    PROJECTIONS,
    FusedExperts,
    gate_of,
    halves_of,
    pack_weight,
    scale_of,
)
from hfq.modules.concat_linear import ConcatLinear
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.experts import MaskedExperts, QuantizedExperts, SortedExperts
from hfq.modules.linear import QuantizedLinear
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["ModuleBuilder", "replace_modules"]

logger = logging.get_logger("hfq")


def replace_modules(
    model: nn.Module, match: CheckpointMatch, config: HfqConfig, dtypes: Mapping[str, torch.dtype]
) -> dict[str, QuantizedModule]:
    """Replaces all modules that the checkpoint stores quantized, and returns the new ones.

    Args:
        model: The meta model.
        match: Stored tensors of its quantized modules.
        config: Options of the user.
        dtypes: Dtype of each tensor of the meta model after the load.

    Returns:
        The quantized modules, keyed by module name.

    Raises:
        SetupError: `quantize_activations=True`, and hfq does not support the checkpoint's scheme.
    """
    quantized, builder = {}, ModuleBuilder(config)
    for name, found in match.quantized.items():
        quantized[name] = module = builder.build(name, found)
        parent, _, local = name.rpartition(".")
        kept = f"{parent}.weight" if found.target.kind in ("weight", "half") else f"{name}.weight"
        if kept in dtypes:
            module.dtype = dtypes[kept]
        if found.target.kind == "conv1d":
            module.is_transposed = True
        if found.target.kind == "weight":
            pack_weight(model.get_submodule(parent), module)
        elif found.target.kind not in ("expert", "half"):
            replaced = model.get_submodule(name)
            module.train(replaced.training)
            if isinstance(module, QuantizedEmbedding):
                module.padding_idx = replaced.padding_idx  # type: ignore[assignment]
                scale = scale_of(replaced)
                if scale is not None:
                    module.embed_scale = torch.tensor(scale, dtype=torch.float32, device="cpu")
                    module.replaced_class = type(replaced)
            setattr(model.get_submodule(parent), local, module)
            _stand_for(replaced, module)
    for name in match.halved:
        owner = model.get_submodule(name.rpartition(".")[0])
        halves = {local: quantized[f"{name}.{local}"] for local in halves_of(owner)}
        replaced = model.get_submodule(name)
        joined = ConcatLinear(halves).train(replaced.training)  # type: ignore[arg-type]
        setattr(owner, name.rpartition(".")[2], joined)
        _stand_for(replaced, joined)
    for name, experts in match.experts.items():
        layers = [
            {
                local: layer
                for local in PROJECTIONS
                if isinstance(layer := quantized.get(f"{name}.{expert}.{local}"), QuantizedLinear)
            }
            for expert in range(experts.count)
        ]
        # stored halves are contiguous, not interleaved
        takes_turns = experts.is_interleaved and not experts.is_halved
        swapped = _kind_of(experts)(layers, gate_of(experts), takes_turns)
        swapped.training = experts.module.training  # its layers follow when transformers has set its own mode
        setattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], swapped)
    _tell_of_others(quantized, config.kernel)
    return quantized


def _kind_of(experts: FusedExperts) -> type[QuantizedExperts]:
    if experts.is_masked:
        return MaskedExperts
    return SortedExperts if experts.is_sorted else QuantizedExperts


def _stand_for(replaced: nn.Module, module: nn.Module) -> None:
    """Makes a replaced module call its successor.

    Model code may hold it in a list, as Mask2Former does.
    """
    replaced._parameters.clear()
    replaced.__dict__["forward"] = module.__call__


def _tell_of_others(quantized: Mapping[str, QuantizedModule], asked: str) -> None:
    """Logs the layers that the chosen kernel cannot multiply."""
    if asked == "auto":
        return
    left = {
        name: module
        for name, module in quantized.items()
        if isinstance(module, QuantizedLinear) and asked not in (module.kernel.name, module.accelerated.name)
    }
    if left:
        first, module = next(iter(left.items()))
        layer = module.weight_format, module.in_features, module.out_features
        reason = explain_kernels(asked, *layer, scheme=module.scheme)[asked]
        logger.warning(
            "hfq: kernel=%r cannot multiply %d quantized layers. %s does this instead (%s: %s)",
            asked,
            len(left),
            ", ".join(sorted({other.kernel.name for other in left.values()})),
            first,
            reason,
        )


class ModuleBuilder:
    """Builder of quantized modules.

    The kernels of a format and size are chosen once.

    Args:
        config: Options of the user.
    """

    def __init__(self, config: HfqConfig) -> None:
        self._config = config
        self._choices: dict[tuple[int, int, int], tuple[ActivationScheme | None, Kernel, Kernel | None]] = {}

    def build(self, name: str, found: QuantizedModuleMatch) -> QuantizedModule:
        """Returns the module for one quantized layer, without its tensors.

        Args:
            name: Its name, for messages.
            found: The matched layer.

        Raises:
            SetupError: `quantize_activations=True`, and hfq does not support the checkpoint's scheme.
        """
        target, infos = found.target, found.infos
        if target.kind == "embedding":
            return QuantizedEmbedding(name, target.out_features, target.in_features, found.format, infos)
        kind = id(found.format), target.in_features, target.out_features
        if kind not in self._choices:
            self._choices[kind] = self._choose(found.format, target.in_features, target.out_features)
        scheme, kernel, accelerated = self._choices[kind]
        return QuantizedLinear(
            name, target.in_features, target.out_features, found.format, infos, kernel, scheme, accelerated
        )

    def _choose(
        self, weight_format: Format, in_features: int, out_features: int
    ) -> tuple[ActivationScheme | None, Kernel, Kernel | None]:
        """Returns the activation scheme of a layer, and its kernels on CPU and accelerator."""
        scheme = _scheme(weight_format, self._config)
        if scheme is not None and scheme.dtype not in READABLE_DTYPES:
            raise SetupError(
                "HfqConfig(quantize_activations=True) cannot be used with this checkpoint. "
                "Nothing was loaded.",
                found=scheme.dtype,
                expected=f"activations quantized to {' or '.join(READABLE_DTYPES)}",
                fix="Pass HfqConfig(quantize_activations=False), which leaves activations unquantized.",
            )
        layer = weight_format, in_features, out_features
        kernel = choose_kernel(self._config.kernel, *layer, scheme=scheme)
        device = torch.accelerator.current_accelerator(check_available=True)
        if device is None:
            return scheme, kernel, None
        return scheme, kernel, choose_kernel(self._config.kernel, *layer, device.type, scheme)


def _scheme(weight_format: Format, config: HfqConfig) -> ActivationScheme | None:
    """Returns the activation scheme of a layer, with the outlier threshold of the user.

    None leaves activations unquantized.
    """
    scheme = weight_format.activation_scheme if config.quantize_activations else None
    if scheme is None or scheme.outlier_threshold is None or config.llm_int8_threshold is None:
        return scheme
    return dataclasses.replace(scheme, outlier_threshold=float(config.llm_int8_threshold))
