"""Table of other projects' checkpoints, each loaded in three placements.

    PYTHONPATH=. python tests/interop/table.py FOLDER ...

The exit status is 1 if a promise does not hold.

Each folder holds a checkpoint and `reference_weightonly.safetensors`: tokens, and the logits of a plain
float32 model with the exactly dequantized weights. The columns are:

- error: relative L2 error of the logits.
- equal: True if logits are bit-identical on the CPU, with one layer on disk, and with all layers on disk.
- resident: bytes of the quantized modules in memory, divided by their bytes on disk.
- saved: True if a save from each placement returns every quantized byte, and all bytes of GGUF files.
"""

import sys
import tempfile
from collections import Counter
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import logging

from hfq import HfqError
from hfq.formats.detection.unsupported import UnsupportedFormatError
from tests.support import tiny_models
from tests.support.models import load

LIMIT, MOST_RESIDENT = 1e-5, 1.02


def placements(model) -> list[dict]:
    names = [name for name, _ in model.named_modules() if name.count(".") <= 3]
    layer = next(name for number in (".1", ".0") for name in names if name.endswith(number))
    return [{"": "cpu", layer: "disk"}, {"": "disk"}]


def logits(model, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens).logits


def is_saved(model, folder: Path, names: set[str]) -> bool:
    with tempfile.TemporaryDirectory() as saved:
        model.save_pretrained(saved)
        if any(folder.glob("*.gguf")):
            return tiny_models.gguf_bytes(Path(saved)) == tiny_models.gguf_bytes(folder)
        source, found = tiny_models.digests(folder), tiny_models.digests(Path(saved))
    return source.keys() == found.keys() and all(found[name] == source[name] for name in names)


def row(folder: Path) -> dict:
    """Returns the table's values for one checkpoint.

    Raises:
        HfqError: hfq cannot load it.
    """
    reference = load_file(folder / "reference_weightonly.safetensors")
    tokens, expected = reference["input_ids"], reference["logits_fp32_weightonly"]
    resident = load(folder, {"": "cpu"})
    models = [resident, *(load(folder, device_map) for device_map in placements(resident))]
    found = [logits(model, tokens) for model in models]
    packed = resident.hf_quantizer.loading.quantized.values()
    names = {info.part_of or info.name for module in packed for info in module.infos.values()}
    stored = sum(info.nbytes for module in packed for info in module.infos.values())
    held = sum(parameter.nbytes for module in packed for parameter in module.parameters())
    return {
        "dialect": resident.hf_quantizer.loading.describe_formats(),
        "error": float((found[0] - expected).norm() / expected.norm()),
        "equal": all(torch.equal(found[0], other) for other in found[1:]),
        "resident": held / stored,
        "saved": all(is_saved(model, folder, names) for model in models),
    }


def main(folders: list[str]) -> int:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    print(f"{'checkpoint':44} {'format':44} {'error':>8} {'equal':>5} {'resident':>8} {'saved':>5}")
    for folder in map(Path, folders):
        if not (folder / "reference_weightonly.safetensors").is_file():
            continue
        try:
            found = row(folder)
        except HfqError as error:
            what = "refused" if isinstance(error, UnsupportedFormatError) else "FAILED"
            counts[what] += 1
            print(f"{folder.name:44} {what}: {str(error).splitlines()[0]}")
            continue
        holds = (
            found["error"] <= LIMIT
            and found["equal"]
            and found["resident"] <= MOST_RESIDENT
            and found["saved"]
        )
        counts["hold" if holds else "FAILED"] += 1
        marks = f"{found['error']:8.1e} {found['equal']!s:>5} {found['resident']:8.3f} {found['saved']!s:>5}"
        print(f"{folder.name:44} {found['dialect'][:44]:44} {marks}{'' if holds else '  FAILED'}", flush=True)
    print(", ".join(f"{count} {what}" for what, count in counts.items()))
    return 1 if counts["FAILED"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
