"""Options that quantize on load does not support, checked before anything is read."""

from __future__ import annotations

from hfq.errors import SetupError, raise_first
from hfq.loading.config import HfqConfig
from hfq.loading.ranks import is_zero3

__all__ = ["check_quantize_on_load", "refuse_quantize_on_load"]

_WRITTEN = "Write a quantized checkpoint with hfq.quantize, and load that one."


def check_quantize_on_load(config: HfqConfig, has_ranks: bool) -> None:
    """Checks that the method needs no calibration data, and that one process loads the model.

    Args:
        config: Config of the user.
        has_ranks: True if the load is part of a tensor-parallel run.

    Raises:
        SetupError: Names the unsupported option.
    """
    recipe = config.recipe
    if recipe is None:
        return
    problems = {
        f"quantize_weights={recipe.method!r}, which needs calibration data": (
            recipe.needs_calibration,
            _WRITTEN,
        ),
        f"quantize_weights={recipe.method!r}, whose tensors have sizes that depend on the weights": (
            not recipe.weight_format([]).has_fixed_size,
            _WRITTEN,
        ),
        "an active ZeRO-3 config": (is_zero3(), _WRITTEN),
        "tensor parallelism": (has_ranks, _WRITTEN),
        f"cpu_memory={config.cpu_memory!r}": (
            config.cpu_memory in ("private", "shared"),
            "Leave cpu_memory out. Layers that are quantized on load are in memory of this process.",
        ),
    }
    raise_first(
        SetupError(
            f"from_pretrained cannot quantize on load with {what}. Nothing was loaded.",
            found=what,
            expected="a method that needs no calibration data, with tensors of fixed sizes, and one process",
            fix=fix,
        )
        for what, (is_so, fix) in problems.items()
        if is_so
    )


def refuse_quantize_on_load(config: HfqConfig, caller: str) -> None:
    """Checks that a load that cannot quantize is not asked to.

    Raises:
        SetupError: The config has `quantize_weights` or `quantize_output_head`.
    """
    if config.quantize_output_head is not None:
        raise SetupError(
            f"{caller} does not quantize on load. Nothing was loaded.",
            expected="no quantize_output_head",
            found=f"quantize_output_head={config.quantize_output_head!r}",
            fix="Leave quantize_output_head out.",
        )
    if config.recipe is not None:
        raise SetupError(
            f"{caller} does not quantize on load. Nothing was loaded.",
            expected="no quantize_weights",
            found=f"quantize_weights={config.recipe.method!r}",
            fix=_WRITTEN,
        )
