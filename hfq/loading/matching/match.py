"""Match of a meta model with the tensors of a checkpoint, from headers alone.

Every stored tensor gets one parameter, or one error lists all problems.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from transformers import PreTrainedModel

from hfq.checkpoint import Checkpoint
from hfq.errors import FormatError, nearest
from hfq.formats import (
    Format,
    NotQuantizedFormatError,
    Unquantized,
    UnquantizedError,
    detect_formats,
    tensors_by_module,
)
from hfq.formats.configs.source_config import detection_hints, halves_experts
from hfq.loading.matching.renaming import Names, owner_of
from hfq.loading.matching.target_modules import (
    HALVES,
    WEIGHT,
    FusedExperts,
    QuantizedModuleMatch,
    TargetModule,
    expert_of,
    find_experts,
    half_of,
    target_module_of,
)
from hfq.loading.matching.tied_weights import shared_heads
from hfq.tensor_spec import DTYPE_BITS, TensorInfo

__all__ = ["CheckpointMatch", "QuantizedModuleMatch", "match_model"]

_CACHE_SCALES = re.compile(
    r"\.(kv_scale|(k|v|q|prob|prob_output)_(scale|zero_point|global_scale)|(k|v)_(bias|cache_scale))$"
)
_FLOAT_DTYPES = ("F16", "BF16", "F32", "F64")
_UNQUANTIZED = Unquantized()


@dataclass
class CheckpointMatch:
    """Stored tensors of the quantized modules and the unquantized parameters of a model.

    Attributes:
        quantized: Quantized modules, keyed by the name in the model.
        unquantized: Stored tensor of each unquantized parameter, keyed by the name in the model.
        merged: Unquantized parameters that transformers merges from several stored tensors, with their names.
        experts: Fused experts that the checkpoint stores separately.
        halved: Linear layers that the checkpoint stores as two layers.
        resized: Stored tensors of parameters that are initialized, since their shapes differ.
        unused: Stored tensors that match no parameter.
        kept: Unused tensors that a save writes back, such as the scales of a quantized KV cache, and layers
            that predict further tokens.
        predicting: Those of `kept` that belong to such layers.
        problems: Mismatches, one line each.
    """

    quantized: dict[str, QuantizedModuleMatch] = field(default_factory=dict)
    unquantized: dict[str, TensorInfo] = field(default_factory=dict)
    merged: dict[str, list[str]] = field(default_factory=dict)
    experts: dict[str, FusedExperts] = field(default_factory=dict)
    halved: set[str] = field(default_factory=set)
    resized: dict[str, TensorInfo] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    kept: list[str] = field(default_factory=list)
    predicting: set[str] = field(default_factory=set)
    problems: list[str] = field(default_factory=list)

    def hint(self, name: str, names: Iterable[str]) -> str:
        """Returns the nearest name as a sentence, or "" after the first 20 problems.

        The search is slow, and only the first problems are shown.
        """
        return nearest(name, names) if len(self.problems) < 20 else ""

    def holds(self, name: str) -> bool:
        """Returns True if a parameter of the meta model is stored, quantized or not."""
        return name in self.unquantized or self.is_quantized(name)

    def is_quantized(self, name: str) -> bool:
        """Returns True if a parameter of the meta model is stored quantized."""
        module, _, local = name.rpartition(".")
        is_weight = local == "weight" and f"{module}.{WEIGHT}" in self.quantized
        expert = expert_of(module)
        if expert is not None and expert[0] in self.experts:
            return True
        return module in self.quantized or module in self.experts or module in self.halved or is_weight


def match_model(
    model: PreTrainedModel,
    checkpoint: Checkpoint,
    source: Mapping,
    names: Names | None = None,
    ignores_sizes: bool = False,
    is_part: bool = False,
) -> CheckpointMatch:
    """Pairs every stored tensor with a parameter of the model.

    Args:
        model: The meta model, before any module is replaced.
        checkpoint: The validated checkpoint.
        source: Its `quantization_config`.
        names: Names of the stored tensors in the model; None for transformers' own renamings.
        ignores_sizes: True if transformers initializes unquantized parameters whose stored tensor has another
            shape.
        is_part: True if the tensors are a part of a quantized checkpoint, which may be unquantized.

    Raises:
        FormatError: Lists every tensor that is missing, unexpected, or has a wrong dtype or shape.
    """
    modules, names = tensors_by_module(checkpoint.tensors), names or Names(model)
    hints = detection_hints(checkpoint, source)
    hints["__metadata__"] = _by_stored_names(hints["__metadata__"], modules, names)
    try:
        formats = detect_formats(modules, hints)
    except NotQuantizedFormatError as error:
        # an unquantized model is placed and offloaded in the same way
        if not is_part and not isinstance(error, UnquantizedError):
            raise
        formats = {}
    matcher = _Matcher(model, names, formats, halves_experts(hints), ignores_sizes)
    for module, tensors in modules.items():
        matcher.add(module, tensors)
    match = matcher.match
    matcher.find_missing_layers()
    matcher.find_doubles()
    match.quantized |= shared_heads(model, match.quantized, match.unquantized)
    _check_ties(match, model)
    _find_missing(match, model, matcher.parameters, checkpoint.config.get("architectures"))
    if match.problems:
        unused = ", ".join(match.unused[:8])
        raise FormatError(
            f"The checkpoint does not match {type(model).__name__}. Nothing was loaded.",
            file=checkpoint.root,
            problems=match.problems,
            found=f"tensors without a parameter: {unused}" if unused else None,
            fix="Download the checkpoint again, or load it with the class and config that it was saved with.",
        )
    return match


def _by_stored_names(metadata: Mapping[str, str], modules: Iterable[str], names: Names) -> dict[str, str]:
    """Returns the file metadata with weights under their stored names.

    The metadata of torchao may use the names in the model instead.
    """
    entries = {name: text for name, text in metadata.items() if name.endswith(".weight")}
    stored = [f"{module}.weight" for module in modules] if entries else []
    found = {name: entries.get(names.in_model(name)[0]) for name in stored if name not in entries}
    return {**metadata, **{name: text for name, text in found.items() if text is not None}}


class _Matcher:
    """Matches stored modules one by one."""

    def __init__(
        self,
        model: PreTrainedModel,
        names: Names,
        formats: Mapping[str, Format],
        has_halves: bool,
        ignores_sizes: bool = False,
    ) -> None:
        self.match = CheckpointMatch()
        self._compared: dict[tuple, tuple[Format, list[str]]] = {}
        self._names = names
        self._formats, self._ignores_sizes = formats, ignores_sizes
        self._submodules, self.parameters = dict(model.named_modules()), dict(model.state_dict())
        self._experts = find_experts(self._submodules)
        if has_halves:
            self._experts = {
                name: replace(experts, is_halved=experts.is_interleaved)
                for name, experts in self._experts.items()
            }

    def add(self, module: str, tensors: Mapping[str, TensorInfo]) -> None:
        found, expert = self._formats.get(module), expert_of(module)
        experts = self._experts.get(self._names.experts(expert[0])) if expert else None
        if expert and experts:
            self._add_expert(module, experts, expert[1], expert[2], found or _UNQUANTIZED, tensors)
        elif half := self._half(module):
            self.match.halved.add(half.name.rpartition(".")[0])
            self._place(module, half, found or _UNQUANTIZED, tensors)
        elif found:
            self._add_packed(module, found, tensors)
        else:
            self._add_unquantized(tensors)

    def find_missing_layers(self) -> None:
        """Adds a problem for each missing projection of separate experts, and for each missing half."""
        for name in self.match.halved:
            halves = (f"{name}.{local}" for local in HALVES)
            self.match.problems += [f"{half}: missing" for half in halves if half not in self.match.quantized]
            if name in self.match.quantized:
                self.match.problems.append(f"{name}: unexpected next to its halves")
        quantized = self.match.quantized
        for name, experts in self.match.experts.items():
            for expert in range(experts.count):
                path = f"{name}.{expert}"
                is_fused = f"{path}.gate_up_proj" in quantized
                for projection in experts.projections(is_fused):
                    if f"{path}.{projection}" not in quantized:
                        self.match.problems.append(f"{path}.{projection}: missing")
                for projection in ("gate_proj", "up_proj") if is_fused else ():
                    if f"{path}.{projection}" in quantized:
                        self.match.problems.append(f"{path}.{projection}: unexpected next to gate_up_proj")

    def find_doubles(self) -> None:
        """Adds a problem for each parameter that is stored both quantized and unquantized."""
        for name, info in self.match.unquantized.items():
            if self.match.is_quantized(name):
                self.match.problems.append(
                    f"{info.name}: stored a second time, since {name.rpartition('.')[0]} is stored quantized"
                )

    def _half(self, module: str) -> TargetModule | None:
        """Returns the target of a stored layer that is half of a layer of the model, or None.

        gptqmodel 7.7 writes the fused layers of Phi-3 and GLM as halves.
        """
        owner, _, local = module.rpartition(".")
        if local not in HALVES:
            return None
        name, merged = self._names.in_model(f"{module}.weight")
        if merged or name.rpartition(".")[0] in self._submodules:
            return None
        fused = self._names.in_model(f"{owner}.gate_up_proj.weight".removeprefix("."))[0].rpartition(".")[0]
        return half_of(fused, self._submodules.get(fused), local)

    def _add_expert(
        self,
        module: str,
        experts: FusedExperts,
        expert: int,
        projection: str,
        found: Format,
        tensors: Mapping,
    ) -> None:
        if expert >= experts.count:
            self.match.problems.append(f"{module}: unexpected, {experts.name} has {experts.count} experts")
            return
        self.match.experts[experts.name] = experts
        self._place(module, experts.target(expert, projection), found, tensors)

    def _add_packed(self, module: str, found: Format, tensors: Mapping[str, TensorInfo]) -> None:
        match, names = self.match, self._names
        weight, merged = names.in_model(f"{module}.weight")
        name = weight.rpartition(".")[0]
        target = self._submodules.get(name)
        if target is None and names.is_ignored(f"{module}.weight"):
            for info in tensors.values():
                self._leave(info)
        elif merged or (target is None and names.is_within(name, self._submodules)):
            match.problems.append(
                f"{module}: quantized as {found.describe()}, but "
                f"{owner_of(name, self._submodules)} has no such layer"
            )
        elif target is None:
            match.unused += [info.name for info in tensors.values()]
        else:
            target_module = target_module_of(name, target)
            if target_module is None:
                kind = type(target).__name__
                match.problems.append(
                    f"{module}: quantized as {found.describe()}, but the model has a {kind}, which hfq "
                    f"does not quantize"
                )
            else:
                own = {
                    local: info
                    for local, info in tensors.items()
                    if target_module.kind == "weight" and f"{name}.{local}" in self.parameters
                }
                own.pop("weight", None)
                self._add_unquantized(own)
                self._place(
                    module,
                    target_module,
                    found,
                    {local: info for local, info in tensors.items() if local not in own},
                )

    def _place(
        self, module: str, target_module: TargetModule, found: Format, tensors: Mapping[str, TensorInfo]
    ) -> None:
        """Matches a stored module with its target module, and lists the mismatches."""
        match = self.match
        if target_module.name in match.quantized:
            match.problems.append(f"{module}: stored a second time, as {target_module.name}")
            return
        kind = (
            *(id(found), target_module.in_features, target_module.out_features, target_module.has_bias),
            *((local, info.dtype, info.shape) for local, info in tensors.items()),
        )
        compared = self._compared.get(kind)
        if compared is None:
            before = len(match.problems), len(match.kept)
            compared = self._compare(module, target_module, found, tensors)
            if compared is None:
                return
            if before == (len(match.problems), len(match.kept)):
                self._compared[kind] = compared
        sized, names = compared
        match.quantized[target_module.name] = QuantizedModuleMatch(
            target_module, sized, {local: tensors[local] for local in names}
        )

    def _compare(
        self, module: str, target_module: TargetModule, found: Format, tensors: Mapping[str, TensorInfo]
    ) -> tuple[Format, list[str]] | None:
        """Compares tensors with the specs of their format, and lists the mismatches.

        Returns:
            The format with the layer's size, and the names of its tensors; None if it has another size.
        """
        match = self.match
        try:
            found = found.sized(target_module.in_features, target_module.out_features)
            specs = {
                spec.name: spec
                for spec in found.tensor_specs(target_module.in_features, target_module.out_features)
            }
        except FormatError as error:
            match.problems.append(f"{module}: {error.message} Expected {error.expected}, found {error.found}")
            return None
        for spec in specs.values():
            info = tensors.get(spec.name)
            if info is None and (not spec.optional or (spec.role == "bias" and target_module.has_bias)):
                match.problems.append(
                    f"{module}.{spec.name}: missing, expected {spec}.{match.hint(spec.name, tensors)}"
                )
            elif info is not None and (info.dtype not in spec.dtypes or info.shape != spec.shape):
                match.problems.append(f"{info.name}: expected {spec}, found {info}")
        for local, info in tensors.items():
            if _CACHE_SCALES.search(info.name):
                match.kept.append(info.name)
            elif local not in specs:
                match.problems.append(
                    f"{info.name}: unexpected in a {found.describe()} layer.{match.hint(local, specs)}"
                )
        return found, [local for local in specs if local in tensors]

    def _leave(self, info: TensorInfo) -> None:
        """Adds a tensor that has no place in the model; those that predict further tokens are kept."""
        name = info.part_of or info.name
        if not self._names.is_predicting(info.name):
            self.match.unused.append(name)
        elif name not in self.match.predicting:  # the slices of fused experts are one tensor
            self.match.kept.append(name)
            self.match.predicting.add(name)

    def _add_unquantized(self, tensors: Mapping[str, TensorInfo]) -> None:
        match, names = self.match, self._names
        for info in tensors.values():
            name, merged = names.in_model(info.name)
            place = self.parameters.get(name)
            if place is None and _CACHE_SCALES.search(name):
                match.kept.append(info.name)
                continue
            if place is None:
                self._leave(info)
                if names.is_within(name, self._submodules) and not names.is_ignored(info.name):
                    match.problems.append(f"{info.name}: unexpected.{match.hint(name, self.parameters)}")
                continue
            is_resized = not merged and tuple(place.shape) != info.shape
            if is_resized and self._ignores_sizes and info.dtype in _FLOAT_DTYPES:
                match.resized[name] = info
                continue
            if name in match.unquantized and not merged:
                match.problems.append(
                    f"{info.name}: stored a second time, in addition to {match.unquantized[name].name}"
                )
            match.unquantized[name] = info
            if merged:
                match.merged.setdefault(name, []).append(info.name)
            is_float = place.is_floating_point()
            if is_float and info.dtype not in _FLOAT_DTYPES:
                match.problems.append(
                    f"{info.name}: expected a float weight, found {info} of no known format"
                )
            elif not is_float and DTYPE_BITS[info.dtype] != place.element_size() * 8:
                match.problems.append(f"{info.name}: expected {place.dtype}, found {info}")
            elif is_resized:
                match.problems.append(f"{info.name}: expected {list(place.shape)}, found {info}")


def _check_ties(match: CheckpointMatch, model: PreTrainedModel) -> None:
    for target, source in model.all_tied_weights_keys.items():
        for name in (target, source):
            if name.rpartition(".")[0] in match.quantized:
                match.problems.append(
                    f"{name}: stored quantized, but the config ties {target} to {source} (set "
                    f"tie_word_embeddings to false)"
                )


def _find_missing(
    match: CheckpointMatch,
    model: PreTrainedModel,
    parameters: Mapping[str, torch.Tensor],
    architectures: Sequence[str] | None,
) -> None:
    """Adds a problem for each tensor of the model that is not stored.

    Ties, the exceptions of the model class, and a new head may be missing.
    """
    ties = model.all_tied_weights_keys
    groups = [
        {source, *(name for name, other in ties.items() if other == source)} for source in set(ties.values())
    ]
    known = match.unquantized.keys() | match.resized.keys()
    tied = {name for group in groups if group & known for name in group}
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    prefix = f"{model.base_model_prefix}."
    is_other_class = type(model).__name__ not in (architectures or ())
    is_new_head = is_other_class and any(name.startswith(prefix) for name in parameters)
    stored_parts = {name.partition(".")[0] for name in (*match.unquantized, *match.quantized)}
    for name, place in parameters.items():
        if match.holds(name) or name in known or name in tied:
            continue
        if any(pattern.search(name) for pattern in ignored):
            continue
        part = name.partition(".")[0]
        if is_new_head and not name.startswith(prefix) and part not in stored_parts and part != "lm_head":
            continue
        match.problems.append(f"{name}: missing, expected float {list(place.shape)}")
