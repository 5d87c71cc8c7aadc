"""Driver that quantizes a float checkpoint, with one decoder layer in memory at a time."""

from __future__ import annotations

import functools
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.write_checkpoint import JOURNAL, check_target
from hfq.checkpoint.writer import CopiedBytes, StoredTensor
from hfq.errors import CheckpointError, FormatError, SetupError
from hfq.formats import Format
from hfq.formats.codecs.dtypes import safetensors_dtype
from hfq.formats.layouts.rounding import rounded_tensors
from hfq.loading.custom_code import load_tokenizer
from hfq.loading.matching.quantizable_layers import (
    check_unfused,
    find_all_linears,
    find_linears,
    find_skipped,
    find_unsuitable,
    is_expert,
    local_name,
    size_of,
)
from hfq.quantization.calibration_data import Calibration, Text, calibrate
from hfq.quantization.distillation import Teacher
from hfq.quantization.finished_layer import put_finished, quantize_decoder_layer
from hfq.quantization.float_checkpoint import Source, sizes_known
from hfq.quantization.journal import Journal, begun_folder
from hfq.quantization.layer_inputs import Call, capture, run_decoder_layer
from hfq.quantization.malloc_trim import trim_heap
from hfq.quantization.progress import LayerReport, Progress, QuantizeReport
from hfq.quantization.side_files import finish, side_file_names
from hfq.recipes.recipe import METHODS, Recipe
from hfq.tensor_spec import DTYPE_BITS, TensorInfo
from hfq.version import __version__

__all__ = ["quantize"]

SAMPLES, SEQUENCE_LENGTH = 128, 2048


def quantize(
    model: str | os.PathLike | nn.Module,
    recipe: Recipe | str,
    output_dir: str | os.PathLike,
    dataset: Text | None = None,
    num_calibration_samples: int = SAMPLES,
    max_seq_length: int | None = None,
    modules_to_not_convert: list[str] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    trust_remote_code: bool = False,
) -> QuantizeReport:
    """Writes a quantized copy of a float checkpoint, one decoder layer at a time.

    Peak memory is at most one decoder layer in float32, the hidden states of the calibration data, and 400
    MiB including all imports. AWQ and distillation use more. If a run is killed, start it again: it continues
    after the last finished layer and writes the same bytes.

    Args:
        model: Folder of the checkpoint, or a model that hfq loaded from it.
        recipe: Method and its options, such as `Recipe("gptq", bits=4, group_size=128)`, or the name of a
            method.
        output_dir: Folder to create. It must be absent or empty.
        dataset: Calibration data for methods that run the model. See
            `hfq.quantization.calibration_data.Text`.
        num_calibration_samples: Number of calibration sequences.
        max_seq_length: Tokens per sequence. None means 2048, or the model's number of positions if that is
            smaller.
        modules_to_not_convert: Modules that stay unquantized.
        on_progress: Function that is called after each decoder layer.
        trust_remote_code: True to run Python code that the checkpoint contains.

    Returns:
        The error of each layer, and the size and duration of the run.

    Raises:
        SetupError: The recipe or the calibration data is not usable, or an unfinished run with other options
            exists for this folder.
        FormatError: The model is already quantized, or the format cannot hold a layer. Nothing was written.
        CheckpointError: The checkpoint is damaged, or the output cannot be written.
    """
    recipe = _as_recipe(recipe)
    source = Source(model, recipe, trust_remote_code)
    source.checkpoint.check_safetensors("Nothing was written")
    target = check_target(source.checkpoint, output_dir, marker=JOURNAL)
    tokenizer = functools.partial(load_tokenizer, source.checkpoint.root, trust_remote_code)
    text = _calibration(source, recipe, dataset, tokenizer, num_calibration_samples, max_seq_length)
    job = _Job(source, recipe, modules_to_not_convert, target, text)
    try:
        return job.run(on_progress)
    finally:
        job.journal.close()


class _Job:
    """One quantization run."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        modules_to_not_convert: list[str] | None,
        target: Path,
        calibration: Calibration | None,
    ) -> None:
        self.source = source
        self.recipe = recipe
        self.calibration = calibration
        skipped = [*find_skipped(source.model, modules_to_not_convert), *find_unsuitable(source.model)]
        for name in source.decoder_layers:
            with source.on_meta(name) as decoder_layer:
                check_unfused(decoder_layer, name, skipped)
        self.linears = {name: _layers_of(source, name, skipped) for name in source.decoder_layers}
        if recipe.is_for_experts:
            self.linears = {
                name: {full: size for full, size in sizes.items() if is_expert(full)}
                for name, sizes in self.linears.items()
            }
        self.sizes = {name: size for sizes in self.linears.values() for name, size in sizes.items()}
        if not self.sizes:
            raise SetupError(
                "No layer is left to quantize.",
                expected="routed experts"
                if recipe.is_for_experts
                else "linear layers other than heads and routers",
                found="none",
                fix="Remove entries from modules_to_not_convert.",
            )
        self.format: Format = recipe.weight_format(self.sizes.values())
        _check_room(target, self._check_sizes())
        job: dict[str, Any] = {
            "hfq": __version__,
            "source": source.digest(),
            "recipe": recipe.to_dict(),
            "layers": sorted(self.sizes),
        }
        job["calibration"] = calibration.digest if calibration else None
        self.journal = Journal(target, job, side_file_names(source.checkpoint))

    def run(self, progress: Callable[[Progress], None] | None) -> QuantizeReport:
        started = time.perf_counter()
        layers: list[LayerReport] = []
        done_before = sum(shard in self.journal for shard in self._shards().values())
        self._write_rest()
        hidden, calls = self._captured()
        self.teacher = Teacher(hidden) if self.recipe.distill_steps else None
        made = 0
        for number, (name, shard) in enumerate(self._shards().items(), 1):
            is_made = shard not in self.journal
            self._block(
                name, shard, hidden, calls.get(name, ()), is_last=number == len(self.source.decoder_layers)
            )
            made += is_made
            reports = tuple(LayerReport(**entry) for entry in self._notes(shard)["layers"])
            layers += reports
            seconds = time.perf_counter() - started
            eta = seconds / made * (len(self.source.decoder_layers) - number) if made else None
            if progress is not None:
                progress(Progress(name, number, len(self.source.decoder_layers), reports, seconds, eta))
        report = QuantizeReport(
            self.journal.target,
            self.format.describe(),
            tuple(layers),
            self._written_nbytes(),
            done_before,
            time.perf_counter() - started,
            {
                name: tuple(found)
                for name, shard in self._shards().items()
                if (found := self._notes(shard)["distilled"])
            },
        )
        finish(self.journal, self.source, self.recipe, self.format, report, self._dense(), self.calibration)
        return report

    def _block(
        self,
        name: str,
        shard: str,
        hidden: list[torch.Tensor],
        calls: tuple[Call, ...] | list[Call],
        is_last: bool,
    ) -> None:
        """Quantizes or restores one decoder layer, and advances the hidden states through it."""
        is_done = shard in self.journal
        if is_done and (not hidden or is_last):
            return
        held = () if self.recipe.changes_floats else self.linears[name]
        with self.source.in_memory(name, held) if hidden else self.source.on_meta(name) as decoder_layer:
            linears = {
                full: decoder_layer.get_submodule(local_name(full, name)) for full in self.linears[name]
            }
            targets = self.teacher.advance(decoder_layer, calls) if self.teacher else None
            if is_done:
                changed = self._notes(shard)["changed"]
                put_finished(
                    self.journal.folder / shard, self.source, name, linears, changed, self.format, self.recipe
                )
            else:
                made = quantize_decoder_layer(
                    self.source, name, linears, self.format, self.recipe, hidden, calls, targets
                )
                self.journal.add(shard, dict(self._stored(name, made.quantized, made.changed)), made.notes)
            for index, call in enumerate(calls if not is_last else ()):
                hidden[index] = run_decoder_layer(decoder_layer, hidden[index], call)
        trim_heap()

    def _captured(self) -> tuple[list[torch.Tensor], dict[str, list[Call]]]:
        """Returns the inputs of all decoder layers, or nothing if no layer is left that needs them."""
        if self.calibration is None or all(shard in self.journal for shard in self._shards().values()):
            return [], {}
        width = (
            1 if self.recipe.distill_steps else max(size for sizes in self.sizes.values() for size in sizes)
        )
        captured = capture(self.source.model, self.source.decoder_layers, self.calibration.batches(width))
        trim_heap()
        return captured

    def _stored(
        self,
        decoder_layer: str,
        quantized: Mapping[str, Mapping[str, torch.Tensor]],
        changed: Mapping[str, torch.Tensor],
    ) -> Iterator[tuple[str, StoredTensor]]:
        """Yields the tensors of a decoder layer's shard, widest dtype first.

        Quantized tensors replace weights. Changed parameters are new. All other tensors are copied unchanged.
        """
        new = {
            self.source.stored(f"{decoder_layer}.{local}").name: _as_stored(tensor)
            for local, tensor in changed.items()
        }
        owners = {self.source.stored(f"{full}.weight").name: full for full in quantized}
        entries: list[tuple[str, StoredTensor]] = []
        for info in self.source.stored_of(decoder_layer):
            if info.name not in owners:
                entries.append((info.name, new.get(info.name) or _copied(info, self.source.reader)))
                continue
            full = owners[info.name]
            entries += [
                (f"{self.source.stored_module(full)}.{local}", _as_stored(tensor))
                for local, tensor in quantized[full].items()
            ]
        return iter(sorted(entries, key=lambda entry: -DTYPE_BITS[entry[1][0]]))

    def _write_rest(self) -> None:
        """Writes the tensors outside all decoder layers unchanged."""
        shard = self._name(0)
        in_blocks = {info.name for name in self.source.decoder_layers for info in self.source.stored_of(name)}
        rest = [info for name, info in self.source.checkpoint.tensors.items() if name not in in_blocks]
        if shard not in self.journal and rest:
            rest.sort(key=lambda info: -DTYPE_BITS[info.dtype])
            self.journal.add(
                shard, {info.name: _copied(info, self.source.reader) for info in rest}, {"layers": []}
            )

    def _notes(self, shard: str) -> dict[str, Any]:
        return self.journal.shards[shard]["notes"]

    def _shards(self) -> dict[str, str]:
        return {name: self._name(number) for number, name in enumerate(self.source.decoder_layers, 1)}

    def _name(self, number: int) -> str:
        return f"model-{number + 1:05}-of-{len(self.source.decoder_layers) + 1:05}.safetensors"

    def _dense(self) -> list[str]:
        """Returns the stored names of linear layers that stay unquantized."""
        names = set(find_all_linears(self.source.model))
        for decoder_layer in self.source.decoder_layers:
            names |= _layers_of(self.source, decoder_layer, []).keys()
        return sorted(self.source.stored_module(name) for name in names - self.sizes.keys())

    def _written_nbytes(self) -> int:
        written = Checkpoint.from_files([self.journal.folder / shard for shard in self.journal.shards])
        return sum(info.nbytes for info in written.tensors.values())

    def _check_sizes(self) -> int:
        """Returns the bytes of all output tensors, but for codes whose number is not known.

        Raises an error before anything is written if the format cannot hold a layer.
        """
        self.recipe.check_sizes(self.sizes)
        replaced, nbytes = set(), 0
        for name, (out_features, in_features) in self.sizes.items():
            info = self.source.stored(f"{name}.weight")
            if not info.name.endswith("weight"):
                raise FormatError(
                    "A layer's weight has an unexpected name. Nothing was written.",
                    tensor=info.name,
                    expected="a tensor name that ends in 'weight'",
                    found=str(info),
                    fix="Add this layer to modules_to_not_convert.",
                )
            replaced.add(info.name)
            nbytes += _packed_nbytes(self.format, in_features, out_features)
        return nbytes + sum(
            info.nbytes for info in self.source.checkpoint.tensors.values() if info.name not in replaced
        )


def _as_recipe(given: Recipe | str) -> Recipe:
    if isinstance(given, str):
        return Recipe(given)
    if not isinstance(given, Recipe):
        raise SetupError(
            "quantize() requires a recipe.",
            expected="Recipe(method), with method " + " or ".join(METHODS),
            found=repr(given)[:80],
            fix='Pass Recipe("gptq", bits=4).',
        )
    return given


def _calibration(
    source: Source,
    recipe: Recipe,
    text: Text | None,
    tokenizer: Callable[[], Any],
    samples: int,
    length: int | None,
) -> Calibration | None:
    if not recipe.needs_calibration:
        return None
    if text is None:
        what = f"method={recipe.method!r}" if recipe.measures else "distill_steps"
        other = "method='qmoe'" if recipe.is_for_experts else "method='rtn' without distill_steps"
        raise SetupError(
            f"{what} requires calibration data.",
            expected="a text file, texts, or token ids in `dataset`",
            found="no `dataset`",
            fix=f"Pass text that resembles the model's inputs, or use {other}.",
        )
    config = source.model.config
    longest = sizes_known(config, "max_position_embeddings", "n_positions")
    vocabulary = sizes_known(config, "vocab_size")
    length = length or min(SEQUENCE_LENGTH, longest or SEQUENCE_LENGTH)
    return calibrate(text, tokenizer, vocabulary or 1 << 62, samples, length, longest)


def _layers_of(source: Source, name: str, skipped: list[str]) -> dict[str, tuple[int, int]]:
    with source.on_meta(name) as decoder_layer:
        return {full: size_of(layer) for full, layer in find_linears(decoder_layer, name, skipped).items()}


def _packed_nbytes(weight_format: Format, in_features: int, out_features: int) -> int:
    return sum(nbytes for _, _, nbytes in rounded_tensors(weight_format, out_features, in_features).values())


def _check_room(target: Path, nbytes: int) -> None:
    free = shutil.disk_usage(target.parent).free
    there = sum(file.lstat().st_size for file in begun_folder(target).glob("*.safetensors"))
    if free + there < nbytes:
        raise CheckpointError(
            "The disk has too little free space for the quantized checkpoint. Nothing was written.",
            file=target,
            expected=f"{nbytes:,} bytes",
            found=f"{free:,} bytes free",
            fix="Free disk space, or choose another folder.",
        )


def _copied(info: TensorInfo, reader: Reader) -> StoredTensor:
    return info.dtype, info.shape, CopiedBytes(reader, info.range)


def _as_stored(tensor: torch.Tensor) -> StoredTensor:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return safetensors_dtype(tensor.dtype), tuple(tensor.shape), memoryview(flat.numpy())  # type: ignore[arg-type]
