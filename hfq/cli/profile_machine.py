"""`hfq profile-machine`: measures this machine for `hfq plan` and `hfq.report`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hfq.cli.model_argument import Revision, model_headers

if TYPE_CHECKING:
    from hfq.placement.estimate.profile import Profile

__all__ = ["profile_machine"]


def profile_machine(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="Checkpoint whose layers are measured, too."),
    ] = None,
    revision: Revision = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to measure, with 1 GiB free (default: user cache)."),
    ] = None,
    output_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="File for the profile (default: the file that hfq plan reads)."),
    ] = None,
    num_processes: Annotated[
        int,
        typer.Option(min=0, metavar="N", help="Local processes for measuring ZeRO-3 steps; 0 for none."),
    ] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile as JSON.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Test with small sizes, without writing the profile.")
    ] = False,
) -> None:
    """Measures disk, memory, link, and products of this machine, and writes a profile."""
    from transformers.utils import logging

    from hfq.loading.dry_run import open_model
    from hfq.machine_profile.measure_machine import default_folder, measure_machine
    from hfq.output_file import check_output_file, write_output_file
    from hfq.placement.estimate.profile import profile_path

    target = output_file or profile_path()
    is_written = not quick or output_file is not None
    if is_written:
        check_output_file(target)  # before minutes of measurements
    logging.disable_progress_bar()  # transformers would show the load of each measured model
    with contextlib.nullcontext() if model is None else model_headers(model, revision) as found:
        planned = None if found is None else open_model(found.folder)
        profile = measure_machine(folder or default_folder(), _say, planned, quick, num_processes)
    if is_written:
        write_output_file(target, profile.to_json())
    if as_json:
        print(profile.to_json())
    else:
        _print(profile)
    _say(f"written to {target}" if is_written else "quick run: no profile was written")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _print(profile: Profile) -> None:
    link = (
        "no accelerator"
        if profile.host_to_device is None
        else f"link {profile.host_to_device / 1e9:.2f} GB/s"
    )
    rates = {"disk": profile.disk, "page cache": profile.page_cache, "memory": profile.memory}
    print(", ".join([*(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()), link]))
    if "accelerators" in profile.machine:
        print(f"accelerators: {profile.machine['accelerators']}")
    for kind, products in profile.products.items():
        print(
            f"{kind}: "
            + ", ".join(f"{rate / 1e9:.2f}e9 weights/s at {rows} rows" for rows, rate in products.items())
        )
    fixed, per_layer = profile.load_seconds
    print(
        f"fixed costs: {profile.step_seconds * 1e3:.2f} ms per step, {profile.layer_seconds * 1e3:.2f} ms "
        f"per layer, {profile.block_seconds * 1e3:.2f} ms per onloaded unit"
    )
    for what, speeds in (("the disk", profile.beside_disk), ("the page cache", profile.beside_cached)):
        print(
            f"while {what} is read: computing keeps {speeds.computing:.0%} of its speed, reading "
            f"{speeds.reading:.0%}"
        )
    if (zero3 := profile.zero3) is not None:
        print(
            f"{zero3.ranks} ranks under ZeRO-3: gathers {zero3.gathering / 1e9:.2f} GB/s on each, products "
            f"take {zero3.slowdown:.2f} times as long, fixed costs {zero3.step_seconds * 1e3:.2f} ms per "
            f"step and {zero3.layer_seconds * 1e3:.2f} ms per layer"
        )
    print(f"fixed costs of a load: {fixed:.2f} s, and {per_layer * 1e3:.1f} ms per layer")
