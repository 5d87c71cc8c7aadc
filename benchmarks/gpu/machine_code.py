"""Compilation of the Triton kernels for GPUs that are not there, and counts in their machine code."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hfq.formats import Format
from hfq.formats.codecs.dtypes import torch_dtype
from hfq.kernels.cuda.expert_products import ExpertStack, Routing
from hfq.kernels.cuda.launch import FEW_ROWS, Launch, Product
from hfq.kernels.cuda.layers import describe

__all__ = ["SHARED_LIMITS", "Compiled", "compile_launch", "make_launches"]

SHARED_LIMITS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may use, by compute capability without its point."""

_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)(.*);")


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Attributes:
        registers: Registers of a thread.
        stack: Bytes of a thread's stack, to which registers spill.
        shared: Bytes of shared memory of a program.
        instructions: Instructions of the loops, or of the kernel if it has none, per weight that a thread
            decodes there; of the kernel itself if it decodes no weight.
        loads: Instructions that load from memory, by name.
        tensor: Instructions of tensor cores.
    """

    registers: int
    stack: int
    shared: int
    instructions: float
    loads: dict[str, int]
    tensor: int


def make_launches(
    weight_format: Format,
    in_features: int,
    out_features: int,
    rows: int,
    dtype: torch.dtype,
    experts: int = 0,
) -> Iterator[tuple[Launch, tuple]]:
    """Yields the launches of a product, and their arguments, which have shapes alone.

    Args:
        weight_format: The format of the layer.
        in_features: The size of an input.
        out_features: The size of an output.
        rows: The number of rows, or of tokens.
        dtype: The dtype of the rows.
        experts: The number of experts, of which each token has one; 0 for a layer by itself.
    """
    tensors = {
        spec.name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtypes[0]), device="meta")
        for spec in weight_format.tensor_specs(in_features, out_features)
        if spec.role not in ("meta", "bias")
    }
    activations = torch.empty(rows, in_features, dtype=dtype, device="meta")
    if experts:
        size = 1 if rows <= FEW_ROWS else 16
        index = torch.empty(rows, 1, dtype=torch.int64, device="meta")
        routing = Routing.of(index, activations[:, :1], experts, size)
        stack = ExpertStack([(tensors, weight_format)] * experts)
        made = stack.product(dtype, size).launches(activations, routing, are_tokens=True)
    else:
        out = torch.empty(rows, out_features, dtype=dtype, device="meta")
        made = Product(describe(weight_format, tensors), dtype, rows, None).launches(activations, out)
    for launch, _, arguments in made:
        yield launch, arguments


def compile_launch(launch: Launch, arguments: tuple, target: int | str) -> Compiled:
    """Compiles the variant of a kernel that these arguments launch.

    Args:
        launch: The kernel, with its constants.
        arguments: Its arguments; pointers and sizes that are divisible by 16 are compiled as such.
        target: A compute capability without its point, or the name of an AMD architecture.
    """
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = launch.kernel.arg_names
    signature, constants, attributes = {}, {}, {}
    fixed = {
        launch.kernel.params[i].name for i in range(len(names)) if launch.kernel.params[i].do_not_specialize
    }
    for place, (name, value) in enumerate(zip(names, (*arguments, *launch.constants), strict=True)):
        if place >= len(arguments) or (type(value) is int and value == 1 and name not in fixed):
            signature[name], constants[(place,)] = "constexpr", value
            continue
        signature[name] = _type_of(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0 and name not in fixed):
            attributes[(place,)] = [["tt.divisibility", 16]]
    is_amd = isinstance(target, str)
    made = compile_kernel(
        ASTSource(launch.kernel, signature, constants, attributes),
        target=GPUTarget("hip", target, 64) if is_amd else GPUTarget("cuda", target, 32),
        options=launch.options,
    )
    constants = dict(zip(names[-len(launch.constants) :], launch.constants, strict=True))
    read = _read_amd(made) if is_amd else _read_nvidia(made, constants.get("TILES", 1))
    threads = launch.options["num_warps"] * (64 if is_amd else 32)
    weights = _weights_of(launch, constants) / threads
    return dataclasses.replace(read, instructions=read.instructions / max(weights, 1))


def _weights_of(launch: Launch, constants: dict[str, Any]) -> int:
    """Returns the weights that a program decodes in a step of its innermost loop."""
    sizes = [constants.get(name, 1) for name in ("BLOCK_W", "BLOCK_N", "BLOCK_K", "BLOCK_J")]
    return math.prod(sizes) * constants["LAYOUT"].positions if launch.kernel.__name__ != "prepare" else 0


def _type_of(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        kinds = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "u8"}
        name = str(value.dtype).removeprefix("torch.")
        return f"*{kinds.get(name) or name.replace('int', 'i')}"
    return "fp32" if isinstance(value, float) else "i32"


def _read_amd(made: Any) -> Compiled:
    text = made.asm["amdgcn"]
    registers = int(re.search(r"\.vgpr_count:\s+(\d+)", text)[1])  # type: ignore[index]
    stack = int(re.search(r"\.private_segment_fixed_size:\s+(\d+)", text)[1])  # type: ignore[index]
    tensor = len(re.findall(r"^\s+v_mfma", text, re.MULTILINE))
    loads = {
        name: len(re.findall(rf"^\s+(?:global|buffer)_load_{name}\b", text, re.MULTILINE))
        for name in ("dword", "dwordx2", "dwordx4", "ubyte", "ushort")
    }
    instructions = len(re.findall(r"^\s+[vs]_", text, re.MULTILINE))
    return Compiled(registers, stack, made.metadata.shared, instructions, loads, tensor)


def _read_nvidia(made: Any, repeats: int) -> Compiled:
    from triton import knobs

    tools = knobs.nvidia
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        usage = _run(tools.cuobjdump.path, "-res-usage", str(file))
        code = _run(tools.cuobjdump.path, "-sass", str(file))
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", usage).groups()  # type: ignore[union-attr]
    lines = [match.groups() for match in map(_INSTRUCTION.match, code.splitlines()) if match]
    body, inner = _loops(lines)
    instructions = len(inner) + (len(body) - len(inner)) / repeats
    loads: dict[str, int] = {}
    for _, name, _ in body:
        if name.startswith(("LDG", "LDGSTS")):
            loads[name] = loads.get(name, 0) + 1
    tensor = sum(name.startswith(("HMMA", "HGMMA", "UTCHMMA")) for _, name, _ in lines)
    return Compiled(int(registers), int(stack), made.metadata.shared, instructions, loads, tensor)


Lines = list[tuple[str, str, str]]


def _loops(lines: Lines) -> tuple[Lines, Lines]:
    """Returns the instructions of the longest loop and of the longest loop in it, or the kernel twice.

    A loop reaches from the target of a branch back to the branch.
    """
    spans = []
    for address, name, rest in lines:
        target = re.search(r"0x([0-9a-f]+)", rest)
        if name.startswith("BRA") and target and int(target[1], 16) < int(address, 16):
            spans.append((int(target[1], 16), int(address, 16)))
    spans.sort(key=lambda span: span[0] - span[1])
    outer = spans[0] if spans else (0, 1 << 62)
    inner = next((span for span in spans if outer[0] < span[0] and span[1] < outer[1]), outer)
    return _between(lines, outer), _between(lines, inner)


def _between(lines: Lines, span: tuple[int, int]) -> Lines:
    return [line for line in lines if span[0] <= int(line[0], 16) <= span[1] and line[1] != "NOP"]


def _run(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
