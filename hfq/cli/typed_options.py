"""Values of options that several verbs share, with errors that name the option as typed."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from hfq.errors import HfqError

__all__ = ["as_typed", "check_dtype", "parse_device_map", "parse_max_memory"]


def parse_device_map(text: str, option: str = "--device-map") -> Any:
    """Returns the `device_map` of an option.

    Raises:
        SetupError: The text is no device map.
    """
    from hfq.evaluation.placed_models import as_device_map

    return as_device_map(text, option)


def parse_max_memory(text: str) -> dict[str, int]:
    """Returns the bytes by device of `cpu=8GiB,cuda:0=20GiB`.

    Raises:
        SetupError: The text names no device, or a size without a unit.
    """
    from hfq.errors import SetupError
    from hfq.placement.estimate.hardware import parse_size

    limits: dict[str, int] = {}
    for part in text.split(","):
        device, separator, size = (piece.strip() for piece in part.partition("="))
        if not separator or not re.fullmatch(r"cpu|disk|([a-z]+:)?[0-9]+", device):
            raise SetupError(
                f"--max-memory {text} is not valid.",
                expected="DEVICE=SIZE, separated by commas; DEVICE is cpu, disk, or cuda:0",
                found=part,
                fix="Pass a size for each device, for example --max-memory cpu=8GiB.",
            )
        try:
            limits[device] = parse_size(size, f"the size of {device}", least=0)
        except HfqError as error:
            raise SetupError(
                f"--max-memory {text} has no valid size for {device}.",
                expected="a number with a unit",
                found=size or "nothing",
                fix=f"Pass --max-memory {device}=8GiB, for example.",
            ) from error
    return limits


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
            f"--dtype {dtype} is not valid.{nearest(dtype.replace('fp', 'float'), names)}",
            expected=", ".join(names),
            found=dtype,
            fix="Pass --dtype auto, or another of these.",
        )
    return dtype


def as_typed(
    error: HfqError, options: Mapping[str, str], given: Mapping[str, tuple[str, str]] | None = None
) -> HfqError:
    """Returns an error that names a verb's options as typed, such as `--bits 5` for `bits=5`.

    Texts about the checkpoint's config, and errors about a JSON of options, stay as they are: both have keys
    of the same names.

    Args:
        error: An error with the names of Python's arguments.
        options: {name of the argument: the option}.
        given: {name of the argument: option and value of the command line}.
    """

    if error.message.startswith("The options in "):
        return error

    def typed(text: Any) -> Any:
        if not isinstance(text, str) or "config.json" in text or "quantization_config" in text:
            return text
        for name, option in options.items():
            text = re.sub(rf"\b{name}=\{{([^}}]*)\}}", partial(_dict, option, (given or {}).get(name)), text)
            text = re.sub(rf"\b{name}=\[([^]]*)\]", partial(_repeated, option), text)
            text = re.sub(rf"\b{name}=True\b", option, text)
            text = re.sub(rf"\b{name}=False\b", option.replace("--", "--no-"), text)
            text = re.sub(
                rf"\b{name}=(['\"]?)([\w.:-]*\w)\1",
                partial(_value, option, (given or {}).get(name)),
                text,
            )
            text = re.sub(rf"`{name}`" if "_" not in name else rf"`?\b{name}\b`?", option, text)
        return text

    return type(error)(
        typed(error.message),
        fix=typed(error.fix),
        file=error.file,
        tensor=error.tensor,
        rank=error.rank,
        expected=typed(error.expected),
        found=typed(error.found),
        problems=error.problems,
    )


def _value(option: str, given: tuple[str, str] | None, found: re.Match[str]) -> str:
    """Returns an option with its value; as on the command line if the value is equal."""
    try:
        is_given = given is not None and (given[1] == found[2] or float(given[1]) == float(found[2]))
    except ValueError:
        is_given = False
    return " ".join(given) if given is not None and is_given else f"{option} {found[2]}"


def _repeated(option: str, found: re.Match[str]) -> str:
    """Returns an option once for each item of a list of texts."""
    return " ".join(f"{option} {item}" for item in re.findall(r"'([^']*)'", found[1]))


def _dict(option: str, given: tuple[str, str] | None, found: re.Match[str]) -> str:
    """Returns an option with a dict: as typed, or bytes by device as `cpu=123B,0=456B`."""
    sizes = re.findall(r"[\"']?(\w+)[\"']?: ([0-9]+)", found[1])
    if not sizes:
        return found[0] if given is None else " ".join(given)
    return f"{option} {','.join(f'{device}={nbytes}B' for device, nbytes in sizes)}"
