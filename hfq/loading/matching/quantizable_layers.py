"""Layers that hfq quantizes: linear layers of decoder layers, as optimum finds them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from types import ModuleType

from torch import nn
from transformers import PreTrainedModel

from hfq.errors import SetupError, nearest

__all__ = [
    "check_unfused",
    "find_decoder_layers",
    "find_linears",
    "find_skipped",
    "is_expert",
    "optimum_gptq",
    "size_of",
    "with_number_of",
    "without_number",
]

_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


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
            "Quantizing a model requires optimum, which finds its decoder layers.",
            expected="optimum 2.0 or later",
            found=str(error),
            fix="Run pip install 'hfq[quantize]'",
        ) from error


def find_decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """Returns the decoder layers of a model in order, keyed by their names.

    Raises:
        SetupError: optimum knows no decoder layers of this architecture.
    """
    try:
        name = optimum_gptq("utils").get_block_name_with_pattern(model)
        blocks = model.get_submodule(name)
    except (ValueError, AttributeError) as error:
        raise SetupError(
            f"optimum does not know the decoder layers of {type(model).__name__}, so hfq cannot quantize it.",
            found=str(error),
            expected=", ".join(optimum_gptq("constants").BLOCK_PATTERNS),
            fix="Choose a decoder-only language model.",
        ) from error
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise SetupError(
            f"The decoder layers of {type(model).__name__} are not a list, so hfq cannot quantize it.",
            expected=f"a ModuleList at {name}",
            found=type(blocks).__name__,
            fix="Choose a decoder-only language model.",
        )
    return {f"{name}.{local}": block for local, block in blocks.named_children()}


def find_linears(block: nn.Module, name: str, skipped: Iterable[str] = ()) -> dict[str, nn.Module]:
    """Returns the linear layers of a decoder layer, by their names in the model.

    Args:
        block: The decoder layer.
        name: Its name.
        skipped: Layers that stay unquantized.
    """
    found = optimum_gptq("utils").get_layers(block)
    left = set(skipped)
    named = {f"{name}.{local}" if name else local: layer for local, layer in found.items()}
    return {full: layer for full, layer in named.items() if full not in left}


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
    """Checks that a decoder layer has no fused experts, which would stay unquantized silently.

    Args:
        block: The decoder layer.
        name: Its name.
        skipped: Modules that stay unquantized.

    Raises:
        SetupError: Names the tensor, and the option that leaves it unquantized.
    """
    left = set(skipped)
    for local, parameter in block.named_parameters():
        owner, _, last = f"{name}.{local}".rpartition(".")
        is_of_torch = type(block.get_submodule(local.rpartition(".")[0])).__module__.startswith("torch.nn.")
        if parameter.dim() > 2 and not is_of_torch and owner not in left:
            raise SetupError(
                "The model holds its experts in one tensor, which hfq does not quantize. Nothing was done.",
                tensor=f"{owner}.{last}",
                expected="linear layers",
                found=str(list(parameter.shape)),
                fix=f"Pass modules_to_not_convert=[{owner.removeprefix(f'{name}.')!r}].",
            )


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
