"""Short LoRA runs on the tiny models and on plain models of the same weights, compared bit for bit."""

from dataclasses import dataclass

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.quantized_module import QuantizedModule
from tests.support import models, tiny_models

PATHS = {name: tiny_models.DATA / f"tiny-llama-{name}" for name in ("gptq", "fp8")}
DISK = {"": "disk"}
HALF = {"": "cpu", "model.layers.2": "disk", "model.layers.3": "disk"}
TOKENS = torch.randint(5, 200, (2, 12), generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True)
class Run:
    """Results of a run of some steps."""

    model: nn.Module
    losses: list[float]
    first_grads: dict[str, torch.Tensor]
    adapters: dict[str, torch.Tensor]

    def is_equal(self, other: "Run") -> bool:
        """Returns True if all losses, gradients of the first step, and trained values are bit-identical."""
        pairs = ((self.first_grads, other.first_grads), (self.adapters, other.adapters))
        same = all(
            a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a) for a, b in pairs
        )
        return same and self.losses == other.losses and len(self.adapters) > 0


def load(path="gptq", device_map=None, dtype=torch.float32, **options):
    return models.load(PATHS.get(path, path), device_map, dtype=dtype, **options)


def unpack(model: nn.Module) -> nn.Module:
    """Returns the same model with torch's layers in place of quantized ones."""
    for name, packed in list(model.named_modules()):
        if isinstance(packed, QuantizedModule):
            model.set_submodule(name, _unpacked(packed))
    return model


def _unpacked(packed: QuantizedModule) -> nn.Module:
    weight, bias = packed.weight, packed.bias
    if isinstance(packed, QuantizedEmbedding):
        layer = nn.Embedding(
            packed.num_embeddings, packed.embedding_dim, packed.padding_idx, dtype=weight.dtype
        )
    elif packed.is_transposed:
        layer = Conv1D(packed.out_features, packed.in_features).to(weight.dtype)
    else:
        layer = nn.Linear(packed.in_features, packed.out_features, bias=bias is not None, dtype=weight.dtype)
    layer.weight.data.copy_(weight)
    if bias is not None:
        layer.bias.data.copy_(bias)
    return layer.requires_grad_(False)


def adapt(
    model: nn.Module, target_modules="all-linear", task_type: str | None = "CAUSAL_LM", **options
) -> nn.Module:
    torch.manual_seed(0)
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=target_modules, task_type=task_type, **options)
    )


def train(model: nn.Module, steps: int = 3, inputs: dict | None = None) -> Run:
    """Trains the adapters of a model on one batch, with AdamW."""
    inputs = {"input_ids": TOKENS, "labels": TOKENS} if inputs is None else inputs
    model.train()
    torch.manual_seed(1)
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    losses, first = [], {}
    for _ in range(steps):
        optimizer.zero_grad()
        outputs = model(**inputs)
        loss = outputs.logits.float().square().mean() if outputs.get("loss") is None else outputs.loss
        loss.backward()
        first = first or {
            name: parameter.grad.clone() for name, parameter in trained.items() if parameter.grad is not None
        }
        optimizer.step()
        losses.append(loss.item())
    return Run(
        model, losses, first, {name: parameter.detach().clone() for name, parameter in trained.items()}
    )


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=TOKENS).logits


def packed_bytes(model: nn.Module) -> dict[str, bytes]:
    """Returns the bytes of every quantized tensor in memory."""
    return {
        f"{name}.{local}": tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        for name, module in model.named_modules()
        if isinstance(module, QuantizedModule)
        for local, tensor in module.stored_tensors().items()
        if not tensor.is_meta
    }
