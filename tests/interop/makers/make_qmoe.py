"""Writer of tests/data/goldens/qmoe-sub1.safetensors, with the tables of QMoE's own code.

    python make_qmoe.py SUB1 [--output FOLDER]

SUB1 is the file sub1.py of github.com/IST-DASLab/qmoe. Its function `setup` makes both tables. QMoE packs and
multiplies on a GPU alone, so `pack` and `unpack` are the loops of its kernels Sub1PreparePack and
Sub1MatVec, one row after the other. Rows have an odd width. One of them has no negative weight, and one is
constant.
"""

import argparse
import ast
import heapq
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

ROWS, COLUMNS, ROOT = 32, 75, 1 << 16
OUTPUT = Path(__file__).parents[2] / "data" / "goldens"
CONFIG = {"quant_method": "qmoe", "dictionary": {"p0": 0.885, "entries": 65536, "max_pairs": 14}}


def tables(file: Path) -> tuple[list[int], list[list[int]]]:
    """Returns the decode table and the trie of `setup`."""
    tree = ast.parse(file.read_text())
    setup = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "setup"]
    names = {"np": np, "torch": torch, "heapq": heapq}
    exec(compile(ast.Module(setup, []), str(file), "exec"), names)
    decode, trie = names["setup"]()
    return decode.tolist(), trie.tolist()


def pack(trie: list[list[int]], ternary: list[list[int]]) -> tuple[list[int], list[int]]:
    codes, offsets = [], [0]
    for row in ternary:
        node = ROOT
        for column in range(0, len(row), 2):
            pair = 0
            for place in (1, 0):
                if column + place < len(row):
                    pair = 3 * pair + row[column + place]
            if trie[node][pair] == -1:
                codes.append(node)
                node = ROOT
            node = trie[node][pair]
        codes.append(node)
        offsets.append(len(codes))
    return codes, offsets


def unpack(
    decode: list[int], codes: list[int], offsets: list[int], bounds: torch.Tensor, width: int
) -> torch.Tensor:
    weight = torch.zeros(len(offsets) - 1, width + 28)
    for row, (low, high) in enumerate(bounds.float().view(-1, 2).tolist()):
        column = 0
        for code in codes[offsets[row] : offsets[row + 1]]:
            for thread in range(28):
                word = decode[2 * code + thread // 14]
                weight[row, column + thread] = (0.0, low, high)[word >> 4 + 2 * (thread % 14) & 3]
            column += 2 * (word & 15)
    return weight[:, :width]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("sub1", type=Path)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    options = parser.parse_args()
    decode, trie = tables(options.sub1)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randint(-9, 10, (ROWS, COLUMNS), generator=generator).clamp(-1, 1)
    weight *= torch.rand(ROWS, COLUMNS, generator=generator) < torch.linspace(0.02, 0.9, ROWS)[:, None]
    weight = (weight * torch.rand(ROWS, 1, generator=generator)).bfloat16()
    weight[3].clamp_(min=0)
    weight[7] = 0.25
    low, high = weight.amin(1), weight.amax(1)
    ternary = torch.zeros(weight.shape, dtype=torch.int32)
    ternary[weight == low[:, None]] = 1
    ternary[weight == high[:, None]] = 2
    bounds = torch.stack((low, high), 1).flatten()
    codes, offsets = pack(trie, ternary.tolist())
    expected = unpack(decode, codes, offsets, bounds, COLUMNS)
    file = options.output / "qmoe-sub1.safetensors"
    tensors = {
        "m.row_off": torch.tensor(offsets, dtype=torch.int32),
        "m.w_comp": torch.tensor(codes, dtype=torch.int32).to(torch.int16),
        "m.ter_minmax": bounds,
        "expected": expected[::4].bfloat16().contiguous(),
    }
    metadata = {"quantization_config": json.dumps(CONFIG), "rows": "every fourth", "peer": "qmoe 9110baa"}
    metadata |= {"in_features": str(COLUMNS), "out_features": str(ROWS)}
    save_file(tensors, file, metadata)
    print(file.name, file.stat().st_size, bool(torch.equal(expected, weight.float())))


if __name__ == "__main__":
    main()
