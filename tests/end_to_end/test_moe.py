"""Tests of mixtures of experts: each naming scheme loads, matches transformers, and saves."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

from hfq import HfqConfig
from hfq.formats.bitsandbytes import Bnb4Bit
from hfq.formats.unquantized import Unquantized
from tests.support import moe_models, tiny_models
from tests.support.moe_models import (
    BNB_CONFIG,
    EXPERTS,
    FP8,
    FP8_CONFIG,
    IDS,
    LAYERS,
    OLD_MIXTRAL,
    ONE,
    PLACEMENTS,
    SCHEMES,
    Scheme,
    is_quantized,
    load,
    logits,
)


@pytest.fixture(scope="module", params=SCHEMES, ids=lambda scheme: scheme.id)
def written(request):
    return moe_models.write(request.param, is_quantized(request.param))


@pytest.fixture(scope="module")
def path(written, tmp_path_factory):
    return written.save(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def resident(path):
    return logits(load(path))


@pytest.fixture(scope="module")
def by_expert():
    return moe_models.write(moe_models.BY_EXPERT)


def test_the_logits_are_those_of_transformers_own_experts(written, resident):
    expected = logits(moe_models.plain_model(written.scheme.model, written.plain))
    # the weights are bit-identical, but products of panels and grouped experts may sum in another order
    assert (resident - expected).norm() <= 1e-5 * expected.norm()
    assert (resident - logits(moe_models.plain_model(written.scheme.model))).norm() > 1e-3 * expected.norm()


@pytest.mark.parametrize("placement", ["cpu", "half", "disk"])
def test_every_placement_gives_the_same_logits(path, resident, placement):
    model = load(path, PLACEMENTS[placement])
    assert torch.equal(logits(model), resident)
    assert torch.equal(logits(model), resident)


@pytest.mark.parametrize(
    "placement", ["half", *(pytest.param(other, marks=pytest.mark.slow) for other in ("cpu", "disk"))]
)
def test_saving_gives_back_names_and_bytes(path, resident, placement, tmp_path):
    load(path, PLACEMENTS[placement]).save_pretrained(tmp_path)
    assert tiny_models.digests(tmp_path) == tiny_models.digests(path)
    assert torch.equal(logits(load(tmp_path)), resident)


def expert_of(name: str) -> tuple[int, int] | None:
    """Returns (layer, expert) of an expert tensor of transformers, from its name in hfq's model."""
    parts = name.split(".")
    return (int(parts[2]), int(parts[parts.index("experts") + 1])) if "experts" in parts else None


def routed_to(args) -> list[int]:
    """Returns the experts that transformers routes a token to.

    Experts of Llama 4 each receive the token, multiplied by its weight.
    """
    hidden_states, *index = args
    return (
        index[0].unique().tolist()
        if index
        else hidden_states.view(EXPERTS, -1).any(-1).nonzero().flatten().tolist()
    )


def test_a_forward_from_disk_reads_the_routed_experts_and_no_others(written, path):
    routed = set()
    plain = moe_models.plain_model(written.scheme.model, written.plain)
    for number, layer in enumerate(plain.model.layers):
        for name, module in layer.named_modules():
            if name.rpartition(".")[2] == "experts":
                note = lambda _, args, number=number: routed.update((number, e) for e in routed_to(args))  # noqa: E731
                module.register_forward_pre_hook(note)
    token = torch.tensor([[9]])
    expected = logits(plain, token)
    model = load(path, {"": "disk"})
    loading, experts = model.hf_quantizer.loading, model.hf_quantizer.loading.offloader.experts
    read = []
    for places in experts._places.values():
        fill = places.memory.fill
        places.memory.fill = lambda number, expert, fill=fill: (
            read.append(expert.name),
            fill(number, expert),
        )[1]
    found = logits(model, token)
    names = {expert.name for expert in experts.experts}
    wanted = {name for name in names if expert_of(f"{name}.up_proj.weight") in routed}
    assert len(routed) in (moe_models.CHOSEN, moe_models.CHOSEN * LAYERS)
    assert wanted < names
    assert sorted(read) == sorted(wanted)
    assert not any(
        expert_of(f"{module.name}.weight") for unit in loading.offloader.units for module in unit.quantized
    )
    logits(model, token)
    assert (
        len(read) == len(wanted) == experts.misses == experts.hits
    )  # in the second pass, all of them are in the cache
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def experts_paths(model) -> list[str]:
    return [name for name, _ in model.named_modules() if name.rpartition(".")[2] == "experts"]


def test_experts_of_one_layer_may_have_homes_of_their_own(path, resident):
    experts = experts_paths(load(path))[-1]
    model = load(path, {"": "cpu", f"{experts}.1": "disk", f"{experts}.3": "disk"})
    resting = {name for name, parameter in model.named_parameters() if parameter.is_meta}
    assert {name.removeprefix(f"{experts}.").partition(".")[0] for name in resting} == {"1", "3"}
    assert torch.equal(logits(model), resident)


def test_a_checkpoint_whose_experts_lie_in_several_files_computes_the_same(path, resident, tmp_path):
    load(path).save_pretrained(tmp_path, max_shard_size="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 4
    for placement in ("cpu", "disk"):
        assert torch.equal(logits(load(tmp_path, PLACEMENTS[placement])), resident)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_the_base_model_reads_the_checkpoint_of_a_whole_one(path, placement):
    with torch.no_grad():
        expected = load(path).model(input_ids=IDS).last_hidden_state
        config = HfqConfig(quantize_activations=False)
        base = AutoModel.from_pretrained(
            path, quantization_config=config, dtype=torch.float32, device_map=PLACEMENTS[placement]
        )
        assert torch.equal(base(input_ids=IDS).last_hidden_state, expected)


def test_threads_that_share_a_model_on_disk_each_get_their_own_result(path, resident):
    model = load(path, {"": "disk"})
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: logits(model), range(4)))
    assert all(torch.equal(each, resident) for each in found)


@pytest.mark.parametrize("family", moe_models.FAMILIES)
def test_the_names_that_transformers_itself_saves_are_read_packed(family, tmp_path):
    path, plain = moe_models.pack_saved(family, FP8, FP8_CONFIG, tmp_path)
    expected = logits(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32))
    resident, streamed = load(path), load(path, {"": "disk"})
    assert experts_paths(resident)
    assert torch.equal(logits(resident), logits(streamed))
    assert (logits(resident) - expected).norm() <= 1e-5 * expected.norm()  # see above
    streamed.save_pretrained(tmp_path / "again")
    assert tiny_models.digests(tmp_path / "again") == tiny_models.digests(path)


@pytest.mark.parametrize("placement", ["cpu", "half", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_expert_left_dense_among_packed_ones_computes_and_is_saved_back(
    by_expert, tmp_path, placement, dtype
):
    fused = {name: tensor.clone() for name, tensor in by_expert.plain.items()}
    generator = torch.Generator().manual_seed(4)
    tensors = moe_models.without(by_expert.tensors, f"{ONE}.")
    for projection, target, rows in (
        ("gate_proj", "gate_up_proj", slice(0, 96)),
        ("up_proj", "gate_up_proj", slice(96, 192)),
        ("down_proj", "down_proj", slice(0, 64)),
    ):
        place = fused[f"model.layers.1.mlp.experts.{target}"][2, rows]
        place.copy_((torch.randn(place.shape, generator=generator) * 0.3).to(dtype))
        tensors[f"{ONE}.{projection}.weight"] = place.to(dtype).clone()
    path = by_expert.save(tmp_path / "mixed", tensors)
    model = load(path, PLACEMENTS[placement])
    expected = logits(moe_models.plain_model("qwen3", fused))
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()  # see above
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("placement", ["cpu", "half", "disk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_that_are_all_dense_beside_packed_attention_compute_and_are_saved_back(
    tmp_path, placement, dtype
):
    dense = moe_models.write(
        Scheme("mixtral", "mixtral", Unquantized(), {}, OLD_MIXTRAL, ("w1", "w3", "w2")), lambda name: False
    )
    packed = moe_models.write(
        Scheme("mixtral", "mixtral", Bnb4Bit(), BNB_CONFIG, OLD_MIXTRAL, ("w1", "w3", "w2"))
    )
    tensors = moe_models.without(
        packed.tensors, *(name.rpartition(".w")[0] for name in packed.tensors if ".experts." in name)
    )
    experts = {name: tensor.to(dtype) for name, tensor in dense.tensors.items() if ".experts." in name}
    plain = {
        name: (dense.plain[name].to(dtype).float() if ".experts." in name else tensor)
        for name, tensor in packed.plain.items()
    }
    path = packed.save(tmp_path / "mixed", tensors | experts)
    model = load(path, PLACEMENTS[placement])
    expected = logits(moe_models.plain_model("mixtral", plain))
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()  # see above
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("placement", ["cpu", "half", "disk"])
def test_dense_experts_that_are_stored_fused_stay_transformers_own(tmp_path, placement):
    written = moe_models.write(next(scheme for scheme in SCHEMES if scheme.model == "granite"))
    plain, tensors = (
        dict(written.plain),
        moe_models.without(written.tensors, "model.layers.1.block_sparse_moe.input_linear"),
    )
    experts = moe_models.plain_model("granite").model.layers[1].block_sparse_moe.experts
    plain["model.layers.1.block_sparse_moe.experts.gate_up_proj"] = experts.gate_up_proj.detach()
    plain["model.layers.1.block_sparse_moe.experts.down_proj"] = experts.down_proj.detach()
    tensors = moe_models.without(tensors, "model.layers.1.block_sparse_moe.output_linear")
    tensors["model.layers.1.block_sparse_moe.input_linear.weight"] = experts.gate_up_proj.detach()
    tensors["model.layers.1.block_sparse_moe.output_linear.weight"] = experts.down_proj.detach()
    path = written.save(tmp_path / "mixed", tensors)
    model = load(path, PLACEMENTS[placement])
    expected = logits(moe_models.plain_model("granite", plain))
    assert (logits(model) - expected).norm() <= 1e-5 * expected.norm()  # see above
    model.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("model", ["mixtral", "qwen3"])
@pytest.mark.parametrize("placement", ["cpu", "half", "disk"])
def test_a_packed_router_routes_by_its_dequantized_weight(tmp_path, model, placement):
    written = moe_models.write(
        Scheme(model, model, FP8, FP8_CONFIG), lambda name: name.endswith(("_proj", "mlp.gate"))
    )
    path = written.save(tmp_path / "packed")
    assert any(name.endswith("mlp.gate.weight_scale") for name in written.tensors)
    loaded = load(path, PLACEMENTS[placement])
    expected = logits(moe_models.plain_model(model, written.plain))
    assert (logits(loaded) - expected).norm() <= 1e-5 * expected.norm()  # see above
    loaded.save_pretrained(tmp_path / "saved")
    assert tiny_models.digests(tmp_path / "saved") == tiny_models.digests(path)


@pytest.mark.parametrize("placement", ["cpu", "disk"])
def test_a_packed_gate_of_a_shared_expert_is_a_linear_layer_like_any_other(tmp_path, placement):
    scheme = Scheme("qwen2", "qwen2", FP8, FP8_CONFIG)
    written = moe_models.write(scheme, lambda name: name.endswith(("_proj", "shared_expert_gate")))
    assert written.tensors["model.layers.0.mlp.shared_expert_gate.weight"].dtype == torch.float8_e4m3fn
    expected = logits(moe_models.plain_model("qwen2", written.plain))
    found = logits(load(written.save(tmp_path), PLACEMENTS[placement]))
    assert (found - expected).norm() <= 1e-5 * expected.norm()  # see above


def test_a_training_step_gives_the_dense_parts_gradients_through_the_experts(path, written):
    model = load(path)
    plain = moe_models.plain_model(written.scheme.model, written.plain)
    embedded = [moe.get_input_embeddings().weight.requires_grad_() for moe in (model, plain)]
    grads = []
    for moe, weight in zip((model, plain), embedded, strict=True):
        moe(input_ids=IDS, labels=IDS).loss.backward()
        grads.append(weight.grad)
    # products in the backward pass sum in another order than transformers' grouped ones
    assert (grads[0] - grads[1]).norm() <= 1e-4 * grads[1].norm()
