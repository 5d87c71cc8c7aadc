"""Output head that a load rounds, next to the weights of the checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.temporary_file import TemporaryFile
from hfq.errors import SetupError
from hfq.formats import Format, detect_formats
from hfq.formats.layouts.rounding import round_weight
from hfq.loading.config import HfqConfig
from hfq.loading.matching.match import CheckpointMatch
from hfq.loading.matching.quantizable_layers import find_skipped
from hfq.loading.matching.target_modules import QuantizedModuleMatch, TargetModule, target_module_of
from hfq.loading.matching.tied_weights import untie
from hfq.loading.quantize_on_load.virtual_checkpoint import FloatLayer, lay_out_layers
from hfq.modules.flat_buffer import read_tensor
from hfq.recipes.output_head import OUTPUT_HEAD_FORMATS
from hfq.tensor_spec import TensorInfo

__all__ = ["RoundedHead"]

_FLOATS = ("BF16", "F16", "F32")
_PANEL_NBYTES = 16 << 20
_UNPLACED = "(rounded on load)"


@dataclass(frozen=True)
class RoundedHead:
    """Output head that is rounded while it is loaded.

    Attributes:
        layer: Its name, and the float weight in the checkpoint.
        format: Format of the rounded head.
        is_tied: True if the checkpoint stores its weight as that of the embedding, which stays a float.
    """

    layer: FloatLayer
    format: Format
    is_tied: bool

    @classmethod
    def take(
        cls, model: PreTrainedModel, match: CheckpointMatch, checkpoint: Checkpoint, config: HfqConfig
    ) -> RoundedHead:
        """Moves the head from the unquantized to the quantized tensors of a match.

        Args:
            model: The meta model, before any module is replaced. A tied head is untied.
            match: The match, which is changed.
            checkpoint: The checkpoint.
            config: Config of the user, with `quantize_output_head`.

        Raises:
            SetupError: The model has no such head, or it cannot be rounded.
        """
        target = _target(model, match, checkpoint, config)
        weight, is_tied = _stored_weight(model, match, target.name)
        size = target.out_features, target.in_features
        layer = FloatLayer(target.name, target.name, weight, None, False, size)
        head = cls(layer, OUTPUT_HEAD_FORMATS[str(config.quantize_output_head)], is_tied)
        infos = head.place(_UNPLACED)[0]
        read_as = detect_formats({target.name: infos}, {})[target.name]
        match.unquantized.pop(f"{target.name}.weight", None)
        match.quantized[target.name] = QuantizedModuleMatch(target, read_as.sized(*size[::-1]), infos)
        return head

    def place(self, file: str) -> tuple[dict[str, TensorInfo], int]:
        """Returns the places of the rounded tensors by local name, and the size of their file."""
        placed, nbytes = lay_out_layers([self.layer], self.format, file)
        return {name.removeprefix(f"{self.layer.stored}."): info for name, info in placed.items()}, nbytes

    def write(self, reader: Reader, infos: dict[str, TensorInfo], file: TemporaryFile) -> None:
        """Rounds the head into a file, a few rows at a time.

        Raises:
            SetupError: A weight is not finite.
        """
        done = dict.fromkeys(infos, 0)
        for rows in self._panels():
            weight = read_tensor(reader, rows).to(torch.float32)
            for local, tensor in round_weight(self.layer.name, weight, self.format).items():
                flat = tensor.contiguous().reshape(-1).view(torch.uint8)
                # numpy arrays have the buffer protocol
                file.write(infos[local].range.offset + done[local], memoryview(flat.numpy()))  # type: ignore[arg-type]
                done[local] += flat.numel()
        file.finish()

    def describe(self) -> str:
        """Returns what a load changes, as one line."""
        stored = self.layer.weight
        tied = f", the weight of {stored.name.removesuffix('.weight')}" if self.is_tied else ""
        return (
            f"{self.layer.name} is rounded to {self.format.describe()} (stored as {stored.dtype}{tied}), "
            "so results are not those of the checkpoint"
        )

    def _panels(self) -> Iterator[TensorInfo]:
        """Yields runs of rows of the float weight."""
        weight = self.layer.weight
        count, row_nbytes = weight.shape[0], weight.nbytes // weight.shape[0]
        step = max(1, _PANEL_NBYTES // row_nbytes)
        for start in range(0, count, step):
            rows = min(step, count - start)
            place = weight.range._replace(
                offset=weight.range.offset + start * row_nbytes, nbytes=rows * row_nbytes
            )
            yield weight._replace(shape=(rows, *weight.shape[1:]), range=place)


def _target(
    model: PreTrainedModel, match: CheckpointMatch, checkpoint: Checkpoint, config: HfqConfig
) -> TargetModule:
    """Returns the output head as a place for a quantized module."""
    if checkpoint.gguf is not None:
        raise _refusal("a head in safetensors files", "a GGUF file")
    module = model.get_output_embeddings()
    name = next((name for name, each in model.named_modules() if each is module), None)
    if not isinstance(module, nn.Module) or name is None:
        raise _refusal("a model with an output head", f"{type(model).__name__}, which has none")
    target = target_module_of(name, module)
    if target is None or target.kind != "linear" or target.has_bias:
        bias = " with a bias" if target is not None and target.has_bias else ""
        raise _refusal("a linear layer without a bias", f"{type(module).__name__}{bias}", name)
    if name in match.quantized:
        raise _refusal(
            "a head that the checkpoint stores as floats", match.quantized[name].format.describe(), name
        )
    if name in find_skipped(model, config.modules_to_not_convert):
        raise _refusal("a head that modules_to_not_convert does not name", name, name)
    return target


def _stored_weight(model: PreTrainedModel, match: CheckpointMatch, head: str) -> tuple[TensorInfo, bool]:
    """Returns the float weight of the head, and whether it is stored as that of the embedding.

    A tied head is untied.
    """
    name, ties = f"{head}.weight", model.all_tied_weights_keys
    source = ties.get(name, name)
    if name in ties.values() or source not in match.unquantized:
        raise _refusal(
            "a head whose weight, or the embedding that it is tied to, is stored", "another tie", head
        )
    found = match.unquantized.get(name, match.unquantized[source])
    if {name, source} & match.merged.keys() or found.part_of is not None or found.dtype not in _FLOATS:
        raise _refusal("one tensor of floats", str(found), head)
    if name in ties:
        untie(model, name)
    return found, name not in match.unquantized


def _refusal(expected: str, found: str, head: str | None = None) -> SetupError:
    return SetupError(
        "HfqConfig(quantize_output_head=…) cannot be used with this model. Nothing was loaded.",
        tensor=None if head is None else f"{head}.weight",
        expected=expected,
        found=found,
        fix="Leave quantize_output_head out.",
    )
