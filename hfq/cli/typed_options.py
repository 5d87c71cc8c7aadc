"""Values of options that several verbs share, with errors that name the option as typed."""

from __future__ import annotations

from typing import Any

__all__ = ["check_dtype", "parse_device_map"]


def parse_device_map(text: str, option: str = "--device-map") -> Any:
    """Returns the `device_map` of an option.

    Raises:
        SetupError: The text is no device map.
    """
    from hfq.evaluation.placed_models import as_device_map

    return as_device_map(text, option)


def check_dtype(dtype: str) -> str:
    """Returns the value of `--dtype`.

    Raises:
        SetupError: hfq does not know the dtype.
    """
    from hfq.errors import SetupError, nearest
    from hfq.evaluation.placed_models import DTYPES

    names = ("auto", *DTYPES)
    if dtype not in names:
        raise SetupError(
            f"--dtype {dtype} is not valid.{nearest(dtype, names)}",
            expected=", ".join(names),
            found=dtype,
            fix="Pass --dtype auto, or another of these.",
        )
    return dtype
