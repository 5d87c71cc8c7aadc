"""Part 3: the bits and the errors of every case of the contract suite on the device.

The weights are seen one by one through inputs with a single 1, so that any order of a sum gives the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from benchmarks.gpu.bench import Bench, Record, missing, select
from benchmarks.gpu.report import Values
from hfq.formats import ActivationScheme, Format
from hfq.kernels.activations import quantize_activations
from hfq.kernels.registry import Kernel, choose_kernel
from hfq.tables import Table
from tests.contract.cases import CASES, REPRESENTATIVES, Case
from tests.support import tiny_models

__all__ = ["measure", "tables", "values"]

ROWS = (1, 2, 3, 8, 16, 17, 64, 65, 300)
DTYPES = (torch.bfloat16, torch.float16)
OFFSETS = (1, 2, 8)
SHAPE, DRY_SHAPE = (512, 1024), (128, 256)
SCHEMES = {
    "fp8-tensor": ActivationScheme("tensor"),
    "fp8-channel": ActivationScheme("token"),
    "fp8-block": ActivationScheme("group", group_size=128),
}
"""Activation schemes under which cases are multiplied, too: FP8 by FP8."""

TO_END = 3.0
"""Seconds that must be left for another check."""

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Layer:
    """A quantized layer on the device, and its weight as float64 on the CPU."""

    format: Format
    tensors: Tensors
    weight: torch.Tensor
    kernel: Kernel

    def linear(
        self, activations: torch.Tensor, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> torch.Tensor:
        """Multiplies by the layer, or by other tensors of its format."""
        return self.kernel.linear(activations, tensors or self.tensors, self.format)


def measure(bench: Bench) -> Iterator[Record]:
    """Yields errors and checks of each case, first of one case of each format.

    Results at unaligned addresses come last, since kernels may be compiled again for them.
    """
    shape, rows = (DRY_SHAPE, (1, 17)) if bench.is_dry else (SHAPE, ROWS)
    ordered = sorted(CASES, key=lambda case: case.id not in REPRESENTATIVES)
    if bench.is_dry:
        ordered = [case for case in ordered if case.id in REPRESENTATIVES or case.id in SCHEMES]
    for case in ordered:
        yield from _guarded(bench, case.id, lambda case=case: _check(bench, case, shape, rows))
    for case in ordered:
        if case.id in SCHEMES:
            label = f"{case.id}, {SCHEMES[case.id].strategy} activations"
            yield from _guarded(bench, label, lambda case=case: _rounded(case, shape, bench, rows))
    for case in ordered:
        if case.id in REPRESENTATIVES:
            label = f"{case.id}, unaligned"
            yield from _guarded(bench, label, lambda case=case: [_unaligned(bench, case, shape)])


def _guarded(bench: Bench, label: str, call: Callable[[], Iterable[Record]]) -> Iterator[Record]:
    """Yields the records of a check, and that of its failure or of the time that it did not get."""
    if bench.seconds_left < TO_END:
        yield missing("late", "no time was left", case=label)
        return
    try:
        yield from call()
    except Exception as error:
        yield bench.outlived("case", error, case=label)


def _check(bench: Bench, case: Case, shape: tuple[int, int], rows: tuple[int, ...]) -> Iterator[Record]:
    layer = _make(case, shape, bench.device)
    for dtype in DTYPES:
        yield from _errors(case.id, layer, dtype, rows)
        yield _bits(case.id, layer, dtype, bench.is_dry)
    yield from _nan(case, layer)


def tables(records: list[Record]) -> list[Table]:
    """Returns the worst errors by kernel, and the cases that failed."""
    kernels = sorted({record["kernel"] for record in select(records, "error")})
    rows = []
    for kernel in kernels:
        found = list(select(records, "error", kernel=kernel))
        worst = max(found, key=lambda record: record["roundings"])
        where = f"{worst['case']}, {worst['dtype']}, M = {worst['rows']}"
        cases = len({record["case"] for record in found})
        rows.append((kernel, str(cases), f"{worst['roundings']:.3f}", f"{worst['error']:.2e}", where))
    header = ("kernel", "cases", "roundings", "relative error", "where")
    note = (
        "The largest error against fp64, in roundings of the activations' dtype, and over the largest result."
    )
    failed = [(record["case"], record["missing"]) for record in records if "missing" in record]
    for record in (*select(records, "bits"), *select(records, "unaligned")):
        broken = [name for name in ("weights", "unaligned", "twice") if not record.get(name, True)]
        if broken:
            failed.append((f"{record['case']}, {record['dtype']}", f"other bits: {', '.join(broken)}"))
    failed += [(record["case"], "NaN codes") for record in select(records, "nan") if not record["nan"]]
    return [
        Table("Errors", note, header, rows),
        Table("Failures", f"{len(failed)} in all.", ("case", "what"), failed),
    ]


def values(records: list[Record], ceilings: dict[str, float]) -> Values:
    """Returns the worst error and the shares of cases that passed.

    A case that raised did not pass. Nothing counts as measured if time was left for some cases only.
    """
    errors = list(select(records, "error"))
    raised = [record["case"] for record in records if record["kind"] == "case"]
    found: dict[str, float | str] = {}
    if errors:
        found["error"] = max(record["roundings"] for record in errors)
    for kind, names in (("bits", ("weights", "twice")), ("unaligned", ("unaligned",)), ("nan", ("nan",))):
        checked = list(select(records, kind))
        failed = sum(case.endswith(", unaligned") == (kind == "unaligned") for case in raised)
        failed *= {"bits": len(DTYPES), "unaligned": 1, "nan": 0}[kind]
        for name in names if checked or failed else ():
            found[name] = sum(record[name] for record in checked) / (len(checked) + failed)
    late = sum(record["kind"] == "late" for record in records)
    if late:
        return {key: f"{value:.3g}, but no time was left for {late} checks" for key, value in found.items()}
    return found


def _make(
    case: Case, shape: tuple[int, int], device: torch.device, scheme: ActivationScheme | None = None
) -> Layer:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(5)) * 0.02
    tensors = case.format.quantize(weight)
    settled = tiny_models.settled(case.format, tensors, case.config, shape, case.schema)
    kernel = choose_kernel("auto", settled, shape[1], shape[0], device.type, scheme)
    on_device = {name: tensor.to(device) for name, tensor in tensors.items()}
    return Layer(settled, on_device, settled.dequantize(tensors).double(), kernel)


def _errors(case: str, layer: Layer, dtype: torch.dtype, rows: tuple[int, ...]) -> Iterator[Record]:
    for count in rows:
        values = torch.randn(count, layer.weight.shape[1], generator=torch.Generator().manual_seed(count))
        values = values.to(dtype)
        found = layer.linear(values.to(_device(layer)))
        yield {
            "kind": "error",
            "case": case,
            "kernel": layer.kernel.name,
            "dtype": _name(dtype),
            "rows": count,
        } | (_compare(found, values.double(), layer.weight, dtype))


def _compare(found: torch.Tensor, values: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> Record:
    """Returns the largest error in roundings: each weight, and the result, may be rounded once."""
    if not found.isfinite().all():
        raise ArithmeticError("a result is not finite")
    exact, rounding = values @ weight.t(), torch.finfo(dtype).eps / 2
    allowed = rounding * (values.abs() @ weight.abs().t() + exact.abs())
    error = (found.cpu().double() - exact).abs()
    roundings = (error / allowed.clamp_min(torch.finfo(dtype).tiny)).max()
    return {"roundings": float(roundings), "error": float(error.max() / exact.abs().max())}


def _bits(case: str, layer: Layer, dtype: torch.dtype, is_short: bool) -> Record:
    """Compares single weights with the CPU's, and results with those of a second call."""
    device, expected = _device(layer), layer.weight.to(dtype).t()
    ones = torch.eye(layer.weight.shape[1], dtype=dtype)[: 64 if is_short else None].to(device)
    seen = [torch.equal(layer.linear(ones).cpu(), expected[: len(ones)])]
    seen += [torch.equal(layer.linear(ones[:16]).cpu(), expected[:16])]
    seen += [
        torch.equal(layer.linear(ones[at : at + 1]).cpu(), expected[at : at + 1]) for at in (0, 1, 7, 63)
    ]
    values = (
        torch.randn(16, layer.weight.shape[1], generator=torch.Generator().manual_seed(1))
        .to(dtype)
        .to(device)
    )
    parts = [values[:1], values]
    first = [layer.linear(part) for part in parts]
    second = [layer.linear(part) for part in parts]
    return {
        "kind": "bits",
        "case": case,
        "kernel": layer.kernel.name,
        "dtype": _name(dtype),
        "weights": all(seen),
        "twice": all(map(torch.equal, first, second)),
    }


def _unaligned(bench: Bench, case: Case, shape: tuple[int, int]) -> Record:
    """Compares results with those of the same tensors at other addresses."""
    layer, dtype = _make(case, shape, bench.device), DTYPES[0]
    values = torch.randn(16, shape[1], generator=torch.Generator().manual_seed(1)).to(dtype).to(bench.device)
    parts = [values[:1], values]
    whole = [layer.linear(part) for part in parts]
    moved = [_moved(layer.tensors, offset) for offset in OFFSETS]
    equal = [
        torch.equal(layer.linear(part, tensors), expected)
        for tensors in moved
        for part, expected in zip(parts, whole, strict=True)
    ]
    labels = {"case": case.id, "kernel": layer.kernel.name, "dtype": _name(dtype)}
    return {"kind": "unaligned", **labels, "unaligned": all(equal)}


def _moved(tensors: Tensors, offset: int) -> Tensors:
    """Returns copies of the tensors that start `offset` bytes, or one element, after an aligned address."""
    moved = {}
    for name, tensor in tensors.items():
        skip = max(offset, tensor.element_size())
        skip -= skip % tensor.element_size()
        memory = torch.empty(tensor.nbytes + skip, dtype=torch.uint8, device=tensor.device)
        moved[name] = memory[skip:].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    return moved


def _nan(case: Case, layer: Layer) -> Iterator[Record]:
    """Puts a NaN into one row of FP8 codes."""
    codes = layer.tensors[layer.format.codes_name]
    if codes.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2) or codes.dim() != 2:
        return
    damaged = codes.cpu().clone()
    damaged.view(torch.uint8)[3, 5] = 0x7F
    tensors = {**layer.tensors, layer.format.codes_name: damaged.to(codes.device)}
    on_cpu = {name: tensor.cpu() for name, tensor in tensors.items()}
    expected = layer.format.dequantize(on_cpu).isnan().any(1)
    ones = torch.ones(1, layer.weight.shape[1], dtype=torch.bfloat16, device=codes.device)
    found = layer.linear(ones, tensors).cpu()[0].isnan()
    yield {"kind": "nan", "case": case.id, "kernel": layer.kernel.name, "nan": torch.equal(found, expected)}


def _rounded(case: Case, shape: tuple[int, int], bench: Bench, rows: tuple[int, ...]) -> Iterator[Record]:
    """Yields the errors of products whose activations are rounded as well."""
    scheme = SCHEMES[case.id]
    layer = _make(case, shape, bench.device, scheme)
    on_cpu = {name: tensor.cpu() for name, tensor in layer.tensors.items()}
    for count in rows:
        values = torch.randn(count, shape[1], generator=torch.Generator().manual_seed(count)).bfloat16()
        if layer.kernel.rounds:
            found = layer.kernel.linear(values.to(bench.device), layer.tensors, layer.format, scheme)
            exact = quantize_activations(values.float(), scheme, on_cpu)  # codes times scales, unrounded
        else:
            exact = quantize_activations(values, scheme, on_cpu)
            found = layer.linear(exact.to(bench.device))
        yield {
            "kind": "error",
            "case": f"{case.id}, {scheme.strategy} activations",
            "kernel": layer.kernel.name,
            "dtype": "bfloat16",
            "rows": count,
            **_compare(found, exact.double(), layer.weight, torch.bfloat16),
        }


def _device(layer: Layer) -> torch.device:
    return next(iter(layer.tensors.values())).device


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
