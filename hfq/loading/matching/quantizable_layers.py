"""Layers that hfq quantizes, and the units that it quantizes one after another."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D
from transformers.utils import logging

from hfq.errors import SetupError, nearest
from hfq.loading.matching.target_modules import COMPUTES_LIKE_LINEAR
from hfq.recipes.recipe import Recipe

__all__ = [
    "check_unfused",
    "find_all_linears",
    "find_decoder_layers",
    "find_linears",
    "find_skipped",
    "find_units",
    "find_unsuitable",
    "is_expert",
    "local_name",
    "optimum_gptq",
    "size_of",
    "with_number_of",
    "without_number",
]

logger = logging.get_logger("hfq")

_EXPERT = re.compile(r"(?<=experts\.)(?:expert_)?\d+(?=\.)")
_ROUTER = re.compile("router", re.IGNORECASE)
_READ_DIRECTLY = {
    "dt_proj",
    "continuous_position_bias_mlp",
    "RwkvSelfAttention.output",
    "RwkvFeedForward.value",
}
"""Modules that a model reads itself, by name or by class and name.

Mamba multiplies this weight, Swin V2 computes in its stored dtype, and RWKV divides these weights in place.
"""


def optimum_gptq(module: str) -> ModuleType:
    """Returns the module `optimum.gptq.<module>`, for decoder layers and calibration data.

    Raises:
        SetupError: optimum is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"optimum.gptq.{module}")
    except ImportError as error:
        raise SetupError(
            "This method requires optimum, which finds the decoder layers of a model.",
            expected="optimum 2.0 or later",
            found=str(error),
            fix="Run pip install 'hfq[quantize]', or use the method fp8, which does not require it.",
        ) from error


def find_units(model: PreTrainedModel, recipe: Recipe) -> dict[str, nn.Module]:
    """Returns the units of a model that hold the layers to quantize, in model order, by name.

    A unit is a layer of an encoder or decoder, or a single linear layer outside of them. Calibration needs
    decoder layers. Readers of GPTQ and AWQ look for quantized layers in decoder layers alone, so methods that
    write these formats quantize nothing else in a model that has decoder layers.

    Args:
        model: The model.
        recipe: Method and options.

    Raises:
        SetupError: The method needs decoder layers, which the model does not have.
    """
    left = find_unsuitable(model)
    units = {name: unit for name, unit in _units("", model, set()) if find_linears(unit, name, left)}
    if not recipe.needs_calibration and not (recipe.is_for_decoder_layers and _block_name(model)):
        return units
    decoder_layers = find_decoder_layers(model)
    within = tuple(f"{name}." for name in decoder_layers)
    others = {re.sub(r"\.\d+$", "", name) for name in units if not f"{name}.".startswith(within)}
    if others:
        logger.warning(
            "hfq: method %r quantizes decoder layers alone. Left unquantized: %s",
            recipe.method,
            ", ".join(sorted(others)),
        )
    return decoder_layers


def find_decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the decoder layers of a decoder-only model in order, keyed by their names.

    Raises:
        SetupError: The model has an encoder, or optimum knows no decoder layers of this architecture.
    """
    name = _block_name(model)
    if name is None:
        raise SetupError(
            f"{type(model).__name__} cannot be calibrated: hfq knows no decoder layers of it that run one "
            "after the other on token ids.",
            expected="a decoder-only language model that optimum knows",
            found=f"an architecture of type {model.config.model_type!r}",
            fix="Use a method that needs no calibration data, such as method='fp8' without distill_steps.",
        )
    return {f"{name}.{local}": block for local, block in model.get_submodule(name).named_children()}


def find_linears(unit: nn.Module, name: str, skipped: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Returns the layers of a unit that hfq can quantize, by their names in the model.

    Args:
        unit: The unit.
        name: Its name.
        skipped: Layers that stay unquantized.
    """
    left = set(skipped)
    named = {f"{name}.{local}".strip("."): layer for local, layer in unit.named_modules()}
    return {full: layer for full, layer in named.items() if full not in left and _is_linear(layer)}


def find_all_linears(model: nn.Module) -> dict[str, nn.Module]:
    """Returns all linear layers of a model, also those that hfq never quantizes."""
    return {name: layer for name, layer in model.named_modules() if isinstance(layer, (nn.Linear, Conv1D))}


def find_unsuitable(model: PreTrainedModel) -> list[str]:
    """Returns the linear layers that stay unquantized in every recipe.

    These are output heads: what a class adds around its base model, or holds next to it; tied layers;
    routers; layers that the class keeps in float32, such as `wo` of T5; and modules that a model reads
    itself.
    """
    ties = {name for pair in model.all_tied_weights_keys.items() for name in pair}
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    heads = {id(layer) for part in parts for layer in _heads(part)} | set(map(id, model.children()))
    in_float32 = _in_float32(model)
    owners = {id(layer): type(owner).__name__ for owner in model.modules() for layer in owner.children()}
    found = []
    for name, layer in find_all_linears(model).items():
        own = f"{owners[id(layer)]}.{name.rpartition('.')[2]}"
        is_read = bool(_READ_DIRECTLY & {own, *name.split(".")})
        is_head = id(layer) in heads or f"{name}.weight" in ties
        if is_head or is_read or _ROUTER.search(own) or in_float32.search(f"{name}.weight"):
            found.append(name)
    return found


def _in_float32(model: PreTrainedModel) -> re.Pattern[str]:
    """Returns a pattern for parameters that the model class keeps in float32."""
    names = {*(model._keep_in_fp32_modules or ()), *(model._keep_in_fp32_modules_strict or ())}
    return re.compile("|".join(rf"(^|\.){name}(\.|$)" for name in names) or "(?!)")


def _heads(model: PreTrainedModel) -> Iterator[nn.Module]:
    """Yields the output head, and every module outside of the base model."""
    yield from filter(None, [model.get_output_embeddings()])
    if model.base_model is not model:
        body = {id(module) for module in model.base_model.modules()}
        yield from (module for module in model.modules() if id(module) not in body)


def _units(name: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yields the elements of all outermost module lists, and linear layers outside of them."""
    for local, child in module.named_children():
        if id(child) in seen:
            continue
        seen.add(id(child))
        full = f"{name}.{local}".strip(".")
        if isinstance(module, nn.ModuleList) or _is_linear(child):
            yield full, child
        else:
            yield from _units(full, child, seen)


def _block_name(model: PreTrainedModel) -> str | None:
    """Returns the name of the list of decoder layers, or None if optimum knows none."""
    takes_ids = "input_ids" in inspect.signature(model.forward).parameters
    if getattr(model.config, "is_encoder_decoder", False) or not takes_ids:
        return None
    try:
        name = optimum_gptq("utils").get_block_name_with_pattern(model)
        blocks = model.get_submodule(name)
    except (ValueError, AttributeError):
        return None
    return name if isinstance(blocks, (nn.ModuleList, nn.Sequential)) and len(blocks) else None


def _is_linear(module: nn.Module) -> bool:
    """Returns True for linear layers without a forward of their own, as routers may have."""
    is_plain = type(module) is nn.Linear or type(module).__name__ in COMPUTES_LIKE_LINEAR
    return (is_plain or isinstance(module, Conv1D)) and "weight" in module._parameters


def find_skipped(model: nn.Module, patterns: Sequence[str] | None, within: Iterable[str] = ()) -> list[str]:
    """Returns the modules that `modules_to_not_convert` selects.

    A name selects modules with that full name, or whose own or parent's last names equal it.

    Args:
        model: The model.
        patterns: The names; None for no names.
        within: Further module names, such as experts that the model still holds fused.

    Raises:
        SetupError: A name matches nothing in the model.
    """
    known = [*(name for name, _ in model.named_modules()), *within]
    skipped = set()
    for pattern in patterns or ():
        named = re.compile(rf"(^|.*\.){re.escape(pattern)}(\..*)?")
        found = [name for name in known if named.fullmatch(name)]
        if not found:
            raise SetupError(
                f"modules_to_not_convert names {pattern!r}, which matches nothing in the "
                f"model.{nearest(pattern, known)}",
                expected="a module name",
                found=pattern,
                fix="Remove it from modules_to_not_convert, or use a name that the model has.",
            )
        skipped.update(found)
    return sorted(skipped)


def check_unfused(block: nn.Module, name: str, skipped: Iterable[str]) -> None:
    """Checks that a unit has no fused experts, which would stay unquantized silently.

    Args:
        block: The unit.
        name: Its name.
        skipped: Modules that stay unquantized.

    Raises:
        SetupError: Names the tensor, and the option that leaves it unquantized.
    """
    left = set(skipped)
    for local, parameter in block.named_parameters():
        owner, _, last = f"{name}.{local}".rpartition(".")
        is_of_torch = type(block.get_submodule(local.rpartition(".")[0])).__module__.startswith("torch.nn.")
        is_stacked = parameter.dim() > 2 and all(size > 1 for size in parameter.shape)
        if is_stacked and not is_of_torch and owner not in left:
            raise SetupError(
                "The model holds several weights, such as its experts, in one tensor, which hfq does not "
                "quantize. Nothing was done.",
                tensor=f"{owner}.{last}",
                expected="linear layers",
                found=str(list(parameter.shape)),
                fix=f"Pass modules_to_not_convert=[{owner.removeprefix(f'{name}.')!r}].",
            )


def local_name(name: str, unit: str) -> str:
    """Returns the name of a module within its unit; "" for the unit itself."""
    return name.removeprefix(unit).removeprefix(".")


def is_expert(name: str) -> bool:
    """Returns True if a layer belongs to a routed expert, which some tokens do not reach."""
    return _EXPERT.search(name) is not None


def without_number(name: str) -> str:
    """Returns the name of a layer with a star for the number of its expert."""
    return _EXPERT.sub("*", name)


def size_of(layer: nn.Module) -> tuple[int, int]:
    """Returns (out, in) of a linear layer or a Conv1D."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def with_number_of(name: str, expert: str) -> str:
    """Returns the name of a layer with the expert number of another layer."""
    found = _EXPERT.search(expert)
    return _EXPERT.sub(found.group(), name) if found else name
