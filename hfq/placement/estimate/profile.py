"""Rates of a machine: those that `hfq profile-machine` measured, or else the limits of public standards."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hfq.errors import SetupError
from hfq.placement.estimate.pipeline import FREE, SideBySide

__all__ = ["PUBLISHED", "Profile", "Zero3Rates", "profile_path", "read_profile"]

_VERSION = 2


@dataclass(frozen=True)
class Zero3Rates:
    """What a step costs under ZeRO-3, where ranks share this machine.

    Attributes:
        ranks: The ranks that were measured.
        device: What they computed on: `cpu`, `cuda`, ….
        gathering: Bytes of whole rows per second that every rank gathers, all ranks at once.
        slowdown: How many times as long as alone products take on each rank while all of them compute.
        layer_seconds: What a layer costs beside its products and its bytes: DeepSpeed's hooks, and the calls
            of its gathers.
        step_seconds: What a step costs beside its layers.
    """

    ranks: int
    device: str
    gathering: float
    slowdown: float
    layer_seconds: float
    step_seconds: float


@dataclass(frozen=True)
class Profile:
    """Rates in bytes per second, but where another unit is named; None is a rate that is not known.

    Attributes:
        source: `measured`, or the standards that the rates are taken from.
        disk: Reads past the page cache.
        page_cache: Reads of files that are in the page cache.
        memory: Reads of the host's memory.
        host_to_device: Copies from the host's memory to an accelerator.
        products: {kind of weight: {rows of activations: weights per second}}, the kinds as `kind_of_weight`
            names them.
        layer_seconds: What one layer's forward costs beside its products: Python, norms, attention of a short
            context.
        load_seconds: What a load costs beside its bytes, and for each layer.
        machine: What was measured: facts as text by what they are.
        device_memory: Reads of an accelerator's memory.
        calls: {kind of weight: seconds that a product takes beside its weights}.
        step_seconds: What a step costs beside its layers.
        block_seconds: What a block that is streamed to the CPU costs beside its bytes.
        beside_disk: What reading past the page cache and computing leave of each other.
        beside_cached: The same of reading files that are in the page cache.
        zero3: What a step costs under ZeRO-3; None where that was not measured.
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
        """Whether it comes from `hfq profile-machine`."""
        return self.source == "measured"

    def product_rate(self, kind: str, rows: int) -> float | None:
        """Weights per second that a product with so many rows of activations goes through; interpolated, None
        if not known.
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
        """The profile as `read_profile` takes it."""
        return json.dumps({"version": _VERSION, **asdict(self)}, indent=2)


PUBLISHED = Profile(
    source="limits of standards (disk on PCIe 4.0 ×4, two channels of DDR4-3200, accelerator on PCIe 4.0 "
    "×16)",
    disk=16e9 * 4 * 128 / 130 / 8,
    page_cache=3200e6 * 8,
    memory=3200e6 * 8 * 2,
    host_to_device=16e9 * 16 * 128 / 130 / 8,
)
"""16 GT/s a track with 128b/130b coding (PCI-SIG, PCI Express 4.0); 3200 MT/s of 8 bytes a channel (JEDEC,
JESD79-4). A read through the page cache is a copy, which reads and writes.
"""


def profile_path() -> Path:
    """Where `hfq profile-machine` writes: `hfq/profile.json` in the user's cache folder."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hfq" / "profile.json"


def read_profile(path: Path | None = None, machine: Mapping[str, str] | None = None) -> Profile:
    """A profile that `hfq profile-machine` wrote, or `PUBLISHED` if none is asked for and none was written.

    Args:
        path: The file; None for `profile_path()`.
        machine: Facts of this machine that must be those of the profile's, such as its processor.

    Raises:
        SetupError: The file cannot be read, is no profile, or is of another machine.
    """
    file = path or profile_path()
    if path is None and not file.exists():
        return PUBLISHED
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
        profile = _from_json(stored)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise SetupError(
            "The calibration profile cannot be used.",
            file=file,
            expected=f"a profile of version {_VERSION}",
            found=f"{type(error).__name__}: {error}",
            fix="run `hfq profile-machine` again, or remove the file",
        ) from error
    for what, value in (machine or {}).items():
        if profile.machine.get(what) != value:
            raise SetupError(
                "The calibration profile is of another machine.",
                file=file,
                expected=f"{what}: {value}",
                found=profile.machine.get(what),
                fix="run `hfq profile-machine` here, or name another profile with --profile",
            )
    return profile


def _from_json(stored: dict) -> Profile:
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
    """Every rate is one."""
    for known in (profile.disk, profile.page_cache, profile.memory):
        _rate(known)
    for rate in (
        profile.host_to_device,
        profile.device_memory,
        *((profile.zero3.gathering,) if profile.zero3 else ()),
    ):
        if rate is not None:
            _rate(rate)
    for beside in (profile.beside_disk, profile.beside_cached):
        for share in (beside.computing, beside.reading):
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
