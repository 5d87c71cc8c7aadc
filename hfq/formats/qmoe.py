"""QMoE: ternary weights in codes for sequences of them, below one bit per weight.

    w_comp      I16 [codes]       unsigned codes of a dictionary, row after row
    row_off     I32 [out + 1]     where each row starts in w_comp; the last one is the number of codes
    ter_minmax  BF16 [2 * out]    the minimum and maximum of each row

    W[n, k] = (0, minimum[n], maximum[n])[symbol[n, k]]

A code stands for 2 to 28 columns of a row, see `hfq.formats.codecs.pair_dictionary`. So the number of codes
depends on the weights, and layers of one size have tensors of different sizes.

Source: `sub1.py` of QMoE. Names are those of its pickled files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hfq.errors import FormatError
from hfq.formats.base import FLOATS, Format, FormatVariant
from hfq.formats.codecs.pair_dictionary import ENTRIES, LONGEST, ZERO_PROBABILITY, decode_rows, encode_rows
from hfq.formats.codecs.value_checks import check_finite
from hfq.formats.configs.compressed_tensors_config import unusable
from hfq.tensor_spec import TensorInfo, TensorSpec

__all__ = ["DICTIONARY", "Qmoe", "nearest_symbols", "row_bounds", "wrong_width"]

DICTIONARY = {"p0": ZERO_PROBABILITY, "entries": ENTRIES, "max_pairs": LONGEST}
"""The parameters of the only dictionary, as a config may state them."""


_AGAIN = "Download the checkpoint again. If the error remains, report it to the checkpoint's author."


def wrong_width(start: int, rows: int, columns: int) -> FormatError:
    """Returns the error for rows whose codes do not have this many columns."""
    return FormatError(
        "The codes of a QMoE row are not those of the row's width.",
        tensor="w_comp",
        expected=f"codes of {columns} columns in each of the rows {start} to {start + rows - 1}",
        found="a row with more or fewer columns",
        fix=_AGAIN,
    )


@dataclass(frozen=True)
class Qmoe(Format):
    """QMoE; see the module docstring.

    Attributes:
        codes: The number of codes of the layer.
        size: (out, in) of the layer.
    """

    name = "qmoe"
    resolves_each_value = True
    has_fixed_size = False
    variants = (
        FormatVariant(
            "QMoE (ternary, below one bit)",
            "hfq",
            "w_comp I16, row_off I32, ter_minmax",
            ("qmoe",),
            ("qmoe-sub1",),
            is_emitted=True,
        ),
    )
    codes: int = 0
    size: tuple[int, int] = (0, 0)

    @classmethod
    def detect(cls, module: str, tensors: Mapping[str, TensorInfo], config: Mapping) -> Qmoe | None:
        codes = tensors.get("w_comp")
        if codes is None and "ter_minmax" not in tensors:
            return None
        stated = config.get("dictionary")
        if stated is not None and stated != DICTIONARY:
            raise unusable("dictionary", stated, str(DICTIONARY))
        return cls(codes=codes.numel if codes is not None else 0)

    def sized(self, in_features: int, out_features: int) -> Qmoe:
        """Returns this format with the layer's size, which the number of codes must allow."""
        found = dataclasses.replace(self, size=(out_features, in_features))
        least, most = (out_features * count for count in found._codes_per_row)
        if self.codes and not least <= self.codes <= most:
            raise FormatError(
                "The number of QMoE codes does not fit the size of the layer.",
                expected=f"{least} to {most} codes for {out_features} rows of {in_features} weights",
                found=f"{self.codes} codes",
                fix="Restore the original config.json of the checkpoint.",
            )
        return found

    @property
    def _codes_per_row(self) -> tuple[int, int]:
        """The least and the greatest number of codes of a row."""
        pairs = -(-self.size[1] // 2)
        return -(-pairs // LONGEST), pairs

    def tensor_specs(self, in_features: int, out_features: int) -> tuple[TensorSpec, ...]:
        return (
            TensorSpec("w_comp", ("I16",), (self.codes,), "codes"),
            TensorSpec("row_off", ("I32",), (out_features + 1,), "index", bound=self.codes + 1),
            TensorSpec("ter_minmax", ("BF16",), (2 * out_features,), "scale"),
            TensorSpec("bias", FLOATS, (out_features,), "bias", optional=True),
        )

    @property
    def codes_name(self) -> str:
        return "w_comp"

    @property
    def bits_per_code(self) -> float:
        return 0

    def shape(self, tensors: Mapping[str, torch.Tensor]) -> tuple[int, int]:
        return self.size

    def describe(self) -> str:
        return "qmoe ternary"

    def resolve(self, module: str, tensors: Mapping[str, torch.Tensor]) -> Qmoe:
        check_finite(module, "ter_minmax", tensors["ter_minmax"])
        offsets = tensors["row_off"].to(torch.int64)
        counts, (least, most) = offsets.diff(), self._codes_per_row
        is_whole = (offsets[..., 0] == 0).all() & (offsets[..., -1] == self.codes).all()
        if not bool(is_whole & (counts >= least).all() & (counts <= most).all()):
            raise FormatError(
                "The offsets of QMoE rows are not possible. Nothing was loaded.",
                tensor=f"{module}.row_off",
                expected=f"offsets from 0 to {self.codes}, with {least} to {most} codes in each row",
                found=f"{int(offsets[..., 0].min())} to {int(offsets[..., -1].max())}, with "
                f"{int(counts.min())} to {int(counts.max())} codes in a row",
                fix=_AGAIN,
            )
        return self

    def dequantize_into(self, panel: torch.Tensor, tensors: Mapping[str, torch.Tensor], start: int) -> None:
        rows, columns = panel.shape
        offsets = tensors["row_off"][start : start + rows + 1].to(torch.int64)
        codes = tensors["w_comp"][int(offsets[0]) : int(offsets[-1])]
        symbols = decode_rows(codes, offsets - offsets[0], columns)
        if symbols is None:
            raise wrong_width(start, rows, columns)
        values = torch.zeros(rows, 3, dtype=torch.float32, device=panel.device)
        values[:, 1:] = tensors["ter_minmax"].view(-1, 2)[start : start + rows]
        torch.gather(values, 1, symbols.to(torch.int64), out=panel)

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        weight = weight.detach().to(torch.float32)
        bounds = row_bounds(weight)
        low, high = bounds.to(torch.float32).unsqueeze(2).unbind(1)
        return self.pack(nearest_symbols(weight, low, high), bounds)

    def pack(self, symbols: torch.Tensor, bounds: torch.Tensor) -> dict[str, torch.Tensor]:
        """Returns the tensors of a layer.

        Args:
            symbols: uint8 [out, in]: 0, 1 for the minimum of the row, or 2 for its maximum.
            bounds: [out, 2], the minimum and maximum of each row.
        """
        codes, offsets = encode_rows(symbols)
        return {"w_comp": codes, "row_off": offsets, "ter_minmax": bounds.to(torch.bfloat16).flatten()}


def row_bounds(weight: torch.Tensor) -> torch.Tensor:
    """Returns the least and the greatest number of each row and 0, bfloat16 [out, 2]."""
    return torch.stack((weight.amin(1).clamp(max=0), weight.amax(1).clamp(min=0)), 1).to(torch.bfloat16)


def nearest_symbols(values: torch.Tensor, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Returns the symbol of the nearest of 0, `low`, and `high` for each value, uint8."""
    symbols = 2 * (values > high / 2).to(torch.uint8)
    return symbols + (values < low / 2)
