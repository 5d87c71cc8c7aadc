"""Tests of sizes as people write them."""

import pytest

from hfq.errors import PlacementError
from hfq.placement.estimate.hardware import Hardware, parse_gpus, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("24GiB", 24 << 30),
        ("64 GB", 64 * 10**9),
        ("1.5e9B", 1_500_000_000),
        ("512mib", 512 << 20),
        ("7B", 7),
        (".5TiB", 1 << 39),
    ],
)
def test_sizes(text, nbytes):
    assert parse_size(text, "--cpu") == nbytes


@pytest.mark.parametrize(
    "text", ["", "24B", "0B", "-1GiB", "24 GiBs", "lots", "1e30B", "nan", "inf", "GiB", "24GiB×2"]
)
def test_what_is_no_size_is_refused(text):
    with pytest.raises(PlacementError, match=r"--cpu .* is not a size") as refused:
        parse_size(text, "--cpu", least=25)
    assert "24GiB" in refused.value.fix


@pytest.mark.parametrize("text", ["24", "0", "1.5e9", 24])
def test_a_size_without_a_unit_is_refused(text):
    with pytest.raises(PlacementError, match="has no unit") as refused:
        parse_size(text, "--cpu")
    assert f"--cpu {text}GiB" in refused.value.fix
    assert f"--cpu {text}B" in refused.value.fix


@pytest.mark.parametrize(
    ("texts", "gpus"),
    [
        (["24GiB×2"], (24 << 30, 24 << 30)),
        (["24GiBx2"], (24 << 30, 24 << 30)),
        (["80GB*1", "24GiB"], (80 * 10**9, 24 << 30)),
        (["Small-8GB ×3"], (8, 8, 8)),
        (["small-8gb"], (8,)),
        ([], ()),
    ],
)
def test_accelerators(texts, gpus):
    assert parse_gpus(texts, {"Small-8GB": 8}) == gpus


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Smal-8GB", "--gpu Smal-8GB is not a size. Did you mean 'Small-8GB'"),
        ("rtx4090", "--gpu rtx4090 is not a size"),
        ("Other-8GB×2", "--gpu Other-8GB×2 is not a size"),
        ("24GiB×0", "invalid number"),
        ("24GiB×9999", "invalid number"),
    ],
)
def test_unknown_accelerators_are_refused(text, said):
    with pytest.raises(PlacementError, match=said):
        parse_gpus([text], {"Small-8GB": 8})


def test_the_first_accelerator_computes():
    assert Hardware(cpu=5).main == "cpu"
    assert Hardware((3, 4), 5, 6).capacities() == {"cuda:0": 3, "cuda:1": 4, "cpu": 5, "disk": 6}
    assert Hardware((3, 4), 5, kind="xpu").capacities() == {"xpu:0": 3, "xpu:1": 4, "cpu": 5}
    assert Hardware((3,), kind="xpu").main == "xpu:0"
