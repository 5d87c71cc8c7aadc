"""Dialects that hfq knows by sight and does not read: each refused by its name, with what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping

from hfq.errors import FormatError
from hfq.formats.configs.compressed_tensors_config import format_of
from hfq.tensor_spec import TensorInfo

__all__ = ["REFUSED", "UnsupportedFormatError", "refuse_unreadable", "refused"]


class UnsupportedFormatError(FormatError):
    """The checkpoint is in a dialect that hfq knows by sight and does not read."""


_AGAIN = "quantize the original model again with one of the dialects in docs/reference/formats.md"
REFUSED = {
    "GPTQ Marlin": (
        "B beside s",
        "re-export the checkpoint with checkpoint_format='gptq': its tiles could not be verified",
    ),
    "marlin-24": ("weight_packed beside scale_packed and meta", _AGAIN),
    "sparse-24 / sparse-bitmask": ("compressed beside bitmask", _AGAIN),
    "mxfp6-pack-quantized": (
        "its format in quantization_config",
        "re-export the checkpoint with another format, as mxfp8",
    ),
    "bitblas": ("checkpoint_format='bitblas'", "re-export the checkpoint with checkpoint_format='gptq'"),
    "AQLM": ("codebooks beside codes", _AGAIN),
    "VPTQ": ("centroids beside indices", _AGAIN),
    "EXL2 / EXL3": ("q_weight beside q_invperm, or trellis", _AGAIN),
    "SpQR": ("dense_weights beside row_offsets", _AGAIN),
    "QuIP#": ("Qidxs", _AGAIN),
}
"""dialect → (how it is recognised, what to do)."""

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
)
_LABELS = (("marlin", "GPTQ Marlin"), ("bitblas", "bitblas"))
_CT_LABELS = re.compile(r"marlin-24|sparse-24|sparse-bitmask|mxfp6")


def refuse_unreadable(modules: Mapping[str, Mapping[str, TensorInfo]], config: Mapping) -> None:
    """Refuses a checkpoint in which a module, or the config, is of a dialect in `REFUSED`.

    Raises:
        FormatError: Names the dialect, the first such tensor, and what to do.
    """
    label = config.get("checkpoint_format")
    for text, variant in _LABELS:
        if label == text and config.get("quant_method") in (None, "gptq"):
            raise refused(variant, "config.json", None, f"checkpoint_format={label!r}")
    for module, tensors in modules.items():
        for variant, sign in _SIGNS:
            if sign <= tensors.keys():
                info = tensors[min(sign)]
                raise refused(
                    variant,
                    info.range.file,
                    info.name,
                    ", ".join(f"{local} {tensors[local]}" for local in sorted(sign)),
                )
        if config.get("quant_method") == "compressed-tensors" and "weight_packed" in tensors:
            found = _CT_LABELS.search(format_of(module, config))
            if found:
                variant = next((name for name in REFUSED if found[0] in name), found[0])
                raise refused(
                    variant,
                    tensors["weight_packed"].range.file,
                    tensors["weight_packed"].name,
                    f"format={found[0]!r}",
                )


def refused(variant: str, file: str, tensor: str | None, found: str) -> UnsupportedFormatError:
    """The error for a checkpoint in one of the dialects of `REFUSED`."""
    return UnsupportedFormatError(
        f"The checkpoint is in the dialect {variant}, which hfq does not read. Nothing was loaded.",
        file=file,
        tensor=tensor,
        expected="a dialect of docs/reference/formats.md",
        found=found,
        fix=REFUSED[variant][1],
    )
