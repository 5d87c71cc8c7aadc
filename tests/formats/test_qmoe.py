"""Tests of QMoE: ternary rounding, and the errors of offsets, codes, and configs that cannot be right."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from hfq import CheckpointError, FormatError, HfqConfig
from hfq.formats.qmoe import DICTIONARY, Qmoe
from tests.support import tiny_models
from tests.support.tiny_models import described, settled

CONFIG = {"quant_method": "qmoe", "dictionary": DICTIONARY}
SIZE = (6, 75)


@pytest.fixture
def weight():
    return torch.randn(SIZE, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def layer(weight):
    """Returns (format, tensors) of a layer as detected."""
    tensors = Qmoe().quantize(weight)
    return settled(Qmoe(), tensors, CONFIG, SIZE), tensors


def test_each_weight_becomes_the_nearest_of_three(layer, weight):
    found, tensors = layer
    low, high = tensors["ter_minmax"].float().view(-1, 2).numpy().T
    expected = np.zeros(SIZE, dtype=np.float32)
    for row in range(SIZE[0]):
        for column in range(SIZE[1]):
            candidates = (np.float32(0), low[row], high[row])
            expected[row, column] = min(candidates, key=lambda value: abs(value - weight[row, column].item()))
    assert torch.equal(found.dequantize(tensors), torch.from_numpy(expected))


def test_panels_of_any_rows_are_slices_of_the_weight(layer):
    found, tensors = layer
    whole = found.dequantize(tensors)
    for start in range(SIZE[0]):
        for stop in range(start + 1, SIZE[0] + 1):
            panel = torch.full((stop - start, SIZE[1]), float("nan"))
            found.dequantize_into(panel, tensors, start)
            assert torch.equal(panel, whole[start:stop])


def test_rows_of_one_sign_and_of_zeros_keep_their_zeros():
    weight = torch.tensor([[0.0, 1.0, 0.0, 1.0], [0.0, -1.0, 0.0, 0.0], [0.0] * 4, [2.0] * 4])
    tensors = Qmoe().quantize(weight)
    assert torch.equal(settled(Qmoe(), tensors, CONFIG, (4, 4)).dequantize(tensors), weight)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda offsets: offsets + 1, "1 to"),
        (lambda offsets: torch.cat([offsets[:-1], offsets[-1:] + 1]), "0 to"),
        (lambda offsets: torch.cat([offsets[:2], offsets[1:2], offsets[3:]]), "with 0 to"),
        (lambda offsets: torch.cat([offsets[:2], offsets[:1] - 2**31, offsets[3:]]), "with -2147483"),
        (lambda offsets: torch.cat([offsets[:2], offsets[:1] + 2**31 - 1, offsets[3:]]), "to 2147483"),
        (lambda offsets: offsets.flip(0), "to 0, with -"),
    ],
    ids=["not from 0", "beyond the codes", "an empty row", "negative", "too large", "descending"],
)
def test_offsets_that_cannot_be_right_are_refused(layer, change, found):
    weight_format, tensors = layer
    damaged = change(tensors["row_off"].long()).to(torch.int32)
    with pytest.raises(FormatError, match=r"(?s)not possible. Nothing was loaded.*m.row_off") as caught:
        weight_format.resolve("m", tensors | {"row_off": damaged})
    assert found in caught.value.found


def test_codes_of_too_many_or_too_few_columns_are_refused_before_a_product(layer):
    weight_format, tensors = layer
    for code in (0, -1):
        codes = tensors["w_comp"].clone()
        codes[0] = code  # one pair, or ten of them
        with pytest.raises(FormatError, match=r"(?s)not those of the row's width.*rows 0 to 5.*Fix:"):
            weight_format.dequantize(tensors | {"w_comp": codes})


@pytest.mark.parametrize("size", [(7, 75), (5, 75)], ids=["one row more", "one row less"])
def test_another_number_of_rows_has_other_specs(layer, size):
    found = Qmoe.detect("m", described("m", layer[1]), CONFIG)
    specs = {spec.name: spec.shape for spec in found.tensor_specs(size[1], size[0])}
    assert specs["row_off"] != layer[1]["row_off"].shape
    assert specs["ter_minmax"] != layer[1]["ter_minmax"].shape


@pytest.mark.parametrize("size", [(6, 4), (6, 75_000)], ids=["narrow", "wide"])
def test_a_size_that_the_codes_cannot_fill_is_refused(layer, size):
    found = Qmoe.detect("m", described("m", layer[1]), CONFIG)
    with pytest.raises(FormatError, match="number of QMoE codes does not fit") as caught:
        found.sized(size[1], size[0])
    assert "6 rows" in caught.value.expected


@pytest.mark.parametrize("change", [{"entries": 32768}, {"p0": 0.9}, {"max_pairs": 7}, {"shift": 1}], ids=str)
def test_another_dictionary_is_refused(layer, change):
    with pytest.raises(FormatError, match="dictionary in quantization_config is not supported"):
        Qmoe.detect("m", described("m", layer[1]), CONFIG | {"dictionary": DICTIONARY | change})


def test_a_config_without_a_dictionary_means_the_only_one(layer):
    assert Qmoe.detect("m", described("m", layer[1]), {"quant_method": "qmoe"}) is not None


def test_codes_that_are_damaged_on_disk_are_refused_where_they_are_decoded(tmp_path):
    tensors = tiny_models.model_tensors(Qmoe())
    tensors[f"{tiny_models.FIRST}.w_comp"][-1] = -1
    path = tiny_models.write_model(tmp_path, tensors, CONFIG)
    for device in ("cpu", "disk"):
        model = AutoModelForCausalLM.from_pretrained(
            path, quantization_config=HfqConfig(), device_map={"": device}
        )
        with torch.no_grad(), pytest.raises(FormatError, match="not those of the row's width"):
            model(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("device", ["cpu", "disk"])
@pytest.mark.parametrize(
    ("local", "change", "named"),
    [
        ("row_off", lambda t: torch.cat([t, t[-1:]]), r"expected I32 \[129\], found I32 \[130\]"),
        ("row_off", lambda t: t[1:], r"expected I32 \[129\], found I32 \[128\]"),
        ("ter_minmax", lambda t: t[2:], r"expected BF16 \[256\], found BF16 \[254\]"),
        ("row_off", lambda t: t.flip(0), "offsets of QMoE rows are not possible"),
        ("w_comp", lambda t: t[:-1], "offsets of QMoE rows are not possible"),
        ("w_comp", lambda t: t[:9], "number of QMoE codes does not fit"),
    ],
    ids=["a row more", "a row less", "bounds less", "descending", "a code less", "few codes"],
)
def test_a_damaged_layer_is_refused_before_anything_is_computed(tmp_path, device, local, change, named):
    tensors = tiny_models.model_tensors(Qmoe())
    name = f"{tiny_models.FIRST}.{local}"
    path = tiny_models.write_model(tmp_path, tensors | {name: change(tensors[name]).clone()}, CONFIG)
    with pytest.raises(FormatError, match=rf"(?s)Nothing was loaded.*{named}|{named}.*Nothing was loaded"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map={"": device})


@pytest.mark.parametrize("device", ["cpu", "disk"])
def test_a_truncated_file_is_refused(tmp_path, device):
    path = tiny_models.write_model(tmp_path, tiny_models.model_tensors(Qmoe()), CONFIG)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match="truncated by 100 bytes"):
        AutoModelForCausalLM.from_pretrained(path, quantization_config=HfqConfig(), device_map={"": device})
