"""docs/reference/placements.md: which dialect is tested in which placement, from the tables that the tests run over;
and what stock tools do.
"""

from __future__ import annotations

from generate.stock import PLAIN, STOCK_VERSIONS, Stock
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
    "in place": "ZeRO-3, NVMe in place",
    "swap": "ZeRO-3, NVMe copied",
}
_HEAD = """# Dialects and placements

Made by `make docs` from the tables that the tests run over; a test compares the two. [formats](formats.md) says what each dialect is and how its reading is tested.

## hfq, and stock transformers beside it

| cell | meaning |
|---|---|
| exact | CI runs it: the logits are those of a load without `device_map`, under ZeRO-3 those of the unsharded model, bit for bit |
| exact* | CI runs it where DeepSpeed's async_io has been compiled, and skips it by name elsewhere |
| alike | CI runs another format of the same class there; a row is cut into shards by bytes, whatever they mean |
| - | the same code for every dialect, and no test runs it with this one, or one of its class, in this home |
| cut | every slice of 2, 3 and 4 ranks has the weights of the whole layer bit for bit, or the cut is refused by name where words or groups forbid it; {tp} also run on two ranks |
| refused | an error that names the layer, before a weight is read |

The first four are the contract suite ({placements} placements of {cases} checkpoints; `half` is one layer and the head on disk); ZeRO-3 runs on two CPU ranks ({ranks} and, for {sharded}, on three, in every home). No GPU has been at hand:
placements on CUDA devices are written and have not run ([hardware status](../explanation/hardware_status.md)).

Stock is {versions}, **on a machine without a GPU**; what it does with a GPU was not measured, and is better for several dialects.

"""
_STOCK_HEAD = """
## Stock, in detail

What happens to a checkpoint that is quantized already, without hfq. Measured on a CPU with small Llamas, or, where it says so, read in the sources; {versions}.

| method | in memory | with layers on disk | saved again |
|---|---|---|---|
"""
_STOCK_TAIL = """
**ZeRO-3**, every method: `zero.Init` is skipped for quantized models, so that each rank loads all of it; `deepspeed.initialize` partitions afterwards. Integer codes are then gathered exactly; FP8 codes
fail over gloo ("Invalid scalar type"); float16 scales are cast to bfloat16; with parameters on NVMe the values of integer codes are cast, too, which destroys them without an error (a test of
hfq's holds on to this one: `test_stock_nvme_offload_still_casts_the_values_of_packed_words`). `device_map` beside ZeRO-3 is refused.

**Tensor parallelism**: FP8 with a scale for each row works. GPTQ is cut along the wrong axis and fails, compressed-tensors fails while it dispatches.

**Reading disk layers**: every tensor is read once while loading, and each forward opens the file again for each tensor and waits for it.
"""


def as_markdown() -> str:
    """The text of the page."""
    variants = sorted(
        (dialect for cls in FORMATS.values() for dialect in cls.variants), key=lambda dialect: dialect.name
    )
    head = _HEAD.format(
        placements=len(PLACEMENTS),
        cases=len(CASES),
        versions=STOCK_VERSIONS,
        sharded=_words(SHARDED),
        ranks=f"{len(test_zero3_matrix.TARGET_FORMATS)} checkpoints, one of each class",
        tp=_words(test_tensor_parallel.EXACT),
    )
    header = [
        "dialect",
        *PLACEMENTS,
        *_DEVICES.values(),
        "tensor parallel",
        "stock: in memory",
        "stock: disk",
    ]
    rows = [_row(dialect) for dialect in variants]
    tables = "\n".join(f"| {' | '.join(cells)} |" for cells in [header, ["---"] * len(header), *rows])
    stock = "\n".join(
        f"| {name} | {facts.memory} | {facts.disk} | {facts.saved} |" for name, facts in PLAIN.items()
    )
    return f"{head}{tables}\n{_STOCK_HEAD.format(versions=STOCK_VERSIONS)}{stock}\n{_STOCK_TAIL}"


def _words(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _row(dialect: FormatVariant) -> list[str]:
    cases = [_BY_ID[id] for id in dialect.cases]
    placed = ["exact" for _ in PLACEMENTS]
    sharded = [_sharded(cases, home) for home in _DEVICES]
    cut = [case in CUT for case in cases]
    stock = _plain(dialect)
    return [
        dialect.name,
        *placed,
        *sharded,
        "cut" if all(cut) else "refused" if not any(cut) else "cut, in part",
        *stock,
    ]


def _sharded(cases: list, home: str) -> str:
    """Whether these checkpoints, or others of their class, are sharded with this home for shards."""
    ran = [weight_format for weight_format, _ in SHARDED.values()]
    if home == "cpu":
        ran += [case.format for case in CASES if case.id in REPRESENTATIVES]
    if any(case.format in ran for case in cases):
        return "exact*" if home == "swap" else "exact"
    return (
        "alike"
        if {type(case.format) for case in cases} & {type(weight_format) for weight_format in ran}
        else "-"
    )


def _plain(dialect: FormatVariant) -> tuple[str, str]:
    facts = next(
        (facts for facts in PLAIN.values() if dialect.name in facts.variants),
        Stock("not measured", "not measured", ""),
    )
    return facts.memory_in_short or facts.memory, facts.disk_in_short or facts.disk
