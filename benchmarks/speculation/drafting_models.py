"""A mixture with a layer that predicts further tokens, and a small assistant, trained on one text.

The mixture is trained first. Its further layer learns from the frozen mixture's states, as in DeepSeek-V3: from
the state at a token and the next token, it predicts the one after that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.corpus import Corpus, kept, publish
from benchmarks.quality.training import CONTEXT, Muon, Training, trained
from hfq.checkpoint import Checkpoint, read_header
from hfq.checkpoint.write_checkpoint import index_file

__all__ = ["ASSISTANT", "MIXTURE", "DraftingModels", "MixtureTraining", "make_models"]

_MUON_LR, _ADAM_LR, _WARMUP = 0.02, 3e-3, 20


@dataclass(frozen=True)
class MixtureTraining(Training):
    """A GLM-4.5 of small size, and its training.

    Attributes:
        experts: Routed experts in each decoder layer but the first, which is dense; two of them per token.
        further_steps: Number of steps of the layer that predicts further tokens.
    """

    family: str = "glm4_moe"
    experts: int = 8
    further_steps: int = 160

    def config(self) -> Any:
        from transformers import Glm4MoeConfig

        return Glm4MoeConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=2 * self.hidden,
            moe_intermediate_size=self.hidden // 2,
            num_hidden_layers=self.layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=self.hidden // 4,
            n_routed_experts=self.experts,
            num_experts_per_tok=2,
            n_shared_experts=1,
            first_k_dense_replace=1,
            n_group=1,
            topk_group=1,
            num_mtp_layers=1,
            max_position_embeddings=2 * CONTEXT,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )


MIXTURE = MixtureTraining(layers=6, vocabulary=1024, steps=400, further_steps=240)
ASSISTANT = Training("llama", hidden=128, layers=2, vocabulary=1024, steps=600)


@dataclass(frozen=True)
class DraftingModels:
    """Float checkpoints.

    Attributes:
        main: The mixture, with its further layer under the names of published checkpoints.
        assistant: The assistant.
    """

    main: Path
    assistant: Path


def make_models(
    mixture: MixtureTraining, assistant: Training, corpus: Corpus, folder: Path, say: Callable[[str], None]
) -> DraftingModels:
    """Returns the trained models, from `folder` if an earlier run left them there.

    Args:
        mixture: The main model.
        assistant: The assistant model.
        corpus: The text.
        folder: Folder that keeps corpora and models between runs.
        say: Function that receives progress lines.

    Raises:
        CheckpointError: The results of an earlier run are damaged.
    """
    paths = [folder / f"speculation-{each.family}-{each.key(corpus)}" for each in (mixture, assistant)]
    for path, training in zip(paths, (mixture, assistant), strict=True):
        if not path.is_dir():
            model = trained(training, corpus, folder, say).model
            tensors = _further_tensors(mixture, model, corpus, say) if training is mixture else {}
            publish(path, lambda made, model=model, tensors=tensors: _save(model, tensors, made))
        with kept(path):
            Checkpoint.open(path)
    return DraftingModels(*paths)


def _further_tensors(
    training: MixtureTraining, main: Any, corpus: Corpus, say: Callable[[str], None]
) -> dict[str, torch.Tensor]:
    """Trains the layer that predicts further tokens, and returns its tensors as published checkpoints do."""
    from transformers.modeling_layers import MtpModel

    with torch.random.fork_rng([]):
        torch.manual_seed(1)
        further = MtpModel(main.requires_grad_(False), 1)
        layer = further.layers.requires_grad_(True).train()
        for name, parameter in layer.named_parameters():
            if "norm" not in name:
                torch.nn.init.normal_(parameter, std=main.config.initializer_range)
        _fit(further, main, training, corpus.tokens["training"], say)
    found: dict[str, torch.Tensor] = {}
    for name, tensor in layer.state_dict().items():
        found |= _as_published(name, tensor, main.config.num_hidden_layers)
    return found


def _fit(
    further: Any, main: Any, training: MixtureTraining, tokens: torch.Tensor, say: Callable[[str], None]
) -> None:
    parameters = dict(further.layers.named_parameters())
    matrices = {name: parameter for name, parameter in parameters.items() if parameter.dim() == 2}
    others = [parameter for name, parameter in parameters.items() if name not in matrices]
    muon, adam = Muon(matrices.values()), torch.optim.AdamW(others, lr=_ADAM_LR, weight_decay=0.0)
    for step in range(training.further_steps):
        share = min((step + 1) / _WARMUP, 2 * (1 - step / training.further_steps), 1.0)
        starts = torch.randint(0, tokens.numel() - CONTEXT - 2, (training.batch,)).tolist()
        batch = torch.stack([tokens[start : start + CONTEXT + 2] for start in starts])
        with torch.no_grad():
            states = main.model(batch[:, :-2], use_cache=False).last_hidden_state
        found = run_further(further, batch[:, 1:-1], states)
        loss = torch.nn.functional.cross_entropy(found.flatten(0, 1), batch[:, 2:].flatten())
        loss.backward()
        adam.param_groups[0]["lr"] = _ADAM_LR * share
        adam.step()
        muon.step(_MUON_LR * share)
        further.layers.zero_grad()
        if step % 20 == 0 or step + 1 == training.further_steps:
            say(f"further layer: step {step + 1} of {training.further_steps}, loss {loss.item():.3f}")


def run_further(further: Any, tokens: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Returns the logits of the further layer at each position.

    Args:
        further: The `MtpModel`.
        tokens: The token after each state, [batch, length].
        states: States of the main model, [batch, length, hidden].
    """
    length = tokens.shape[1]
    positions = torch.arange(1, length + 1)[None]
    mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
    found = further.layers[0](
        further.embed_tokens(tokens),
        states,
        position_embeddings=further.rotary_emb(states, position_ids=positions),
        attention_mask=mask,
        position_ids=positions,
        past_key_values=None,
    )
    return further.shared_head(found)


def _as_published(name: str, tensor: torch.Tensor, first: int) -> dict[str, torch.Tensor]:
    """Returns a tensor of `MtpModel.layers` under its published names, each expert separately."""
    index, _, local = name.partition(".")
    local = re.sub(r"^post_norm", "shared_head.norm", local).removeprefix("mtp_block.")
    owner, _, projection = f"model.layers.{first + int(index)}.{local}".rpartition(".")
    if not owner.endswith("experts"):
        return {f"{owner}.{projection}": tensor.detach().clone()}
    parts = {"gate_up_proj": ("gate_proj", "up_proj")}.get(projection, (projection,))
    return {
        f"{owner}.{expert}.{part}.weight": half.detach().clone()
        for expert, weight in enumerate(tensor)
        for part, half in zip(parts, weight.chunk(len(parts)), strict=True)
    }


def _save(model: Any, tensors: dict[str, torch.Tensor], made: Path) -> None:
    """Writes a model, and further tensors into a shard of their own."""
    from safetensors.torch import save_file

    model.to(torch.bfloat16).save_pretrained(made)
    if not tensors:
        return
    shards = [made / "model-main.safetensors", made / "further.safetensors"]
    (made / "model.safetensors").rename(shards[0])
    save_file({name: tensor.bfloat16() for name, tensor in tensors.items()}, shards[1])
    index = index_file({shard.name: read_header(shard).tensors.values() for shard in shards})
    (made / index.name).write_bytes(index.head)
