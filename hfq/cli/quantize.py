"""`hfq quantize MODEL OUT`: quantizes a float checkpoint layer by layer."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hfq.cli.model_argument import Model, Out, Revision, TrustRemoteCode, model_folder
from hfq.cli.progress_bar import progress_bar
from hfq.cli.push_to_hub import Private, PushToHub, Upload
from hfq.tables import as_size

if TYPE_CHECKING:
    from hfq.quantization.progress import Progress, QuantizeReport

__all__ = ["quantize"]

_METHODS = (
    "Method: gptq, awq, or qmoe-gptq with calibration data, or rtn, fp8, mxfp4, w8a8, w8a16, w4a16, or "
    "qmoe (round to nearest)."
)

Method = Annotated[str, typer.Option(help=_METHODS)]
Bits = Annotated[
    int | None, typer.Option(help="Bits per weight for gptq, awq, and rtn: 2, 3, 4, or 8 (default: 4).")
]
GroupSize = Annotated[
    int | None, typer.Option(help="Input channels that share a scale, -1 for all (default: 128).")
]
Sym = Annotated[bool | None, typer.Option("--sym/--no-sym", help="Symmetric codes; --no-sym writes GPTQ v2.")]
DescAct = Annotated[
    bool | None, typer.Option("--desc-act", help="Quantize channels in order of decreasing activation.")
]
StaticGroups = Annotated[
    bool | None, typer.Option("--static-groups", help="With --desc-act, keep groups of neighboring channels.")
]
ClipSearch = Annotated[
    bool | None,
    typer.Option(
        "--clip-search/--no-clip-search", help="Narrow the range of codes where that lowers the error."
    ),
]
DampPercent = Annotated[
    float | None,
    typer.Option(help="Fraction of the mean Hessian diagonal to add (default: 0.05)."),
]
DistillSteps = Annotated[
    int | None,
    typer.Option(
        min=0, metavar="STEPS", help="Distillation steps per decoder layer against the float model."
    ),
]
ModulesToNotConvert = Annotated[
    list[str] | None,
    typer.Option(metavar="MODULE", help="Module that stays unquantized; repeatable."),
]
Dataset = Annotated[
    str | None,
    typer.Option(
        metavar="FILE|NAME",
        help="Calibration data: a text file, wikitext2, c4, or c4-new (requires datasets).",
    ),
]
NumCalibrationSamples = Annotated[int, typer.Option(min=1, help="Sequences of calibration data.")]
MaxSeqLength = Annotated[
    int | None,
    typer.Option(min=1, help="Tokens per sequence (default: 2048, or fewer if the model requires it)."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON summary of the new checkpoint.")]


def quantize(
    model: Model,
    out: Out,
    revision: Revision = None,
    method: Method = "gptq",
    bits: Bits = None,
    group_size: GroupSize = None,
    sym: Sym = None,
    desc_act: DescAct = None,
    static_groups: StaticGroups = None,
    clip_search: ClipSearch = None,
    damp_percent: DampPercent = None,
    distill_steps: DistillSteps = None,
    modules_to_not_convert: ModulesToNotConvert = None,
    dataset: Dataset = None,
    num_calibration_samples: NumCalibrationSamples = 128,
    max_seq_length: MaxSeqLength = None,
    push_to_hub: PushToHub = None,
    private: Private = False,
    trust_remote_code: TrustRemoteCode = False,
    as_json: AsJson = False,
) -> None:
    """Writes a quantized copy of a float checkpoint.

    An interrupted run continues when it is started again.
    """
    from transformers.utils import logging

    from hfq.quantization.driver import quantize as run
    from hfq.recipes.recipe import Recipe

    options: dict[str, Any] = {
        "method": method,
        "bits": bits,
        "group_size": group_size,
        "sym": sym,
        "desc_act": desc_act,
        "static_groups": static_groups,
        "damp_percent": damp_percent,
        "clip_search": clip_search,
        "distill_steps": distill_steps,
    }
    logging.disable_progress_bar()  # transformers would show the load of a model without weights
    recipe, folder = Recipe.of(options), model_folder(model, revision)
    upload = Upload(push_to_hub, private, model)
    with progress_bar(has_lines=True) as bar:
        report = run(
            folder,
            recipe,
            out,
            dataset=dataset,
            num_calibration_samples=num_calibration_samples,
            max_seq_length=max_seq_length,
            modules_to_not_convert=modules_to_not_convert,
            on_progress=lambda each: bar.update(_line(each), each.done, each.decoder_layers),
            trust_remote_code=trust_remote_code,
        )
    url = upload.finish(str(report.path))
    print(json.dumps(_as_dict(report) | {"url": url}, indent=2) if as_json else _summary(report))
    if url is not None and not as_json:
        print(f"uploaded to {url}")


def _line(progress: Progress) -> str:
    loss = "" if math.isnan(progress.loss) else f"  loss {progress.loss:.3g}"
    eta = "" if progress.eta_seconds is None else f"  {progress.eta_seconds:,.0f} s left"
    return f"{progress.decoder_layer}{loss}{eta}"


def _summary(report: QuantizeReport) -> str:
    resumed = f", {report.resumed} decoder layers reused from an earlier run" if report.resumed else ""
    layers = f"{len(report.layers)} layers as {report.format}"
    return f"{report.path}: {layers}, {as_size(report.nbytes)} in {report.seconds:,.1f} s{resumed}"


def _as_dict(report: QuantizeReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(report), "path": str(report.path)}
