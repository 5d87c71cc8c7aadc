"""What of a model is quantized: its blocks in order, and the linear layers of each, as optimum finds them."""

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
    """`optimum.gptq.<module>`, which knows the blocks of a model and the calibration sets of the field.

    Raises:
        SetupError: optimum is not installed.
    """
    import importlib

    try:
        return importlib.import_module(f"optimum.gptq.{module}")
    except ImportError as error:
        raise SetupError(
            "Quantizing a model needs optimum, which finds its blocks and calibration sets.",
            expected="optimum 2.0 or later",
            found=str(error),
            fix="pip install 'hfq[quantize]'",
        ) from error


def find_decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The decoder blocks of a model by name, in order.

    Raises:
        SetupError: optimum knows no block of this architecture.
    """
    try:
        name = optimum_gptq("utils").get_block_name_with_pattern(model)
        blocks = model.get_submodule(name)
    except (ValueError, AttributeError) as error:
        raise SetupError(
            f"optimum does not know where the blocks of {type(model).__name__} are; it cannot be quantized.",
            found=str(error),
            expected=", ".join(optimum_gptq("constants").BLOCK_PATTERNS),
            fix="quantize a decoder-only language model",
        ) from error
    if not isinstance(blocks, (nn.ModuleList, nn.Sequential)) or not len(blocks):
        raise SetupError(
            f"The blocks of {type(model).__name__} are no list; it cannot be quantized.",
            expected=f"a ModuleList at {name}",
            found=type(blocks).__name__,
            fix="quantize a decoder-only language model",
        )
    return {f"{name}.{local}": block for local, block in blocks.named_children()}


def find_linears(block: nn.Module, name: str, skipped: Iterable[str] = ()) -> dict[str, nn.Module]:
    """The linear layers of a block, by their names in the model.

    Args:
        block: The block.
        name: Its name.
        skipped: Layers that stay floats.
    """
    found = optimum_gptq("utils").get_layers(block)
    left = set(skipped)
    named = {f"{name}.{local}" if name else local: layer for local, layer in found.items()}
    return {full: layer for full, layer in named.items() if full not in left}


def find_skipped(model: nn.Module, patterns: Sequence[str] | None, within: Iterable[str] = ()) -> list[str]:
    """The linear layers that `modules_to_not_convert` names: by whole name, or by their own or a parent's
    last names.

    Args:
        model: The model.
        patterns: The names.
        within: Further modules that can be named, as those of experts which the model still holds as one.

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
                expected="names of modules",
                found=pattern,
                fix="correct modules_to_not_convert",
            )
        skipped.update(found)
    return sorted(skipped)


def check_unfused(block: nn.Module, name: str, skipped: Iterable[str]) -> None:
    """Refuses a block with experts that are one tensor together: they would stay floats without a word.

    Args:
        block: The block.
        name: Its name.
        skipped: Modules that are to stay floats.

    Raises:
        SetupError: Names the tensor, and how to leave it dense.
    """
    left = set(skipped)
    for local, parameter in block.named_parameters():
        owner, _, last = f"{name}.{local}".rpartition(".")
        is_of_torch = type(block.get_submodule(local.rpartition(".")[0])).__module__.startswith("torch.nn.")
        if parameter.dim() > 2 and not is_of_torch and owner not in left:
            raise SetupError(
                "A model stores experts as one tensor, which hfq does not quantize. Nothing was done.",
                tensor=f"{owner}.{last}",
                expected="linear layers",
                found=str(list(parameter.shape)),
                fix=f"leave them dense with modules_to_not_convert=[{owner.removeprefix(f'{name}.')!r}]",
            )


def is_expert(name: str) -> bool:
    """Whether a layer is one of a routed expert, which some tokens do not reach."""
    return _EXPERT.search(name) is not None


def without_number(name: str) -> str:
    """A layer's name with a star for the number of its expert."""
    return _EXPERT.sub("*", name)


def size_of(layer: nn.Module) -> tuple[int, int]:
    """(out, in) of a linear layer or a Conv1D."""
    rows, columns = layer.weight.shape  # type: ignore[misc]
    return (rows, columns) if isinstance(layer, nn.Linear) else (columns, rows)


def with_number_of(name: str, expert: str) -> str:
    """A layer's name with the number of another layer's expert in place of its own."""
    found = _EXPERT.search(expert)
    return _EXPERT.sub(found.group(), name) if found else name
