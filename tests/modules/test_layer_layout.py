"""The text of a layout describes the layer in every process."""

import subprocess
import sys

import pytest

from hfq.errors import SetupError
from hfq.formats.gguf.block_rows import Gguf
from hfq.formats.gptq import Gptq
from hfq.modules.layer_layout import LayerLayout, layer_text, layout_of
from hfq.tensor_spec import Blocks, Segment, StoredOrder

GPTQ = Gptq(4, 32, True, "stored", g_idx_length=64)
FIELDS = GPTQ, 96, 64, "cpp", "reference", None, ("qweight", "scales")


def test_a_text_is_read_back_as_the_same_layout():
    assert layout_of(layer_text(*FIELDS)) == LayerLayout(*FIELDS)


def test_nested_values_are_read_back():
    blocks = Blocks("Q4_K", rows=StoredOrder(0, 1, 2, 16, 1), is_layer=True)
    fields = Gguf(blocks), 32, 256, "cpp", "reference", None, ("weight",), (Segment(0, 64, "U8", (2, 32)),)
    assert layout_of(layer_text(*fields)) == LayerLayout(*fields)


def test_another_process_writes_the_same_text():
    lines = (
        "from hfq.formats.gptq import Gptq",
        "from hfq.modules.layer_layout import layer_text",
        "layer = Gptq(4, 32, True, 'stored', g_idx_length=64)",
        "print(layer_text(layer, 96, 64, 'cpp', 'reference', None, ('qweight', 'scales')))",
    )
    other = subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True
    )
    assert other.stdout.strip() == layer_text(*FIELDS)


@pytest.mark.parametrize("change", [("Gptq", "Unknown"), ("num_bits", "bits_of_yore"), ("{", "[")])
def test_a_text_of_another_version_is_an_error(change):
    with pytest.raises(SetupError, match="a graph that this version of hfq made"):
        layout_of(layer_text(*FIELDS).replace(*change))
