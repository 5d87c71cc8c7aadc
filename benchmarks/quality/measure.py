"""Effect of quantization on one model: perplexity, and divergence from the float model.

Weight-only methods replace the weights by rounded ones. int8 products replace every linear layer of the
decoder layers. GPTQ runs through `hfq.quantize`, and hfq loads the checkpoint.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.quality.outliers import Outliers, with_outliers
from benchmarks.quality.training import CONTEXT
from benchmarks.records import Record
from hfq import Recipe
from hfq.evaluation.divergence import Score, Totals, score_logits, surprise
from hfq.evaluation.windows import Batch, cut
from hfq.quantization.textbook.llm_int8 import int8_linear, outlier_features

__all__ = ["Subject", "largest_activation"]

_WINDOWS_AT_ONCE = 4
Quantize = Callable[[torch.Tensor], torch.Tensor]
"""Function from a weight [out, in] to the float32 values of its quantized form."""


@dataclass
class Subject:
    """A float model, its text, and its results on that text.

    Attributes:
        name: Name of the model in tables.
        outliers: The injected outliers.
        model: The model in float32.
        batches: The text.
        calibration: Windows [n, 256] for methods that need activations.
        records: Measurements, the float model first.
        logits: Logits of the float model for each batch.
    """

    name: str
    outliers: Outliers
    model: Any
    batches: Sequence[Batch]
    calibration: torch.Tensor
    records: list[Record] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        name: str,
        model: Any,
        outliers: Outliers,
        held_out: torch.Tensor,
        calibration: torch.Tensor,
        windows: int,
    ) -> Subject:
        """Injects outliers into a copy of a model, and runs it on `windows` held-out windows."""
        batches = cut(held_out[: windows * CONTEXT], CONTEXT, batch_size=_WINDOWS_AT_ONCE)
        subject = cls(name, outliers, with_outliers(model, outliers), batches, calibration)
        started = time.perf_counter()
        subject.logits = subject._logits(subject.model)
        subject._keep("float", "float", None, subject._score(subject.logits), started)
        return subject

    @property
    def linears(self) -> dict[str, torch.nn.Linear]:
        """Returns the linear layers of the decoder layers by name."""
        layers = self.model.get_decoder().layers
        return {
            name: module for name, module in layers.named_modules() if isinstance(module, torch.nn.Linear)
        }

    def round(self, method: str, bits: float, quantize: Quantize) -> None:
        """Measures the model with all weights of its decoder layers rounded."""
        started, linears = time.perf_counter(), self.linears
        floats = {name: linear.weight for name, linear in linears.items()}
        try:
            for linear in linears.values():
                linear.weight = torch.nn.Parameter(quantize(linear.weight.detach()), requires_grad=False)
            score = self._score(self._logits(self.model))
        finally:
            for name, linear in linears.items():
                linear.weight = floats[name]
        self._keep("weights", method, bits, score, started)

    def multiply_int8(self, method: str, **options: Any) -> None:
        """Measures the model with int8 products. Options are those of `int8_linear`."""
        started, shares = time.perf_counter(), []

        def product(linear: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
            rows = inputs.flatten(0, -2)
            if options.get("threshold") is not None:
                shares.append(float(outlier_features(rows, options["threshold"]).float().mean()))
            found = int8_linear(rows, linear.weight.detach(), **options).view(*inputs.shape[:-1], -1)
            return found if linear.bias is None else found + linear.bias

        with _instead(self.linears, product):
            score = self._score(self._logits(self.model))
        self._keep(
            "int8", method, 8, score, started, outlier_share=sum(shares) / len(shares) if shares else 0.0
        )

    def solve(self, method: str, bits: int, **options: Any) -> None:
        """Measures a GPTQ checkpoint from `hfq.quantize`, with a scale and zero point per row."""
        from transformers import AutoModelForCausalLM

        import hfq
        from hfq import HfqConfig

        started = time.perf_counter()
        recipe = Recipe("gptq", bits=bits, group_size=-1, sym=False, **options)
        with tempfile.TemporaryDirectory() as folder:
            source, output = Path(folder, "floats"), Path(folder, "gptq")
            self.model.save_pretrained(source)
            windows = list(self.calibration)
            hfq.quantize(
                source,
                recipe,
                output_dir=output,
                dataset=windows,
                num_calibration_samples=len(windows),
                max_seq_length=CONTEXT,
            )
            model = AutoModelForCausalLM.from_pretrained(
                output, quantization_config=HfqConfig(), dtype=torch.float32
            )
            score = self._score(self._logits(model))
            del model  # its pages belong to a file that is deleted now
        self._keep("weights", method, bits, score, started)

    def _logits(self, model: Any) -> list[torch.Tensor]:
        with torch.no_grad():
            return [
                batch.scored(model(input_ids=batch.input_ids, use_cache=False).logits)
                for batch in self.batches
            ]

    def _score(self, logits: Sequence[torch.Tensor]) -> Score:
        totals = Totals()
        for batch, expected, found in zip(self.batches, self.logits, logits, strict=True):
            totals.add(surprise(found, batch.targets))
            totals.add_comparison(*score_logits(expected, found))
        return totals.score()

    def _keep(
        self, kind: str, method: str, bits: float | None, score: Score, started: float, **more: float
    ) -> None:
        floats = self.records[0]["perplexity"] if self.records else score.perplexity
        self.records.append(
            {
                "model": self.name,
                "outliers": str(self.outliers),
                "kind": kind,
                "method": method,
                "bits": bits,
                "tokens": score.tokens,
                "perplexity": score.perplexity,
                "ratio": score.perplexity / floats,
                "kl": score.kl_mean,
                "top1": score.top1_agreement,
                "seconds": time.perf_counter() - started,
                **more,
            }
        )


def largest_activation(subject: Subject) -> float:
    """Returns the largest input magnitude of the decoder layers' linear layers on the subject's text."""
    found = [0.0]

    def look(linear: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
        found.append(float(inputs.abs().max()))
        return torch.nn.functional.linear(inputs, linear.weight, linear.bias)

    with _instead(subject.linears, look), torch.no_grad():
        for batch in subject.batches:
            subject.model(input_ids=batch.input_ids, use_cache=False)
    return max(found)


@contextlib.contextmanager
def _instead(linears: dict[str, torch.nn.Linear], forward: Callable) -> Iterator[None]:
    """Makes every layer call `forward(layer, inputs)` within the context."""
    try:
        for linear in linears.values():
            linear.forward = functools.partial(forward, linear)  # type: ignore[method-assign]
        yield
    finally:
        for linear in linears.values():
            vars(linear).pop("forward", None)
