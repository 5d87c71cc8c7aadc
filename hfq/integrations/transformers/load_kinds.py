"""Kinds of load, and the combinations that are not possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from hfq.errors import SetupError
from hfq.integrations.deepspeed.zero3_loader import Zero3Loader
from hfq.loading.config import HfqConfig
from hfq.loading.model_loader import ModelLoader
from hfq.loading.quantize_on_load.quantizing_loader import QuantizingLoader
from hfq.loading.quantize_on_load.requirements import check_quantize_on_load
from hfq.loading.quantize_on_load.rounding_loader import RoundingLoader
from hfq.loading.ranks import is_zero3
from hfq.loading.tensor_parallel.sliced_loader import SlicedLoader
from hfq.loading.tensor_parallel.slices import check_alone, tensor_parallel_size

__all__ = ["LOAD_KINDS", "LoadKind", "choose_loader"]


@dataclass(frozen=True)
class LoadKind:
    """One kind of load.

    Attributes:
        name: Name of the kind.
        loader: Class that loads the model.
        is_requested: Returns True if a config, a model, and the environment request this kind.
        check: Raises a `SetupError` if the load cannot be of this kind.
        excludes: Kinds that it cannot be combined with; `check` raises an error for each.
    """

    name: str
    loader: type[ModelLoader]
    is_requested: Callable[[HfqConfig, Any], bool]
    check: Callable[[HfqConfig, Any], None]
    excludes: tuple[str, ...]


def _no_check(config: HfqConfig, model: Any) -> None:
    pass


LOAD_KINDS = (
    LoadKind(
        "quantize on load",
        QuantizingLoader,
        lambda config, model: config.recipe is not None,
        lambda config, model: check_quantize_on_load(config, tensor_parallel_size(model) > 1),
        excludes=("ZeRO-3", "tensor parallelism", "quantize_output_head"),
    ),
    LoadKind(
        "ZeRO-3",
        Zero3Loader,
        lambda config, model: is_zero3(),
        _no_check,
        excludes=("quantize on load", "tensor parallelism", "quantize_output_head"),
    ),
    LoadKind(
        "tensor parallelism",
        SlicedLoader,
        lambda config, model: tensor_parallel_size(model) > 1,
        lambda config, model: check_alone(),
        excludes=("quantize on load", "ZeRO-3", "quantize_output_head"),
    ),
    LoadKind(
        "quantize_output_head",
        RoundingLoader,
        lambda config, model: config.quantize_output_head is not None,
        _no_check,
        excludes=("quantize on load", "ZeRO-3", "tensor parallelism"),
    ),
    LoadKind("device map", ModelLoader, lambda config, model: True, _no_check, excludes=()),
)
"""Kinds of load; the last one applies if no other is requested."""


def choose_loader(config: HfqConfig, model: PreTrainedModel) -> type[ModelLoader]:
    """Returns the loader of the requested kind.

    Args:
        config: Config of the user.
        model: The meta model.

    Raises:
        SetupError: Two kinds that exclude each other are requested.
    """
    requested = [kind for kind in LOAD_KINDS if kind.is_requested(config, model)]
    for kind in requested:
        kind.check(config, model)
    chosen = requested[0]
    for other in requested[1:]:
        if other.name in chosen.excludes:
            raise SetupError(
                f"hfq does not combine {chosen.name} and {other.name}. Nothing was loaded.",
                expected="one of them",
                found="both",
                fix=f"Leave out the options for {other.name}.",
            )
    return chosen.loader
