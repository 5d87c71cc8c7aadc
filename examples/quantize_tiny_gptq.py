"""Make `tests/data/tiny-llama-gptq` with gptqmodel (4 bits, group 128, symmetric): a real peer's file for the
tests.

pip install gptqmodel
python examples/quantize_tiny_gptq.py tests/data/tiny-llama OUTPUT_FOLDER
"""

import argparse
import pathlib
import random
import shutil

from gptqmodel import GPTQModel, QuantizeConfig
from train_tiny import is_held_out, read_documents

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("output", type=pathlib.Path)
    arguments = parser.parse_args()
    documents = [text for text in read_documents() if not is_held_out(text)]
    random.Random(0).shuffle(documents)
    text = "\n\n".join(documents)[:128_000]
    samples = [text[start : start + 1000] for start in range(0, len(text) - 1000, 1000)]
    model = GPTQModel.load(str(arguments.model), QuantizeConfig(bits=4, group_size=128))
    model.quantize(samples, batch_size=4)
    model.save(str(arguments.output))
    for name in TOKENIZER_FILES:
        shutil.copy(arguments.model / name, arguments.output / name)


if __name__ == "__main__":
    main()
