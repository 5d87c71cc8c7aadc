"""What cannot be packed while loading, and is refused before anything is read."""

from __future__ import annotations

from hfq.errors import SetupError, raise_first
from hfq.loading.config import HfqConfig
from hfq.loading.ranks import is_zero3

__all__ = ["check_quantize_on_load", "refuse_quantize_on_load"]

_WRITTEN = "write a quantized checkpoint with hfq.quantize, and load that"


def check_quantize_on_load(config: HfqConfig, has_ranks: bool) -> None:
    """Refuses a method that needs calibration, and loads that several processes share.

    Args:
        config: Names a method.
        has_ranks: Whether the load is one of a tensor parallel run.

    Raises:
        SetupError: Names what cannot go with packing.
    """
    recipe = config.recipe
    if recipe is None:
        return
    problems = {
        f"method={recipe.method!r}, which needs calibration data": (recipe.needs_calibration, _WRITTEN),
        "an active ZeRO-3 config": (is_zero3(), _WRITTEN),
        "tensor parallelism": (has_ranks, _WRITTEN),
        f"cpu_memory={config.cpu_memory!r}": (
            config.cpu_memory in ("private", "shared"),
            "leave cpu_memory out: what is packed lies in memory of this process",
        ),
    }
    raise_first(
        SetupError(
            f"from_pretrained cannot pack a model while loading it with {what}. Nothing was loaded.",
            found=what,
            expected="a method that rounds to nearest, and a load of one process",
            fix=fix,
        )
        for what, (is_so, fix) in problems.items()
        if is_so
    )


def refuse_quantize_on_load(config: HfqConfig, caller: str) -> None:
    """For loads that cannot pack at all.

    Raises:
        SetupError: The config names a method.
    """
    if config.recipe is not None:
        raise SetupError(
            f"{caller} loads what is quantized already, and the config says how to quantize. Nothing was "
            f"loaded.",
            expected="no quantize_weights",
            found=f"method={config.recipe.method!r}",
            fix=_WRITTEN,
        )
