"""The float checkpoint to quantize: a meta model, and one decoder layer at a time."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint, Reader
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.formats.configs.source_config import check_floats
from hfq.formats.unquantized import Unquantized
from hfq.loading.config import HfqConfig
from hfq.loading.loaded_model import loader_of
from hfq.loading.matching.quantizable_layers import find_units, local_name
from hfq.loading.meta_model import model_class
from hfq.modules.experts import QuantizedExperts
from hfq.modules.flat_buffer import read_tensor
from hfq.modules.quantized_module import QuantizedModule
from hfq.offload.unit import UnquantizedParameter
from hfq.quantization.temporary_forward import hold, let_go
from hfq.recipes.recipe import Recipe
from hfq.tensor_spec import TensorInfo

__all__ = ["Source"]


class Source:
    """A float model that reads weights only when they are requested.

    Args:
        path: Folder of the checkpoint, or a model that hfq loaded from one.
        recipe: Method and options, which decide on the units.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Attributes:
        decoder_layers: The units to quantize, by name: decoder layers, or what `find_units` returns.

    Raises:
        SetupError: hfq did not load the model.
        FormatError: The checkpoint is already quantized.
        CheckpointError: The checkpoint is missing or not valid.
    """

    def __init__(self, path: Any, recipe: Recipe, trust_remote_code: bool = False) -> None:
        root = loader_of(path).checkpoint.root if isinstance(path, nn.Module) else path
        self.checkpoint = Checkpoint.open(Path(root))
        check_floats(self.checkpoint, "Nothing was written")
        self.model: PreTrainedModel = model_class(self.checkpoint).from_pretrained(
            root,
            quantization_config=HfqConfig(),
            device_map={"": "disk"},
            dtype=torch.float32,
            trust_remote_code=trust_remote_code,
        )
        self.model.eval()
        self.reader = Reader(self.checkpoint)
        self.decoder_layers = find_units(self.model, recipe)
        for module in self.model.modules():
            if isinstance(module, QuantizedExperts):
                module.onload = None  # its weights are read with their decoder layer
        self._match = loader_of(self.model).match
        self._quantized = loader_of(self.model).quantized

    def digest(self) -> str:
        """Returns a digest of the config and of every file's identity."""
        digest = hashlib.sha256((Path(self.checkpoint.root) / "config.json").read_bytes())
        for file, header in sorted(self.checkpoint.headers.items()):
            digest.update(f"{Path(file).name} {header.identity}".encode())
        return digest.hexdigest()

    def stored(self, parameter: str) -> TensorInfo:
        """Returns the stored tensor of a parameter."""
        module, _, local = parameter.rpartition(".")
        return (
            self._quantized[module].infos[local]
            if module in self._quantized
            else self._match.unquantized[parameter]
        )

    def dtype_of(self, decoder_layer: str, local: str) -> torch.dtype:
        """Returns the stored dtype of a parameter of a decoder layer."""
        return torch_dtype(self.stored(f"{decoder_layer}.{local}").dtype)

    def stored_module(self, name: str) -> str:
        """Returns a layer's name in the checkpoint, or `name` for a tied head."""
        weight = f"{name}.weight"
        is_stored = name in self._quantized or weight in self._match.unquantized
        return self.stored(weight).name.removesuffix(".weight") if is_stored else name

    def weight(self, name: str) -> torch.Tensor:
        """Returns the stored weight of a layer, [out, in], or [in, out] for a Conv1D."""
        return read_tensor(self.reader, self.stored(f"{name}.weight"))

    def stored_of(self, decoder_layer: str) -> list[TensorInfo]:
        """Returns the stored tensors of a decoder layer, in checkpoint order."""
        parameters = [name for name in self._match.unquantized if name.startswith(f"{decoder_layer}.")]
        names = {self._match.unquantized[name].name for name in parameters}
        names |= {
            info.name
            for name, module in self._quantized.items()
            if name.startswith(f"{decoder_layer}.")
            for info in module.infos.values()
        }
        return [info for name, info in self.checkpoint.tensors.items() if name in names]

    @contextlib.contextmanager
    def on_meta(self, name: str) -> Iterator[nn.Module]:
        """Yields the decoder layer without weights, with its experts replaced by linear layers."""
        decoder_layer = self.decoder_layers[name]
        experts = {
            local: module
            for local, module in decoder_layer.named_modules()
            if isinstance(module, QuantizedModule)
        }
        try:
            for local, module in experts.items():
                _replace(
                    decoder_layer,
                    local,
                    nn.Linear(module.in_features, module.out_features, "bias" in module.infos, device="meta"),
                )
            yield decoder_layer
        finally:
            for local, module in experts.items():
                _replace(decoder_layer, local, module)

    @contextlib.contextmanager
    def in_memory(self, name: str, layers: Collection[str] = ()) -> Iterator[nn.Module]:
        """Yields the decoder layer with its weights, and its experts replaced by linear layers.

        Args:
            name: Name of the decoder layer.
            layers: Linear layers in it that compute with their weights in the stored dtype, by name in the
                model. All other parameters are float32.
        """
        unquantized: list[tuple[UnquantizedParameter, nn.Parameter]] = []
        with self.on_meta(name) as decoder_layer:
            held = {
                f"{layer}.weight": decoder_layer.get_submodule(local_name(layer, name)) for layer in layers
            }
            try:
                for parameter, _ in list(decoder_layer.named_parameters()):
                    full = f"{name}.{parameter}"
                    info = self.stored(full)
                    value = read_tensor(self.reader, info)
                    if full in held:
                        hold(
                            held[full],
                            {"weight": value if isinstance(held[full], nn.Linear) else value.t()},
                            Unquantized(),
                        )
                        continue
                    owner = decoder_layer.get_submodule(parameter.rpartition(".")[0])
                    local = parameter.rpartition(".")[2]
                    weight = UnquantizedParameter(owner, local, info)
                    unquantized.append((weight, weight.give(value.to(torch.float32))))
                yield decoder_layer
            finally:
                for weight, before in unquantized:
                    weight.give(before)
                for layer in held.values():
                    let_go(layer)


def _replace(decoder_layer: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, local = name.rpartition(".")
    setattr(decoder_layer.get_submodule(parent), local, module)


def sizes_known(config: Any, *names: str) -> int | None:
    """Returns the first of these sizes in the model's config, or None."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return next((value for name in names if isinstance(value := getattr(text, name, None), int)), None)
