"""What of a model is quantized: see `hfq.loading.matching.quantizable_layers`, which a load that packs uses as well."""

from hfq.loading.matching.quantizable_layers import (
    check_unfused,
    find_blocks,
    find_linears,
    find_skipped,
    is_expert,
    optimum_gptq,
    size_of,
    with_number_of,
    without_number,
)

__all__ = [
    "check_unfused", "find_blocks", "find_linears", "find_skipped", "is_expert", "optimum_gptq", "size_of", "with_number_of",
    "without_number",
]  # fmt: skip
