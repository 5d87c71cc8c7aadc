"""An embedding that holds quantized weights and dequantizes the rows that are looked up."""

from __future__ import annotations

import torch
from torch.compiler import is_compiling

from hfq.formats import Format
from hfq.modules.graph_capture import uncompiled
from hfq.modules.graph_ops import OPS, look_up
from hfq.modules.layer_layout import layer_text
from hfq.modules.quantized_module import QuantizedModule
from hfq.tensor_spec import TensorInfo

__all__ = ["QuantizedEmbedding"]


class QuantizedEmbedding(QuantizedModule):
    """Replaces `nn.Embedding`.

    Its codes are those of a linear layer [num_embeddings, embedding_dim].

    Args:
        name: The module's name in the model, for messages.
        num_embeddings: Number of rows of the table.
        embedding_dim: Number of elements of a row.
        weight_format: The format of its tensors.
        infos: The stored tensors, by checkpoint name.

    Attributes:
        padding_idx: The token whose row an adapter leaves unchanged, as in `nn.Embedding`; so are the next
            four.
        replaced_class: The class of an embedding that multiplies its rows by a factor; None for another one.
        embed_scale: That factor, float32 []; PEFT expects the attribute only where there is one.
    """

    padding_idx: int | None = None
    replaced_class: type | None = None
    embed_scale: torch.Tensor
    max_norm = None
    norm_type = 2.0
    scale_grad_by_freq = False
    sparse = False

    def __init__(
        self,
        name: str,
        num_embeddings: int,
        embedding_dim: int,
        weight_format: Format,
        infos: dict[str, TensorInfo],
    ) -> None:
        super().__init__(name, embedding_dim, num_embeddings, weight_format, infos)
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up rows.

        Args:
            tokens: Integers of any shape, in [0, num_embeddings).

        Returns:
            [..., embedding_dim] in the model's dtype.

        Raises:
            SetupError: A token is out of range.
        """
        if is_compiling() and self.fits_graph():
            rows = OPS.lookup(tokens, self.graph_inputs(), self.layout, self.dtype)
        else:
            rows = self._rows(tokens)
        return rows if self.replaced_class is None else rows * self.embed_scale.to(rows.dtype)

    def _describe(self) -> None:
        names = self._held_names()
        vars(self)["layout"] = layer_text(
            self.weight_format, self.num_embeddings, self.embedding_dim, "", "", None, *names
        )

    @uncompiled
    def _rows(self, tokens: torch.Tensor) -> torch.Tensor:
        size = self.num_embeddings, self.embedding_dim
        return look_up(self.name, tokens, self.onloaded_tensors(), self.weight_format, size, self.dtype)
