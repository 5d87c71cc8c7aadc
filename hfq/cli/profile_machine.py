"""`hfq calibrate`: measures this machine once, for what `hfq plan` and `hfq.report` predict."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from hfq.placement.estimate.profile import Profile

__all__ = ["calibrate"]


def calibrate(
    checkpoint: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CHECKPOINT]", help="Also measure products with the layers of this checkpoint."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="On the disk to measure; by default in the user's cache. Takes 1 GiB for a while."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where to write the profile; by default where hfq plan looks for it.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    ranks: Annotated[
        int,
        typer.Option(
            min=0, metavar="N", help="Also measure steps under ZeRO-3 on N local ranks; 0 for none."
        ),
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Small sizes: checks that it works; the profile is not written.")
    ] = False,
) -> None:
    """Measure disk, memory, link and products on this machine, and write the profile that hfq plan predicts
    with.
    """
    from hfq.cli.model_argument import named_checkpoint
    from hfq.loading.dry_run import open_model
    from hfq.machine_profile.measure_machine import default_folder, measure_machine
    from hfq.placement.estimate.profile import profile_path

    with contextlib.nullcontext() if checkpoint is None else named_checkpoint(checkpoint) as found:
        model = None if found is None else open_model(found.folder)
        profile = measure_machine(
            folder or default_folder(),
            lambda text: print(text, file=sys.stderr, flush=True),
            model,
            quick,
            ranks,
        )
    target = out or profile_path()
    if not quick or out is not None:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(profile.to_json(), encoding="utf-8")
    if as_json:
        print(profile.to_json())
    else:
        _print(profile)
        print("a quick run: nothing is written" if quick and out is None else f"written to {target}")


def _print(profile: Profile) -> None:
    link = (
        "no accelerator"
        if profile.host_to_device is None
        else f"link {profile.host_to_device / 1e9:.2f} GB/s"
    )
    rates = {"disk": profile.disk, "page cache": profile.page_cache, "memory": profile.memory}
    print(", ".join([*(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()), link]))
    for kind, products in profile.products.items():
        print(
            f"{kind}: "
            + ", ".join(f"{rate / 1e9:.2f}e9 weights/s at {rows} rows" for rows, rate in products.items())
        )
    fixed, per_layer = profile.load_seconds
    print(
        f"a step costs {profile.step_seconds * 1e3:.2f} ms, a layer {profile.layer_seconds * 1e3:.2f} ms "
        f"beside its products, a block "
        f"that is streamed {profile.block_seconds * 1e3:.2f} ms beside its bytes"
    )
    for what, beside in (("the disk", profile.beside_disk), ("the page cache", profile.beside_cached)):
        print(
            f"while {what} is read: computing keeps {beside.computing:.0%} of its speed, reading "
            f"{beside.reading:.0%}"
        )
    if (zero3 := profile.zero3) is not None:
        print(
            f"{zero3.ranks} ranks under ZeRO-3: gathers {zero3.gathering / 1e9:.2f} GB/s on each, products "
            f"take {zero3.slowdown:.2f} "
            f"times as long, a step costs {zero3.step_seconds * 1e3:.2f} ms and a layer "
            f"{zero3.layer_seconds * 1e3:.2f} ms beside"
        )
    print(f"a load costs {fixed:.2f} s, and {per_layer * 1e3:.1f} ms a layer, beside its bytes")
