"""Formats that hfq recognizes but does not support, and the error for each of them."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from hfq.errors import FormatError
from hfq.formats.configs.compressed_tensors_config import format_of
from hfq.formats.configs.quark_config import float_codes, weight_specs
from hfq.tensor_spec import TensorInfo

__all__ = ["REFUSED", "Refusal", "UnsupportedFormatError", "refuse_unreadable", "refused"]


class UnsupportedFormatError(FormatError):
    """Error for a checkpoint in a format that hfq recognizes but does not support."""


class Refusal(NamedTuple):
    """An unsupported format.

    Attributes:
        sign: How hfq recognizes it.
        reason: Why hfq does not read it.
        fix: The remedy.
    """

    sign: str
    reason: str
    fix: str


_AGAIN = "Quantize the original model again in a format that `hfq formats` lists."
_PLAIN = f"Load it without HfqConfig. Or {_AGAIN[0].lower()}{_AGAIN[1:]}"
_AS_GPTQ = "Export the checkpoint again with checkpoint_format='gptq'."
_WRITER = "Its writer needs a GPU, so that no reader could be verified."
_ORDERED = "Its codes are in the order of a GPU kernel."
_LEGACY = "compressed-tensors no longer has its code."
REFUSED = {
    "GPTQ Marlin": Refusal("B and s", f"{_ORDERED} Current tools do not write it.", _AS_GPTQ),
    "marlin-24": Refusal("weight_packed, scale_packed, and meta", _LEGACY, _AGAIN),
    "sparse-24 / sparse-bitmask": Refusal("compressed and bitmask", _LEGACY, _AGAIN),
    "mxfp6-pack-quantized": Refusal(
        "its format in quantization_config",
        "No file was available to verify a reader.",
        "Export the checkpoint again in another format, such as mxfp8.",
    ),
    "bitblas": Refusal("checkpoint_format='bitblas'", _ORDERED, _AS_GPTQ),
    "AQLM": Refusal("codebooks and codes", f"Weights are sums of vectors of codebooks. {_WRITER}", _AGAIN),
    "VPTQ": Refusal("centroids and indices", f"Weights are vectors of codebooks. {_WRITER}", _AGAIN),
    "EXL2 / EXL3": Refusal(
        "q_weight and q_invperm, or trellis", f"EXL3 has codes of a trellis. {_WRITER}", _AGAIN
    ),
    "SpQR": Refusal("dense_weights and row_offsets", f"Outliers are in sparse rows. {_WRITER}", _AGAIN),
    "QuIP#": Refusal("Qidxs", f"Weights are vectors of a lattice, rotated. {_WRITER}", _AGAIN),
    "FP-Quant": Refusal(
        "quant_method='fp_quant'", "Its weights are rotated and require rotated activations.", _PLAIN
    ),
    "EETQ": Refusal("quant_method='eetq'", _ORDERED, _PLAIN),
    "Four Over Six": Refusal("quant_method='fouroversix'", _WRITER, _PLAIN),
    "HIGGS": Refusal(
        "quant_method='higgs'", "Its weights are rotated, in the order of the GPU kernel FLUTE.", _PLAIN
    ),
    "SINQ": Refusal(
        "quant_method='sinq'", "It has a scale for each column, and layer sizes in another file.", _PLAIN
    ),
    "QQQ": Refusal("quant_method='qqq'", _ORDERED, _AGAIN),
    "ComfyUI": Refusal(
        "comfy_quant, or scale_weight",
        "Its files are those of diffusion models, which transformers does not have.",
        "Load the original checkpoint of this model with transformers.",
    ),
    "Quark int2 / int3 / int8 in groups / MX": Refusal(
        "the dtype of weights in quark's config", "No file was available to verify a reader.", _PLAIN
    ),
}
"""All unsupported formats."""

_SIGNS: tuple[tuple[str, frozenset[str]], ...] = (
    ("GPTQ Marlin", frozenset({"B", "s"})),
    ("marlin-24", frozenset({"weight_packed", "scale_packed"})),
    ("marlin-24", frozenset({"B_24"})),
    ("sparse-24 / sparse-bitmask", frozenset({"compressed", "bitmask"})),
    ("AQLM", frozenset({"codebooks", "codes"})),
    ("VPTQ", frozenset({"centroids", "indices"})),
    ("EXL2 / EXL3", frozenset({"q_weight", "q_invperm"})),
    ("EXL2 / EXL3", frozenset({"trellis"})),
    ("SpQR", frozenset({"dense_weights", "row_offsets"})),
    ("QuIP#", frozenset({"Qidxs"})),
    ("ComfyUI", frozenset({"comfy_quant"})),
    ("ComfyUI", frozenset({"scale_weight"})),
)
_METHODS = {
    "fp_quant": "FP-Quant",
    "eetq": "EETQ",
    "fouroversix": "Four Over Six",
    "higgs": "HIGGS",
    "sinq": "SINQ",
    "qqq": "QQQ",
    "aqlm": "AQLM",
    "vptq": "VPTQ",
    "spqr": "SpQR",
    "exl2": "EXL2 / EXL3",
    "exl3": "EXL2 / EXL3",
    "quip": "QuIP#",
    "marlin": "GPTQ Marlin",
    "bitblas": "bitblas",
}
"""Methods that a config names. Their tensors may tell nothing, or another format may claim them."""

_FLOAT_CODES = ("fp4 e8m0", "fp4 e5m3", "fp4 fp8_e4m3", "fp6_e3m2 e8m0", "fp6_e2m3 e8m0")
"""What Quark packs in bytes and hfq reads, as `float_codes` names it."""

_LABELS = (("marlin", "GPTQ Marlin"), ("bitblas", "bitblas"))
_CT_LABELS = re.compile(r"marlin-24|sparse-24|sparse-bitmask|mxfp6")


def refuse_unreadable(modules: Mapping[str, Mapping[str, TensorInfo]], config: Mapping) -> None:
    """Raises an error if a module or the config is in a format of `REFUSED`.

    Raises:
        FormatError: Names the format, the first such tensor, and the fix.
    """
    label = config.get("checkpoint_format")
    for text, variant in _LABELS:
        if label == text and config.get("quant_method") in (None, "gptq"):
            raise refused(variant, "config.json", None, f"checkpoint_format={label!r}")
    method = config.get("quant_method")
    for module, tensors in modules.items():
        for variant, sign in _signs_of(tensors, method):
            info = tensors[min(sign)]
            raise refused(
                variant,
                info.range.file,
                info.name,
                ", ".join(f"{local} {tensors[local]}" for local in sorted(sign)),
            )
        if method == "quark" and "weight" in tensors:
            _refuse_quark(module, tensors["weight"], config)
        if method == "compressed-tensors" and "weight_packed" in tensors:
            found = _CT_LABELS.search(format_of(module, config))
            if found:
                variant = next((name for name in REFUSED if found[0] in name), found[0])
                raise refused(
                    variant,
                    tensors["weight_packed"].range.file,
                    tensors["weight_packed"].name,
                    f"format={found[0]!r}",
                )
    if isinstance(method, str) and method in _METHODS:
        raise refused(_METHODS[method], "config.json", None, f"quant_method={method!r}")


def _refuse_quark(module: str, codes: TensorInfo, config: Mapping) -> None:
    named = float_codes(module, config)
    is_grouped = any(spec.get("qscheme") == "per_group" for spec in weight_specs(module, config))
    if (codes.dtype == "I8" and is_grouped) or (codes.dtype == "U8" and named not in _FLOAT_CODES):
        variant = "Quark int2 / int3 / int8 in groups / MX"
        raise refused(variant, codes.range.file, codes.name, f"{codes} of dtype {named}")


def _signs_of(tensors: Mapping[str, TensorInfo], method: object) -> Iterator[tuple[str, Collection[str]]]:
    """Yields (format, names of the tensors that tell it) for a module in a format of `REFUSED`."""
    yield from ((variant, sign) for variant, sign in _SIGNS if sign <= tensors.keys())


def refused(variant: str, file: str, tensor: str | None, found: str) -> UnsupportedFormatError:
    """Returns the error for a checkpoint in a format of `REFUSED`."""
    return UnsupportedFormatError(
        f"Format {variant} is not supported. Nothing was loaded.",
        file=file,
        tensor=tensor,
        expected="a format that `hfq formats` lists",
        found=found,
        problems=[REFUSED[variant].reason],
        fix=REFUSED[variant].fix,
    )
