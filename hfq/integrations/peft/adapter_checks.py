"""Checks of an adapter config against weights that are never rewritten."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils.constants import SEQ_CLS_HEAD_NAMES
from torch import nn
from transformers.pytorch_utils import Conv1D

from hfq.errors import SetupError
from hfq.loading.matching.target_modules import WEIGHT
from hfq.modules.experts import QuantizedExperts
from hfq.modules.linear import QuantizedLinear
from hfq.modules.offloaded_parameter import OffloadedParameter
from hfq.modules.quantized_module import QuantizedModule

__all__ = ["check_adapter", "check_replication", "is_fixed", "linears_of"]

_INITIALISATIONS = (True, False, None, "gaussian", "eva", "orthogonal", "mica")
"""Values that keep the base weight. The others subtract the initial adapter from it."""

_WRITING = ("kasa_config", "use_qalora")
"""Options that change the base weight, or that PEFT ignores silently on quantized layers."""


def is_fixed(module: nn.Module) -> bool:
    """Returns True if a weight of a module must not be written: it is quantized or offloaded."""
    is_offloaded = any(isinstance(parameter, OffloadedParameter) for parameter in module._parameters.values())
    return isinstance(module, QuantizedModule) or is_offloaded or WEIGHT in module._modules


def linears_of(model: nn.Module, task_type: Any) -> set[str]:
    """Returns the quantized layers that `target_modules="all-linear"` selects.

    These are all but the head, experts, and weights of modules with their own forward. PEFT itself selects
    instances of `nn.Linear` and `Conv1D`, and quantized layers are neither.
    """
    skipped = [
        name
        for name, module in model.named_modules()
        if isinstance(module, (BaseTunerLayer, QuantizedExperts))
    ]
    head = _head_of(model, task_type)
    found = set()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{outer}.") for outer in skipped)
        if (
            isinstance(module, QuantizedLinear)
            and module is not head
            and not is_inside
            and not name.endswith(f".{WEIGHT}")
        ):
            found.add(name)
    return found


def check_adapter(config: Any, model: Any) -> None:
    """Checks that an adapter neither rewrites a base weight nor trains a copy of one.

    Raises:
        SetupError: The adapter is not LoRA, starts from a changed base weight, or selects experts, parameters
            of quantized modules, or modules to train completely.
    """
    fixed = {_plain(name): module for name, module in model.named_modules() if is_fixed(module)}
    _check_whole(config, model, fixed)
    _check_parameters(config, model, fixed)
    _check_bias(config, fixed)
    targeted = {name: module for name, module in fixed.items() if check_target_module_exists(config, name)}
    if not targeted:
        return
    first = next(iter(targeted))
    kind = str(getattr(config.peft_type, "value", config.peft_type))
    if kind != "LORA":
        raise _refusal(
            f"{kind} adapters do not support quantized modules.", "LORA", first, "Use a LoraConfig."
        )
    if config.init_lora_weights not in _INITIALISATIONS:
        raise _refusal(
            f"init_lora_weights={config.init_lora_weights!r} changes the base weight, and hfq never rewrites "
            f"{first}.",
            "True, False, 'gaussian', 'eva', 'orthogonal', or 'mica'",
            repr(config.init_lora_weights),
            "Leave init_lora_weights out.",
        )
    for name in _WRITING:
        if getattr(config, name, None):
            raise _refusal(
                f"LoraConfig({name}=…) does not support quantized modules, since it changes the base weight.",
                f"no {name}",
                first,
                f"Leave {name} out.",
            )
    _check_targets(targeted, _expert_names(model))


def check_replication(model: nn.Module) -> None:
    """Checks that `layer_replication`, which copies layers that share parameters, is possible.

    Raises:
        SetupError: A module is quantized or offloaded.
    """
    found = next((name for name, module in model.named_modules() if is_fixed(module)), None)
    if found is not None:
        raise _refusal(
            "LoraConfig(layer_replication=…) does not support quantized or offloaded modules.",
            "unquantized modules in memory",
            found,
            "Leave layer_replication out.",
        )


def _check_bias(config: Any, fixed: dict[str, nn.Module]) -> None:
    """Checks that no bias of a quantized or offloaded module is trained."""
    asked = getattr(config, "bias", "none")
    for name, module in fixed.items():
        has_bias = (
            "bias" in module.infos
            if isinstance(module, QuantizedModule)
            else module._parameters.get("bias") is not None
        )
        if asked != "none" and has_bias and (asked == "all" or check_target_module_exists(config, name)):
            raise _refusal(
                f"bias={asked!r} trains the bias of {name}, which hfq never rewrites.",
                "bias='none'",
                repr(asked),
                "Leave bias out. lora_bias=True adds a bias to the adapter.",
            )


def _check_targets(targeted: dict[str, nn.Module], experts: Iterable[str]) -> None:
    outer = tuple(f"{name}." for name in experts)
    for name, module in targeted.items():
        if name.startswith(outer):
            raise _refusal(
                "hfq does not support LoRA on quantized experts.",
                "layers outside of experts",
                name,
                "Target the attention layers, or pass exclude_modules.",
            )
        is_lora = isinstance(module, (QuantizedModule, nn.Linear, nn.Embedding, Conv1D))
        if not is_lora or name.endswith(f".{WEIGHT}"):
            raise _refusal(
                f"hfq does not support LoRA on {name}, which is quantized or offloaded.",
                "a linear layer or an embedding",
                type(module).__name__,
                "Leave it out of target_modules.",
            )


def _check_whole(config: Any, model: Any, fixed: dict[str, nn.Module]) -> None:
    """Checks modules that are trained completely: as copies, or some of their rows."""
    tokens = getattr(config, "trainable_token_indices", None)
    embedding = (
        model.get_input_embeddings()
        if tokens is not None and hasattr(model, "get_input_embeddings")
        else None
    )
    names = (
        [] if tokens is None else list(tokens) if isinstance(tokens, dict) else _names_of(embedding, model)
    )
    names += list(getattr(config, "modules_to_save", None) or ())
    for name, _ in model.named_modules():
        if any(_plain(name).endswith(asked) for asked in names):
            inner = next(
                (key for key in fixed if key == _plain(name) or key.startswith(f"{_plain(name)}.")), None
            )
            if inner is not None:
                raise _refusal(
                    f"{name} cannot be trained completely, since its weight is quantized or offloaded.",
                    "an unquantized module in memory",
                    inner,
                    "Leave it out of modules_to_save and trainable_token_indices, and target it with LoRA. "
                    "An unquantized module can be placed in memory instead.",
                )


def _check_parameters(config: Any, model: Any, fixed: dict[str, nn.Module]) -> None:
    fused = {
        f"{name}.{local}"
        for name in _expert_names(model)
        for local in ("gate_up_proj", "down_proj", "gate_proj", "up_proj")
    }
    own = {f"{name}.{local}" for name, module in fixed.items() for local in (*module._parameters, "weight")}
    for asked in sorted(getattr(config, "target_parameters", None) or ()):
        for name in sorted(fused | own):
            if name == asked or name.endswith(f".{asked}"):
                raise _refusal(
                    f"target_parameters names {asked!r}, which is quantized or offloaded. (PEFT adds experts "
                    f"and routers to "
                    'target_parameters for target_modules="all-linear".)',
                    "unquantized parameters in memory",
                    name,
                    "Name the attention layers in target_modules. LoRA on quantized experts is unsupported.",
                )


def _expert_names(model: nn.Module) -> Iterator[str]:
    return (_plain(name) for name, module in model.named_modules() if isinstance(module, QuantizedExperts))


def _head_of(model: Any, task_type: Any) -> nn.Module | None:
    """Returns the head that PEFT leaves out of "all-linear", or None.

    It is the output embedding, or the head of a classifier.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None and str(getattr(task_type, "value", task_type)) == "SEQ_CLS":
        head = next((getattr(model, name) for name in SEQ_CLS_HEAD_NAMES if hasattr(model, name)), None)
    return head


def _names_of(wanted: nn.Module | None, model: nn.Module) -> list[str]:
    return [_plain(name) for name, module in model.named_modules() if module is wanted]


def _plain(name: str) -> str:
    """Returns the name of a module without the wrappers of adapters."""
    return name.replace(".base_layer", "")


def _refusal(what: str, expected: str, found: str, fix: str) -> SetupError:
    return SetupError(f"{what} No adapter was added.", expected=expected, found=found, fix=fix)
