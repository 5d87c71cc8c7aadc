"""Arguments that request tensor parallelism, and slices of quantized layers on a rank.

The plan is the model's own (`base_model_tp_plan`), with the rules of the user. Its styles give the axis of a
cut. The steps before and after the forward pass of a layer (all-reduce, gather) are hooks of transformers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from transformers.utils import logging

from hfq.errors import PlacementError, SetupError, raise_first
from hfq.loading.ranks import is_zero3
from hfq.modules.embedding import QuantizedEmbedding
from hfq.modules.linear import QuantizedLinear
from hfq.placement.tensor_parallel import rank_slice
from hfq.tensor_spec import LayerSlice

if TYPE_CHECKING:
    from hfq.loading.matching.match import CheckpointMatch
    from hfq.loading.state import LoadState

__all__ = [
    "ARGUMENTS",
    "asks_for_ranks",
    "check_alone",
    "check_distributed",
    "find_slices",
    "generic",
    "model_rules",
    "joining",
    "noting_meshes",
    "passed_rules",
    "tensor_parallel_size",
]

logger = logging.get_logger("hfq")

ARGUMENTS = ("tp_plan", "tp_size", "distributed_config")
_OTHER_SIZES = ("fsdp_size", "dp_replicate_size", "pp_size", "ep_size")
_AXES = {
    "colwise": "out",
    "colwise_rep": "out",
    "colwise_gather_output": "out",
    "rowwise": "in",
    "rowwise_rep": "in",
    "rowwise_split_input": "in",
}
_WHOLE = ("replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj")
"""Styles of layers that every rank holds completely."""
_EXPERTS = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
_has_meshes: ContextVar[bool] = ContextVar("hfq_has_meshes", default=False)
_HEADS = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads", "v_proj": "num_key_value_heads"}


def asks_for_ranks(kwargs: Mapping[str, Any]) -> bool:
    """Returns True if the arguments of `from_pretrained` request tensor parallelism."""
    return any(kwargs.get(name) is not None for name in ARGUMENTS)


def noting_meshes(original: Callable) -> Callable:
    """Wraps `PreTrainedModel.prepare_distribute_model` to record its calls for `joining`.

    The wrapped function creates the process group and the meshes of a load.
    """

    @functools.wraps(original)
    def prepare_distribute_model(cls: type, *args: Any, **kwargs: Any) -> Any:
        made = original(cls, *args, **kwargs)
        _has_meshes.set(True)
        return made

    return prepare_distribute_model


def joining(kwargs: Mapping[str, Any]) -> Callable[[], None]:
    """Starts a load with these arguments, and returns a function for a rank that fails early.

    The function creates the meshes if transformers has not created them.
    """
    _has_meshes.set(False)

    def join() -> None:
        if _has_meshes.get():
            return
        from transformers import PreTrainedModel
        from transformers.distributed import DistributedConfig

        config = kwargs.get("distributed_config")
        if config is None:
            config = DistributedConfig(tp_plan=kwargs.get("tp_plan"), tp_size=kwargs.get("tp_size"))
        PreTrainedModel.prepare_distribute_model(config)

    return join


def check_distributed(kwargs: Mapping[str, Any], cpu_memory: str) -> None:
    """Checks for options that tensor parallelism excludes, before anything is opened.

    Raises:
        SetupError: Names the argument.
    """
    if kwargs.get("ignore_mismatched_sizes") and (asks_for_ranks(kwargs) or is_zero3()):
        raise SetupError(
            "from_pretrained(ignore_mismatched_sizes=True) does not support several ranks. Nothing was "
            "loaded.",
            expected="one process, without ZeRO-3 and tp_plan",
            found="ignore_mismatched_sizes",
            fix="Load and save the model in one process first, then load the saved model.",
        )
    if not asks_for_ranks(kwargs):
        return
    asked = next(name for name in ARGUMENTS if kwargs.get(name) is not None)
    plan = kwargs.get("tp_plan")
    if plan is not None and plan != "auto" and not isinstance(plan, dict):
        raise SetupError(
            "from_pretrained(tp_plan=…) requires a plan. Nothing was loaded.",
            expected='"auto", or {layer: style}',
            found=repr(plan)[:80],
            fix='Pass "auto".',
        )
    config = kwargs.get("distributed_config")
    get = config.get if isinstance(config, Mapping) else lambda name: getattr(config, name, None)
    others = [name for name in _OTHER_SIZES if (get(name) or 1) != 1]
    problems = {
        f"{', '.join(others)} of distributed_config": (
            bool(others),
            "Set only tp_size. hfq cuts quantized layers along no other axis.",
        ),
        "enable_expert_parallel": (
            bool(get("enable_expert_parallel")),
            "Leave it out. hfq cuts experts in the same way as other layers.",
        ),
        "device_map": (kwargs.get("device_map") is not None, f"Leave out device_map or {asked}."),
        "an active ZeRO-3 config": (is_zero3(), f"Leave {asked} out. ZeRO-3 shards the model itself."),
        f'HfqConfig(cpu_memory="{cpu_memory}")': (
            cpu_memory in ("mmap", "shared"),
            'Pass cpu_memory="auto". Each rank reads its slices into its own memory.',
        ),
        "transformers without transformers.distributed": (
            not _knows_ranks(),
            "Run pip install 'transformers>=5.23'",
        ),
    }
    raise_first(
        SetupError(
            f"from_pretrained({asked}=…) cannot be used with HfqConfig and {what}. Nothing was loaded.",
            found=what,
            expected="only tensor parallelism",
            fix=fix,
        )
        for what, (is_so, fix) in problems.items()
        if is_so
    )


def check_alone() -> None:
    """Checks that ZeRO-3 is not active in a tensor-parallel load.

    Raises:
        SetupError: A DeepSpeed config of stage 3 is active.
    """
    if is_zero3():
        raise SetupError(
            "Tensor parallelism cannot be used while a ZeRO-3 config is active. Nothing was loaded.",
            expected="tensor parallelism or ZeRO-3",
            found="both",
            fix="Leave tp_plan out. ZeRO-3 shards the model itself.",
        )


def _knows_ranks() -> bool:
    """Returns True if transformers has the meshes of version 5.23 in `transformers.distributed`.

    hfq does not support those of older versions.
    """
    try:
        from transformers.distributed import mixin
    except ImportError:
        return False
    return hasattr(mixin, "apply_tensor_parallelism")


def tensor_parallel_size(model: Any) -> int:
    """Returns the number of ranks that share the model being loaded; 1 if none do."""
    # an object while a load sets it, a dict when read from a file
    config = getattr(model.config, "distributed_config", None)
    size = getattr(config, "tp_size", None)
    if size == 1:
        logger.warning("hfq: tp_plan has no effect with one rank; start several ranks with torchrun")
    return size if isinstance(size, int) else 1


def passed_rules(model: Any) -> dict[str, str]:
    """Returns the rules that the user adds to the model's own plan."""
    passed = getattr(model.config.distributed_config, "tp_plan", None)
    return passed if isinstance(passed, dict) else {}


def model_rules(loading: LoadState) -> dict[str, str]:
    """Returns the rules of the model's own plan, but those that cut quantized embeddings.

    Each rank holds such an embedding whole, since a lookup is no sum over ranks.
    """
    whole = {
        generic(name) for name, module in loading.quantized.items() if isinstance(module, QuantizedEmbedding)
    }
    return {name: style for name, style in loading.model.tp_plan.items() if name not in whole}


def generic(name: str) -> str:
    """Returns a name as rules write it, with `*` for layer numbers."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def find_slices(loading: LoadState, rank: int, world: int) -> dict[str, LayerSlice]:
    """Returns a rank's slice of each quantized layer that is cut, by the name of the layer.

    Raises:
        PlacementError: A rule requires a cut that hfq cannot make; names the layer and the rule.
    """
    model, found = loading.model, {}
    plan = {**model_rules(loading), **passed_rules(model)}
    _check_rules(plan, loading)
    for name, module in loading.quantized.items():
        target = loading.match.quantized[name].target
        axis = (
            _expert_axis(name, plan, loading.match)
            if target.kind == "expert"
            else _axis(name, module, plan, target.kind)
        )
        if axis is None:
            continue
        _check_heads(name, plan.get(generic(name)), model.config.get_text_config(decoder=True), world)
        size = target.out_features if axis == "out" else target.in_features
        part = rank_slice(axis, size, rank, world)
        if part is None or rank_slice(axis, size, world - 1, world) is None:  # fails on all ranks or none
            raise _uncuttable(name, f"{size} {axis}put features", f"at least one for each of {world} ranks")
        if axis == "in" and isinstance(module, QuantizedLinear):
            _check_scheme(module, part)
        found[name] = part
    return found


def _axis(name: str, module: Any, plan: Mapping[str, str], kind: str) -> str | None:
    owner = name.rpartition(".")[0] if kind in ("weight", "half") else name
    style = plan.get(generic(owner))
    if style is None or style in _WHOLE:
        return None
    if style not in _AXES or isinstance(module, QuantizedEmbedding) or owner != name:
        quantized = {"weight": "weight alone", "half": "half of it"}.get(kind, type(module).__name__)
        what = f"tp_plan's {style!r} for a quantized {quantized}"
        raise _uncuttable(
            owner, what, f"a quantized linear layer, and {', '.join(_AXES)} or {', '.join(_WHOLE)}"
        )
    return _AXES[style]


def _expert_axis(name: str, plan: Mapping[str, str], match: CheckpointMatch) -> str | None:
    """Returns the axis that the projections of an expert are cut along, or None.

    Gate and up projections are cut along the output, and down projections along the input. The experts module
    sums up the partial results.
    """
    experts, projection = name.rpartition(".")[0].rpartition(".")[0], name.rpartition(".")[2]
    styles = {local: plan.get(generic(f"{experts}.{local}")) for local in _EXPERTS}
    is_summed = plan.get(generic(experts)) == "moe_tp_experts"
    if not is_summed and not any(styles.values()):
        return None
    if not is_summed or styles != _EXPERTS or projection == "gate_up_proj":
        what = (
            "gate and up projections fused into one"
            if projection == "gate_up_proj"
            else f"tp_plan's {styles}"
        )
        raise _uncuttable(name, what, f"separately stored projections, and {_EXPERTS} with 'moe_tp_experts'")
    if match.experts[experts].is_halved:
        raise _uncuttable(name, "interleaved gate and up channels", "separate gate and up channels")
    return "in" if projection == "down_proj" else "out"


def _check_rules(plan: Mapping[str, str], loading: LoadState) -> None:
    for name in loading.quantized:
        for local in ("weight", "bias"):
            if f"{generic(name)}.{local}" in plan:
                raise _uncuttable(name, f"a rule for its {local}", "a rule for the layer")


def _check_heads(name: str, style: str | None, config: Any, world: int) -> None:
    """Checks that each rank holds whole heads, since attention reshapes its inputs by heads."""
    heads = getattr(config, _HEADS.get(name.rpartition(".")[2], ""), None)
    if style == "colwise" and isinstance(heads, int) and heads % world:
        raise _uncuttable(name, f"{heads} heads", f"a multiple of {world} ranks")


def _check_scheme(module: QuantizedLinear, part: LayerSlice) -> None:
    """Checks that activation scales can be computed from a slice of the input.

    A scale of a whole token cannot.
    """
    scheme = module.scheme
    is_local = scheme is None or scheme.scale_name is not None
    if scheme is not None and scheme.strategy == "group":
        is_local = part.is_aligned(scheme.group_size or part.size)
    if not is_local:
        raise SetupError(
            "HfqConfig(quantize_activations=True) does not support layers whose input is cut. Nothing "
            "was loaded.",
            tensor=module.name,
            expected="static scales, or uncut groups",
            found=f"scales for each {scheme.strategy}",  # type: ignore[union-attr]
            fix="Pass HfqConfig(quantize_activations=False).",
        )


def _uncuttable(name: str, found: str, expected: str) -> PlacementError:
    return PlacementError(
        "hfq cannot cut a quantized layer in the way that tp_plan requires. Nothing was loaded.",
        tensor=name,
        found=found,
        expected=expected,
        fix="Use another tp_size or tp_plan, or use device_map instead.",
    )
