"""The table of the parts, in their order."""

from __future__ import annotations

from benchmarks.gpu.runner import Part

__all__ = ["PARTS"]

PARTS = (
    Part(1, "facts", 20, "benchmarks.gpu.facts"),
    Part(2, "compile", 25, "benchmarks.gpu.compile_table"),
    Part(3, "exact", 60, "benchmarks.gpu.exact"),
    Part(4, "kernels", 85, "benchmarks.gpu.products"),
    Part(5, "link", 25, "benchmarks.gpu.link"),
    Part(6, "offload", 85, "benchmarks.gpu.offload", models=("8b-fp8", "8b-gptq4")),
    Part(7, "resident", 50, "benchmarks.gpu.resident", models=("8b-fp8", "8b-gptq4", "8b-nf4", "8b-awq")),
    Part(8, "moe", 60, "benchmarks.gpu.moe", models=("moe-mxfp4",)),
    Part(9, "suite", 90, "benchmarks.gpu.suite"),
)
