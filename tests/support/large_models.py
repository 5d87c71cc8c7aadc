"""The structure of large models in small sizes."""

from benchmarks.load.large_models import LARGE_MODELS, LargeModel

SIZES = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 128,
    "vocab_size": 128,
    "num_attention_heads": 4,
    "q_lora_rank": 128,
}
EXPERTS = ("num_experts", "n_routed_experts")


def narrow(name: str, experts: int) -> LargeModel:
    """Returns a large model with other sizes and this number of experts, in two files."""
    model = LARGE_MODELS[name]

    def config(layers):
        found = model.config(layers)
        for key, size in {**SIZES, **dict.fromkeys(EXPERTS, experts)}.items():
            if hasattr(found, key):
                setattr(found, key, size)
        return found

    return LargeModel(config, model.tensors, 2)
