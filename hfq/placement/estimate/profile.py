"""The machine profile: measured rates, or limits of public standards."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hfq.checkpoint.private_folder import user_cache
from hfq.checkpoint.small_file import read_small_file
from hfq.errors import SetupError
from hfq.placement.estimate.pipeline import FREE, SideBySide

__all__ = ["PUBLISHED", "Profile", "Zero3Rates", "profile_path", "read_profile"]

_VERSION = 2
_MOST_NBYTES = 64 << 20


@dataclass(frozen=True)
class Zero3Rates:
    """Costs of a step under ZeRO-3, where ranks share this machine.

    Attributes:
        ranks: Number of measured ranks.
        device: Device type of the ranks: `cpu`, `cuda`, ….
        gathering: Bytes of whole flat buffers per second that every rank gathers, all ranks concurrently.
        slowdown: Factor by which matrix products slow down on each rank while all ranks compute.
        layer_seconds: Cost of a layer in addition to its products and its bytes: DeepSpeed's hooks, and the
            calls of its gathers.
        step_seconds: Cost of a step in addition to its layers.
    """

    ranks: int
    device: str
    gathering: float
    slowdown: float
    layer_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Profile:
    """Rates in bytes per second, unless another unit is named; None for an unknown rate.

    Attributes:
        source: `measured`, or the standards of the rates.
        disk: Reads that bypass the page cache.
        page_cache: Reads of files that are in the page cache.
        memory: Reads of the host's memory.
        host_to_device: Copies from the host's memory to an accelerator.
        products: {kind of weight: {rows of activations: weights per second}}, with the kinds of
            `kind_of_weight`.
        layer_seconds: Cost of one layer's forward pass in addition to its products: Python, norms, attention
            of a short context.
        load_seconds: Fixed cost of a load in addition to its bytes, and cost per layer.
        machine: Facts about the measured machine, as text.
        device_memory: Reads of an accelerator's memory.
        calls: {kind of weight: seconds of a product in addition to its weights}.
        step_seconds: Cost of a step in addition to its layers.
        block_seconds: Cost of a unit that is onloaded to the CPU in addition to its bytes.
        beside_disk: Speeds that remain while reads that bypass the page cache and computing overlap.
        beside_cached: Speeds that remain while reads from the page cache and computing overlap.
        zero3: Costs of a step under ZeRO-3; None if not measured.
    """

    source: str
    disk: float
    page_cache: float
    memory: float
    host_to_device: float | None = None
    products: Mapping[str, Mapping[int, float]] = field(default_factory=dict)
    layer_seconds: float = 0.0
    load_seconds: tuple[float, float] = (0.0, 0.0)
    machine: Mapping[str, str] = field(default_factory=dict)
    device_memory: float | None = None
    calls: Mapping[str, float] = field(default_factory=dict)
    step_seconds: float = 0.0
    block_seconds: float = 0.0
    beside_disk: SideBySide = FREE
    beside_cached: SideBySide = FREE
    zero3: Zero3Rates | None = None

    @property
    def is_measured(self) -> bool:
        """True if the profile comes from `hfq profile-machine`."""
        return self.source == "measured"

    def product_rate(self, kind: str, rows: int) -> float | None:
        """Returns weights per second of a product with this number of activation rows.

        The rate is interpolated; None if unknown.
        """
        known = sorted(self.products.get(kind, {}).items())
        if not known:
            return None
        seconds = [(count, 1 / rate) for count, rate in known]
        if rows <= seconds[0][0] or len(seconds) == 1:
            return known[0][1]
        low, high = seconds[-2:]
        for first, second in itertools.pairwise(seconds):
            if first[0] <= rows <= second[0]:
                low, high = first, second
                break
        slope = (high[1] - low[1]) / (high[0] - low[0])
        return 1 / max(low[1] + slope * (rows - low[0]), 1e-30)

    def to_json(self) -> str:
        """Returns the profile as JSON for `read_profile`."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2)


PUBLISHED = Profile(
    source="limits of standards (disk on PCIe 4.0 ×4, two channels of DDR4-3200, accelerator on PCIe 4.0 "
    "×16)",
    disk=16e9 * 4 * 128 / 130 / 8,
    page_cache=3200e6 * 8,
    memory=3200e6 * 8 * 2,
    host_to_device=16e9 * 16 * 128 / 130 / 8,
)
"""Limits of public standards.

16 GT/s per lane with 128b/130b coding (PCI-SIG, PCI Express 4.0); 3200 MT/s of 8 bytes per channel (JEDEC,
JESD79-4). A read through the page cache is a copy, which reads and writes.
"""


def profile_path() -> Path:
    """Returns the file of `hfq profile-machine`: `hfq/profile.json` in the user's cache folder."""
    return user_cache() / "profile.json"


def read_profile(path: Path | None = None, machine: Mapping[str, str] | None = None) -> Profile:
    """Reads a profile of `hfq profile-machine`; `PUBLISHED` if none is named and none exists.

    Args:
        path: File; None for `profile_path()`.
        machine: Facts of this machine that the profile must match, such as its processor.

    Raises:
        SetupError: The file cannot be read, is no profile, or is of another machine.
    """
    file = path or profile_path()
    if path is None and not file.exists():
        return PUBLISHED
    try:
        stored = json.loads(read_small_file(file, _MOST_NBYTES).decode("utf-8"))
        profile = _from_json(stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SetupError(
            "The machine profile cannot be used.",
            file=file,
            expected=f"a profile of version {_VERSION}",
            found=_found(error),
            fix="Run `hfq profile-machine` again, or remove the file.",
        ) from error
    for what, value in (machine or {}).items():
        if profile.machine.get(what) != value:
            raise SetupError(
                "The machine profile is of another machine.",
                file=file,
                expected=f"{what}: {value}",
                found=profile.machine.get(what),
                fix="Run `hfq profile-machine` here, or pass another profile with --profile.",
            )
    return profile


def _found(error: Exception) -> str:
    """Returns the reason why a file is no profile, as people would say it."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    if isinstance(error, json.JSONDecodeError):
        return f"no JSON: {error}"
    return f"no field {error}" if isinstance(error, KeyError) else f"{type(error).__name__}: {error}"


def _from_json(stored: dict) -> Profile:
    if not isinstance(stored, dict):
        raise ValueError(f"it holds a {type(stored).__name__}")
    if stored.pop("version") != _VERSION:
        raise ValueError("another version")
    products = {
        kind: {int(rows): _rate(rate) for rows, rate in rates.items()}
        for kind, rates in stored.pop("products").items()
    }
    fixed, per_layer = stored.pop("load_seconds")
    disk, cached = (SideBySide(**stored.pop(name)) for name in ("beside_disk", "beside_cached"))
    zero3 = None if (found := stored.pop("zero3")) is None else Zero3Rates(**found)
    profile = Profile(
        products=products,
        load_seconds=(float(fixed), float(per_layer)),
        zero3=zero3,
        beside_disk=disk,
        beside_cached=cached,
        **stored,
    )
    _check(profile)
    return profile


def _check(profile: Profile) -> None:
    """Raises ValueError if a value is no rate, share, or time."""
    for known in (profile.disk, profile.page_cache, profile.memory):
        _rate(known)
    for rate in (
        profile.host_to_device,
        profile.device_memory,
        *((profile.zero3.gathering,) if profile.zero3 else ()),
    ):
        if rate is not None:
            _rate(rate)
    for speeds in (profile.beside_disk, profile.beside_cached):
        for share in (speeds.computing, speeds.reading):
            if _rate(share) > 1:
                raise ValueError(f"{share!r} is no share")
    costs = [profile.layer_seconds, profile.step_seconds, profile.block_seconds, *profile.calls.values()]
    costs += (
        [profile.zero3.slowdown, profile.zero3.layer_seconds, profile.zero3.step_seconds]
        if profile.zero3
        else []
    )
    for seconds in costs:
        if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < 1e6:
            raise ValueError(f"{seconds!r} is no time")


def _rate(value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e18:
        raise ValueError(f"{value!r} is no rate")
    return float(value)
