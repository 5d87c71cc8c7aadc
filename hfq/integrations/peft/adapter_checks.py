"""What an adapter asks of a model whose weights are not written, judged before a layer is replaced."""

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
"""Those that leave the base weight as it is; the others subtract from it what the adapter starts with."""

_WRITING = ("kasa_config", "use_qalora")
"""Options that change the base, or that PEFT would ignore without a word on a layer that is not its own."""


def is_fixed(module: nn.Module) -> bool:
    """Whether a module's weight must not be written: it is packed, or rests elsewhere than where it
    computes.
    """
    is_offloaded = any(isinstance(parameter, OffloadedParameter) for parameter in module._parameters.values())
    return isinstance(module, QuantizedModule) or is_offloaded or WEIGHT in module._modules


def linears_of(model: nn.Module, task_type: Any) -> set[str]:
    """The packed layers that `target_modules="all-linear"` means: all but the head, experts, and weights that
    stand alone.

    PEFT counts what is an `nn.Linear` or a `Conv1D`, which packed layers are not.
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
    """Refuses what would write a base weight, or train a copy of one that cannot be trained.

    Raises:
        SetupError: The adapter is of another kind than LoRA, starts from a changed base weight, or names
            experts, the parameters of packed modules, or modules to be trained whole.
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
            f"Adapters of the kind {kind} cannot be put on packed modules.", "LORA", first, "use a LoraConfig"
        )
    if config.init_lora_weights not in _INITIALISATIONS:
        raise _refusal(
            f"init_lora_weights={config.init_lora_weights!r} changes the base weight, and {first} is never "
            f"rewritten.",
            "True, False, 'gaussian', 'eva', 'orthogonal' or 'mica'",
            repr(config.init_lora_weights),
            "leave init_lora_weights as it is",
        )
    for name in _WRITING:
        if getattr(config, name, None):
            raise _refusal(
                f"LoraConfig({name}=…) cannot be used on packed modules: it changes the base.",
                f"{name} left out",
                first,
                f"leave {name} out",
            )
    _check_targets(targeted, _expert_names(model))


def check_replication(model: nn.Module) -> None:
    """Refuses `layer_replication`, which copies layers and shares their parameters.

    Raises:
        SetupError: A module is packed, or rests on disk.
    """
    found = next((name for name, module in model.named_modules() if is_fixed(module)), None)
    if found is not None:
        raise _refusal(
            "LoraConfig(layer_replication=…) cannot be used with packed modules, or with modules on disk.",
            "dense modules in memory",
            found,
            "leave layer_replication out",
        )


def _check_bias(config: Any, fixed: dict[str, nn.Module]) -> None:
    """A bias that is part of a packed row, or rests on disk, is not trained."""
    asked = getattr(config, "bias", "none")
    for name, module in fixed.items():
        has_bias = (
            "bias" in module.infos
            if isinstance(module, QuantizedModule)
            else module._parameters.get("bias") is not None
        )
        if asked != "none" and has_bias and (asked == "all" or check_target_module_exists(config, name)):
            raise _refusal(
                f"bias={asked!r} would train the bias of {name}, which is never rewritten.",
                "bias='none'",
                repr(asked),
                "leave bias as it is; lora_bias=True gives the adapter a bias of its own",
            )


def _check_targets(targeted: dict[str, nn.Module], experts: Iterable[str]) -> None:
    outer = tuple(f"{name}." for name in experts)
    for name, module in targeted.items():
        if name.startswith(outer):
            raise _refusal(
                "LoRA on the experts of a packed mixture is not supported.",
                "layers outside of experts",
                name,
                "leave experts out: target the attention layers, or pass exclude_modules",
            )
        is_lora = isinstance(module, (QuantizedModule, nn.Linear, nn.Embedding, Conv1D))
        if not is_lora or name.endswith(f".{WEIGHT}"):
            raise _refusal(
                f"LoRA on {name} is not supported where its weight is packed alone, or rests on disk.",
                "a linear layer or an embedding",
                type(module).__name__,
                "leave it out of target_modules",
            )


def _check_whole(config: Any, model: Any, fixed: dict[str, nn.Module]) -> None:
    """Modules that are trained whole: as copies, or some rows of them."""
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
                    f"{name} cannot be trained whole: its weight is packed, or rests on disk.",
                    "a dense module in memory",
                    inner,
                    "leave it out of modules_to_save and trainable_token_indices and target it with LoRA; "
                    "or, if it is dense, give it "
                    "a home in memory",
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
                    f"target_parameters names {asked!r}, which is packed, or rests on disk (of a mixture, "
                    f"PEFT itself puts experts "
                    'and routers there for target_modules="all-linear").',
                    "dense parameters in memory",
                    name,
                    "name the attention layers in target_modules: LoRA on packed experts is not supported",
                )


def _expert_names(model: nn.Module) -> Iterator[str]:
    return (_plain(name) for name, module in model.named_modules() if isinstance(module, QuantizedExperts))


def _head_of(model: Any, task_type: Any) -> nn.Module | None:
    """What PEFT leaves out of "all-linear" by convention: the output embeddings, or the head of a
    classifier.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None and str(getattr(task_type, "value", task_type)) == "SEQ_CLS":
        head = next((getattr(model, name) for name in SEQ_CLS_HEAD_NAMES if hasattr(model, name)), None)
    return head


def _names_of(wanted: nn.Module | None, model: nn.Module) -> list[str]:
    return [_plain(name) for name, module in model.named_modules() if module is wanted]


def _plain(name: str) -> str:
    """A module's name without the layers that adapters put around it."""
    return name.replace(".base_layer", "")


def _refusal(what: str, expected: str, found: str, fix: str) -> SetupError:
    return SetupError(f"{what} No adapter was added.", expected=expected, found=found, fix=fix)
