"""Placements of each format variant on docs/reference/formats.md, from the tables that the tests use."""

from __future__ import annotations

from generate import methods
from generate.plain_transformers import PLAIN, VERSIONS, PlainResult
from hfq.cli import formats
from hfq.formats import FORMATS
from hfq.formats.base import FormatVariant
from tests.contract.cases import CASES, REPRESENTATIVES
from tests.contract.test_contract_model import PLACEMENTS
from tests.distributed import test_tensor_parallel, test_zero3_matrix
from tests.formats.layouts.test_slicing import CUT
from tests.support.zero_models import FORMATS as SHARDED

__all__ = ["as_markdown"]


_BY_ID = {case.id: case for case in CASES}
_DEVICES = {
    "none": "ZeRO-3, device",
    "cpu": "ZeRO-3, CPU",
    "in place": "ZeRO-3, NVMe, checkpoint",
    "swap": "ZeRO-3, NVMe, swap files",
}
_HEAD = """
## Formats and placements

All {cases} test cases run in {placements} placements: {placement_names} (`half` is one layer and
the head on disk). Logits are bit-identical to those of a load without `device_map`. This table
shows the other placements.

| cell | meaning |
|---|---|
| bit-identical | CI compares logits with those of the unsharded model: `torch.equal` is True |
| bit-identical* | As above, if DeepSpeed's async_io is compiled; CI skips it elsewhere |
| same class tested | CI runs another format of the same class. ZeRO-3 shards bytes of every format in the same way. |
| same code, not run | All formats use the same code. No test runs it with this format or its class. |
| sliced | Slices for 2, 3, and 4 ranks have the same bits as the whole layer. If words or groups do not divide, the load raises an error. {tp} also run on two ranks. |
| unsupported | An error that names the layer, before any weight is read |

ZeRO-3 tests use two CPU ranks ({ranks}).
Three ranks and each storage device are tested with these formats:
{sharded}.

The last two columns show plain transformers **on a machine without a GPU**. Results on a GPU were
not measured, and are better for several formats. Versions:
{versions}.

"""
_PLAIN_HEAD = """
## Plain transformers in detail

These are results with quantized checkpoints, without hfq. They were measured on a CPU with small
Llamas, or read in the sources where the cell says so.

| method | in memory | with layers on disk | saved again |
|---|---|---|---|
"""
_PLAIN_TAIL = """
**ZeRO-3, all methods.** transformers skips `zero.Init` for quantized models, so that each rank
loads the whole model. `deepspeed.initialize` partitions it afterwards:

- Integer codes are gathered exactly.
- FP8 codes fail over gloo ("Invalid scalar type").
- float16 scales are cast to bfloat16.
- With parameters on NVMe, integer codes are cast, too. This destroys them without an error. A test
  checks that it still happens: `test_stock_nvme_offload_still_casts_the_values_of_packed_words`.
- `device_map` together with ZeRO-3 raises an error.

**Tensor parallelism.** FP8 with one scale per row works. GPTQ is sliced along the wrong axis and
fails. compressed-tensors fails during dispatch.

**Layers on disk.** The load reads every tensor once. Each forward pass opens the file again for
each tensor, and waits for it.
"""


def as_markdown() -> str:
    """Returns the text of the page: the registry, the placements, and plain transformers."""
    variants = sorted(
        (variant for cls in FORMATS.values() for variant in cls.variants), key=lambda variant: variant.name
    )
    head = _HEAD.format(
        placements=len(PLACEMENTS),
        placement_names=_words(PLACEMENTS),
        cases=len(CASES),
        versions=VERSIONS,
        sharded=_words(SHARDED),
        ranks=f"{len(test_zero3_matrix.TARGET_FORMATS)} checkpoints, one of each class",
        tp=_words(test_tensor_parallel.EXACT),
    )
    header = ["variant", *_DEVICES.values(), "tensor parallel", "plain: in memory", "plain: on disk"]
    rows = [_row(variant) for variant in variants]
    tables = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])
    plain = "\n".join(
        f"| {name} | {result.memory} | {result.disk} | {result.saved} |" for name, result in PLAIN.items()
    )
    return (
        f"{formats.as_markdown()}{methods.as_markdown()}{head}{tables}\n{_PLAIN_HEAD}{plain}\n{_PLAIN_TAIL}"
    )


def _words(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(variant: FormatVariant) -> list[str]:
    cases = [_BY_ID[id] for id in variant.cases]
    cut = [case in CUT for case in cases]
    return [
        variant.name,
        *(_sharded(cases, device) for device in _DEVICES),
        "sliced" if all(cut) else "unsupported" if not any(cut) else "sliced in part",
        *_plain(variant),
    ]


def _sharded(cases: list, device: str) -> str:
    """Returns the cell for these test cases with ZeRO-3 shards on a storage device."""
    ran = [weight_format for weight_format, _ in SHARDED.values()]
    if device == "cpu":
        ran += [case.format for case in CASES if case.id in REPRESENTATIVES]
    if any(case.format in ran for case in cases):
        return "bit-identical*" if device == "swap" else "bit-identical"
    classes = {type(weight_format) for weight_format in ran}
    return "same class tested" if {type(case.format) for case in cases} & classes else "same code, not run"


def _plain(variant: FormatVariant) -> tuple[str, str]:
    found = (result for result in PLAIN.values() if variant.name in result.variants)
    result = next(found, PlainResult("not measured", "not measured", ""))
    return result.memory_in_short or result.memory, result.disk_in_short or result.disk
