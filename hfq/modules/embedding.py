"""An embedding that holds quantized weights and dequantizes the rows that are looked up."""

from __future__ import annotations

import torch

from hfq.errors import SetupError
from hfq.formats import Format
from hfq.modules.graph_capture import uncompiled
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

    @uncompiled
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Looks up rows.

        Args:
            tokens: Integers of any shape, in [0, num_embeddings).

        Returns:
            [..., embedding_dim] in the model's dtype.

        Raises:
            SetupError: A token is out of range.
        """
        wanted, places = tokens.reshape(-1).unique(return_inverse=True)
        if wanted.numel() and not 0 <= int(wanted[0]) <= int(wanted[-1]) < self.num_embeddings:
            raise SetupError(
                f"{self.name} received a token outside of its table.",
                expected=f"0 to {self.num_embeddings - 1}",
                found=f"{int(wanted[0])} to {int(wanted[-1])}",
                fix="Use the tokenizer of this checkpoint.",
            )
        rows = self._rows(wanted)[places].view(*tokens.shape, self.embedding_dim)
        return rows if self.replaced_class is None else rows * self.embed_scale.to(rows.dtype)

    def _rows(self, wanted: torch.Tensor) -> torch.Tensor:
        """Returns the rows of ascending tokens, dequantized in panels of `row_multiple` rows."""
        tensors, multiple = self.onloaded_tensors(), self.weight_format.row_multiple
        device = next(iter(tensors.values())).device
        rows = torch.empty(wanted.numel(), self.embedding_dim, dtype=self.dtype, device=device)
        last, panel = -1, torch.empty(0)
        for index, token in enumerate(wanted.tolist()):
            start = token // multiple * multiple
            if start != last:
                count = min(multiple, self.num_embeddings - start)
                panel = torch.empty(count, self.embedding_dim, dtype=torch.float32, device=device)
                self.weight_format.dequantize_into(panel, tensors, start)
                last = start
            rows[index] = panel[token - start]
        return rows
