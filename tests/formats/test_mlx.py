"""Tests of MLX's configs. Goldens and the contract tests check its values."""

import pytest
import torch

from hfq.errors import FormatError
from hfq.formats import detect_formats, tensors_by_module
from hfq.formats.mlx.affine import Mlx, layer_options
from hfq.formats.mlx.float_modes import MlxFp4
from hfq.tensor_spec import ByteRange, TensorInfo

MODULE = "model.layers.0.mlp.down_proj"
CONFIG = {"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine"}


def infos(
    words: int, groups: int, scales: str = "BF16", module: str = MODULE, **more
) -> dict[str, TensorInfo]:
    tensors = {
        "weight": ("U32", (8, words)),
        "scales": (scales, (8, groups)),
        "biases": ("BF16", (8, groups)),
        **more,
    }
    return {
        f"{module}.{local}": TensorInfo(f"{module}.{local}", *stored, ByteRange("f", 0, 0))
        for local, stored in tensors.items()
        if stored
    }


def detect(tensors: dict[str, TensorInfo], config: dict):
    (found,) = detect_formats(tensors_by_module(tensors), config).values()
    return found.sized(128, 8)


@pytest.mark.parametrize("config", [CONFIG, {}, {"quant_method": "metal", "bits": 4, "group_size": 64}])
def test_the_shapes_tell_bits_and_group_size(config):
    found = detect(infos(16, 2), config)
    assert (found.num_bits, found.group_size, found.describe()) == (4, 64, "mlx int4 g64")


@pytest.mark.parametrize(
    "own", [{"bits": 6, "group_size": 32}, {"bits": 6, "group_size": 32, "mode": "affine"}]
)
def test_a_layers_own_entry_wins_and_others_are_refused_by_what_all_have(own):
    assert detect(infos(24, 4), CONFIG | {MODULE: own}).num_bits == 6
    with pytest.raises(FormatError, match="contradict the config"):
        detect(infos(24, 4), CONFIG)


@pytest.mark.parametrize("name", ["switch_mlp", "experts"])
def test_the_experts_of_a_layer_share_one_entry(name):
    own = {"bits": 8, "group_size": 32}
    config = CONFIG | {f"model.layers.0.mlp.{name}.up_proj": own}
    assert layer_options("model.layers.0.mlp.experts.7.up_proj", config) is own
    assert layer_options("model.layers.1.mlp.experts.7.up_proj", config) is config


def test_an_entry_without_a_mode_is_affine_beside_a_model_of_floats():
    """mlx-lm stores gpt-oss in this way: mxfp4 experts, and 8 bits for other layers."""
    config = {
        "quant_method": "mlx",
        "group_size": 32,
        "bits": 4,
        "mode": "mxfp4",
        MODULE: {"group_size": 64, "bits": 8},
    }
    assert isinstance(detect(infos(32, 2), config), Mlx)
    floats = infos(16, 4, "U8", "model.layers.0.self_attn.q_proj", biases=None)
    assert detect(floats, config) == MlxFp4(mode="mxfp4")


@pytest.mark.parametrize(
    ("config", "more"),
    [({"mode": "int3"}, {}), ({"mode": []}, {}), ({"mode": "nvfp4"}, {"global_scale": ("F32", ())})],
)
def test_a_mode_that_is_unknown_or_has_a_global_scale_is_refused(config, more):
    with pytest.raises(
        FormatError, match=r"(?s)in an MLX mode that hfq does not support.*--q-mode affine"
    ) as caught:
        detect(infos(16, 8, "U8", biases=None, **more), CONFIG | config)
    assert caught.value.tensor == f"{MODULE}.weight"


@pytest.mark.parametrize("options", [{"bits": 7}, {"bits": "4"}, {"group_size": 0}, {"group_size": True}])
def test_nonsense_in_the_config_is_refused(options):
    with pytest.raises(FormatError, match=next(iter(options))):
        detect(infos(16, 2), CONFIG | options)


@pytest.mark.parametrize(("words", "groups"), [(15, 2), (16, 3), (16, 0), (0, 2)])
def test_shapes_that_are_of_no_layer_are_refused(words, groups):
    with pytest.raises(FormatError, match="do not fit its input"):
        detect(infos(words, groups), {})


def test_a_scale_that_is_not_finite_is_refused():
    tensors = Mlx().quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(0)))
    tensors["biases"][3, 0] = float("inf")
    with pytest.raises(FormatError, match="biases"):
        Mlx().resolve(MODULE, tensors)
