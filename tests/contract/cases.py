"""The cases of the contract tests: each format adds one case for each of its variants."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from hfq.formats.awq import Awq
from hfq.formats.base import Format
from hfq.formats.bitnet import BitNet
from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from hfq.formats.blockwise_int8 import BlockwiseInt8
from hfq.formats.compressed_tensors import IntQuantized, PackQuantized
from hfq.formats.deepseek_v4 import DeepseekMxfp4
from hfq.formats.fp8 import Fp8
from hfq.formats.gemma_qat import GemmaQat
from hfq.formats.gguf.gptqmodel_rows import GptqmodelGguf
from hfq.formats.gpt_oss import GptOssMxfp4
from hfq.formats.gptq import Gptq
from hfq.formats.hqq import Hqq
from hfq.formats.mlx.affine import Mlx
from hfq.formats.mlx.float_modes import MlxFp4, MlxFp8
from hfq.formats.modelopt.experts import ModeloptExpert
from hfq.formats.modelopt.linear import ModeloptInt4, ModeloptInt8
from hfq.formats.mxfp4 import Mxfp4
from hfq.formats.mxfp6 import Mxfp6
from hfq.formats.nvfp4 import Nvfp4
from hfq.formats.nvfp4_e5m3 import Nvfp4E5m3
from hfq.formats.qmoe import DICTIONARY, Qmoe
from hfq.formats.quanto import QuantoBits, QuantoBytes
from hfq.formats.quark import QuarkInt4
from hfq.formats.torchao import Torchao

GPTQMODEL = {"quant_method": "gptq", "checkpoint_format": "gptq", "meta": {"quantizer": ["gptqmodel:7.7.0"]}}


@dataclass(
    frozen=True, eq=False
)  # hashable: pytest runs all tests of a case in sequence, with one set of fixtures
class Case:
    """A variant of a format: the format that quantizes, and the matching quantization_config.

    Attributes of some formats:

    - `schema` returns the file's metadata for one module, if the format stores metadata.
    - `kind` is the name of the weights in optimum-quanto's side file.
    - `text` is the description of the detected format, if the quantizing instance cannot know it before it
      has a weight.
    """

    id: str
    format: Format
    config: dict | None
    text: str | None = None
    schema: Callable[[dict], str] | None = None
    kind: str | None = None


def gptq(id: str, zero_reading: str, config: dict, **options) -> Case:
    weight_format = Gptq(zero_reading=zero_reading, g_idx_length=128, **options)
    hints = {
        "bits": weight_format.num_bits,
        "group_size": weight_format.group_size,
        "sym": weight_format.symmetric,
    }
    return Case(id, weight_format, {**config, **hints})


V2 = {"quant_method": "gptq", "checkpoint_format": "gptq_v2"}
PLANAR = {"quant_method": "gptq", "checkpoint_format": "gptq_p"}
AUTOGPTQ = {"quant_method": "gptq", "checkpoint_format": "gptq"}
MLX = {"quant_method": "mlx", "group_size": 64, "bits": 4, "mode": "affine"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {}}},
}


def compressed_tensors(strategy: str, format: str = "float-quantized", **options) -> dict:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **options}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": group}}


def integers(format: str, strategy: str, num_bits: int, **options) -> dict:
    return compressed_tensors(strategy, format, type="int", num_bits=num_bits, **options)


def awq(version: str, group_size: int) -> dict:
    return {
        "quant_method": "awq",
        "bits": 4,
        "group_size": group_size,
        "zero_point": True,
        "version": version,
    }


def quark(*specs: dict, pack_method: str = "reorder") -> dict:
    weight = [{"is_dynamic": False, **spec} for spec in specs]
    return {
        "quant_method": "quark",
        "global_quant_config": {"weight": weight if len(weight) > 1 else weight[0]},
        "exclude": ["lm_head"],
        "export": {"pack_method": pack_method, "weight_format": "real_quantized"},
    }


def torchao(kind: str) -> Callable[[dict], str]:
    def schema(tensors: dict) -> str:
        parts = [name.removeprefix("_weight_") for name in tensors]
        codes, scale = tensors["_weight_qdata"].shape, tensors["_weight_scale"].shape
        data = {"block_size": [codes[0] // scale[0], codes[1] // scale[1]]}
        return json.dumps({"_type": kind, "_data": data, "_tensor_data_names": parts})

    return schema


DEEPSEEK = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}
GEMMA = {"quant_method": "gemma", "num_bits": 4, "module_quant_configs": None}
SRQ = (("input_activation_scale", "F32", ()), ("output_activation_scale", "F32", ()))
SCALARS = (("input_scale", "BF16", ()), ("output_scale", "BF16", ()))

CASES = [
    gptq("gptq-v1-w4-sym", "word_plus_one", GPTQMODEL, num_bits=4, group_size=64),
    gptq("gptq-v1-w4-asym", "word_plus_one", GPTQMODEL, num_bits=4, group_size=32, symmetric=False),
    gptq("gptq-v2-w4-asym", "stored", V2, num_bits=4, group_size=32, symmetric=False),
    gptq("gptq-v1-w3-sym", "masked_plus_one", GPTQMODEL, num_bits=3, group_size=128),
    gptq("gptq-v1-w2-sym", "word_plus_one", GPTQMODEL, num_bits=2, group_size=32),
    gptq("gptq-v1-w8-channel", "word_plus_one", GPTQMODEL, num_bits=8, group_size=-1),
    gptq("gptq-autogptq-w4", "field_plus_one", AUTOGPTQ, num_bits=4, group_size=128),
    gptq("gptq-planar-w3", "stored", PLANAR, num_bits=3, group_size=64, is_planar=True, symmetric=False),
    gptq("gptq-planar-w5", "stored", PLANAR, num_bits=5, group_size=32, is_planar=True),
    Case("awq-gemm", Awq(version="gemm", group_size=64), awq("gemm", 64)),
    Case("awq-gemm-w3", Awq(version="gemm", group_size=64, num_bits=3), {**awq("gemm", 64), "bits": 3}),
    Case("awq-gemv", Awq(version="gemv", group_size=64), awq("gemv", 64)),
    Case("awq-gemv-fast", Awq(version="gemv_fast", group_size=64), awq("gemv_fast", 64)),
    Case(
        "fp8-block",
        Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    Case(
        "fp8-block-ragged",
        Fp8(strategy="block", block_structure=(48, 80), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 80]},
    ),
    Case(
        "fp8-block-ue8m0",
        Fp8(strategy="block", block_structure=(64, 64), scale_name="weight_scale_inv", scale_dtype="F8_E8M0"),
        {
            "quant_method": "fp8",
            "activation_scheme": "dynamic",
            "weight_block_size": [64, 64],
            "scale_fmt": "ue8m0",
        },
    ),
    Case("fp8-tensor", Fp8(strategy="tensor"), compressed_tensors("tensor")),
    Case("fp8-channel", Fp8(strategy="channel"), compressed_tensors("channel")),
    Case("fp8-group", Fp8(strategy="group", group_size=64), compressed_tensors("group", group_size=64)),
    Case(
        "fp8-mxfp8",
        Fp8(strategy="group", group_size=32, scale_dtype="U8"),
        compressed_tensors("group", "mxfp8-quantized", group_size=32),
    ),
    Case(
        "fp8-mxfp8-blocks",
        Fp8(strategy="block", block_structure=(1, 32), scale_name="weight_scale_inv", scale_dtype="U8"),
        {"quant_method": "mxfp8", "activation_scheme": "dynamic", "weight_block_size": [1, 32]},
    ),
    Case(
        "fp8-autofp8-static",
        Fp8(strategy="tensor", scale_shape=(), input_scale_name="input_scale"),
        {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]},
    ),
    Case(
        "fp8-fbgemm", Fp8(strategy="channel"), {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    ),
    Case(
        "fp8-gptqmodel-reciprocal",
        Fp8(strategy="channel", scale_shape=(1,), scale_name="weight_scale_inv", reciprocal=True),
        {"quant_method": "fp8", "format": "float8_e4m3fn", "bits": 8, "weight_scale_semantics": "inverse"},
    ),
    Case("fp8-e5m2", Fp8(strategy="channel", codes_dtype="F8_E5M2"), compressed_tensors("channel")),
    Case(
        "fp8-modelopt-tensor",
        Fp8(strategy="tensor", scale_shape=()),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    Case(
        "int-quantized-channel",
        IntQuantized(scale_shape=(2, 1)),
        integers("int-quantized", "channel", 8),
        "int-quantized int8 channel",
    ),
    Case(
        "int-quantized-group-asym",
        IntQuantized(scale_shape=(2, 2), zero_dtype="I8"),
        integers("naive-quantized", "group", 8, symmetric=False),
    ),
    Case(
        "pack-quantized-w4",
        PackQuantized(num_bits=4, scale_shape=(1, 2)),
        integers("pack-quantized", "group", 4),
    ),
    Case(
        "pack-quantized-w4-asym",
        PackQuantized(num_bits=4, scale_shape=(1, 4), is_symmetric=False),
        integers("pack-quantized", "group", 4, symmetric=False),
    ),
    Case(
        "pack-quantized-w3-channel",
        PackQuantized(num_bits=3, scale_shape=(1, 1)),
        integers("pack-quantized", "channel", 3),
    ),
    Case(
        "pack-quantized-w8",
        PackQuantized(num_bits=8, scale_shape=(1, 1)),
        integers("pack-quantized", "channel", 8),
    ),
    Case(
        "pack-quantized-w8-asym",
        PackQuantized(num_bits=8, scale_shape=(1, 4), is_symmetric=False),
        integers("pack-quantized", "group", 8, symmetric=False),
    ),
    Case(
        "pack-quantized-g-idx",
        PackQuantized(num_bits=4, scale_shape=(1, 2), is_symmetric=False, has_g_idx=True),
        integers("pack-quantized", "group", 4, symmetric=False, actorder="group"),
    ),
    Case(
        "pack-quantized-w3-words",
        PackQuantized(num_bits=3, scale_shape=(1, 2), is_straddling=False),
        integers("pack-quantized", "group", 3),
    ),
    Case(
        "nvfp4",
        Nvfp4(),
        compressed_tensors("tensor_group", "nvfp4-pack-quantized", num_bits=4, group_size=16),
    ),
    Case(
        "nvfp4-modelopt",
        Nvfp4(stored_codes_name="weight", global_shape=()),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    Case("mxfp4", Mxfp4(), compressed_tensors("group", "mxfp4-pack-quantized", num_bits=4, group_size=32)),
    Case(
        "nvfp4-e5m3",
        Nvfp4E5m3(),
        {"quant_method": "auto-round", "data_type": "nvfp4_v2", "bits": 4, "group_size": 16},
    ),
    Case(
        "mxint4",
        Mxfp4(is_integer=True),
        {"quant_method": "auto-round", "data_type": "mx_int", "bits": 4, "group_size": 32},
    ),
    Case(
        "mxfp4-modelopt",
        Mxfp4(stored_codes_name="weight"),
        {"quant_method": "modelopt", "quant_algo": "mxfp4"},
    ),
    Case("mxfp4-blocks", GptOssMxfp4(), {"quant_method": "mxfp4"}),
    Case(
        "bitsandbytes-int8",
        BnbInt8(scale_shape=(2,), others=(("weight_format", "U8", ()),)),
        {**BNB, "load_in_4bit": False, "load_in_8bit": True},
        "bitsandbytes-int8 int8 channel",
    ),
    Case("bitsandbytes-nf4", Bnb4Bit(), {**BNB, "bnb_4bit_quant_type": "nf4"}),
    Case("bitsandbytes-nf4-bf16", Bnb4Bit(storage="BF16"), {**BNB, "bnb_4bit_quant_storage": "bfloat16"}),
    Case("bitsandbytes-nf4-nested", Bnb4Bit(is_nested=True), {**BNB, "bnb_4bit_use_double_quant": True}),
    Case("bitsandbytes-fp4", Bnb4Bit(quant_type="fp4"), {**BNB, "bnb_4bit_quant_type": "fp4"}),
    Case(
        "torchao-float8",
        Torchao(codes_dtype="F8_E4M3", scale_shape=(2, 1)),
        TORCHAO,
        schema=torchao("Float8Tensor"),
    ),
    Case("torchao-int8", Torchao(scale_shape=(2, 1)), TORCHAO, schema=torchao("Int8Tensor")),
    Case(
        "torchao-intx-asym",
        Torchao(scale_shape=(2, 4), zero_dtype="I8"),
        TORCHAO,
        schema=torchao("IntxUnpackedToInt8Tensor"),
    ),
    Case("quanto-qint8", QuantoBytes(scale_shape=(2, 1), others=SCALARS), None, kind="qint8"),
    Case(
        "quanto-qfloat8",
        QuantoBytes(codes_dtype="F8_E4M3", scale_shape=(2, 1), others=SCALARS),
        None,
        kind="qfloat8",
    ),
    Case("quanto-qint4", QuantoBits(num_bits=4, group_size=64, others=SCALARS), None, kind="qint4"),
    Case("quanto-qint2", QuantoBits(num_bits=2, group_size=32, others=SCALARS), None, kind="qint2"),
    Case("mlx-4bit", Mlx(), MLX),
    Case(
        "mlx-3bit-metal",
        Mlx(num_bits=3, group_size=32, biases_name="qbiases"),
        {"quant_method": "metal", "bits": 3},
    ),
    Case("mlx-6bit", Mlx(num_bits=6, group_size=32), None),
    Case("mlx-8bit", Mlx(num_bits=8, group_size=128), None),
    Case("mlx-mxfp4", MlxFp4(), MLX | {"group_size": 32, "mode": "mxfp4"}),
    Case("mlx-mxfp8", MlxFp8(), MLX | {"group_size": 32, "bits": 8, "mode": "mxfp8"}),
    Case("mlx-nvfp4", MlxFp4(mode="nvfp4"), MLX | {"group_size": 16, "mode": "nvfp4"}),
    Case("hqq-8bit", Hqq(num_bits=8, group_size=64), None),
    Case("hqq-4bit", Hqq(num_bits=4, group_size=64), None),
    Case("hqq-4bit-axis0", Hqq(num_bits=4, group_size=64, axis=0), None),
    Case("hqq-4bit-as-float", Hqq(num_bits=4, group_size=64, codes_dtype="BF16"), None),
    Case("hqq-3bit", Hqq(num_bits=3, group_size=64), None),
    Case("hqq-2bit", Hqq(num_bits=2, group_size=32), None),
    Case("hqq-1bit", Hqq(num_bits=1, group_size=32), None),
    Case(
        "modelopt-w8a8-sq",
        ModeloptInt8(scale_shape=(2,), has_columns=True, others=(("input_scale", "F32", ()),)),
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
        "modelopt-int8 int8 channel pre-scaled",
    ),
    Case(
        "modelopt-w8a8",
        ModeloptInt8(scale_shape=(2,), others=(("input_scale", "F32", ()),)),
        {"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"},
    ),
    Case(
        "modelopt-w8a16", ModeloptInt8(scale_shape=(2,)), {"quant_method": "modelopt", "quant_algo": "W8A16"}
    ),
    Case(
        "modelopt-int4",
        ModeloptInt4(group_size=64, has_columns=True),
        {"quant_method": "modelopt", "quant_algo": "W4A16_AWQ", "group_size": 64},
    ),
    Case(
        "modelopt-experts-nvfp4",
        ModeloptExpert(Nvfp4(stored_codes_name="weight", global_shape=())),
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    ),
    Case(
        "modelopt-experts-fp8",
        ModeloptExpert(Fp8(strategy="tensor", scale_shape=())),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    Case("bitnet-bitlinear", BitNet(), {"quant_method": "bitnet", "modules_to_not_convert": None}),
    Case(
        "bitnet-autobitlinear",
        BitNet(is_divided=False),
        {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
    ),
    Case("mxfp4-deepseek", DeepseekMxfp4(), DEEPSEEK | {"expert_dtype": "fp4"}),
    Case(
        "fp8-block-deepseek",
        Fp8(strategy="block", block_structure=(64, 64), scale_name="scale", scale_dtype="F8_E8M0"),
        DEEPSEEK | {"weight_block_size": [64, 64], "expert_dtype": "fp4"},
    ),
    Case("gemma-qat-4bit", GemmaQat(others=SRQ), GEMMA),
    Case("gemma-qat-2bit", GemmaQat(num_bits=2, others=SRQ), GEMMA | {"num_bits": 2}),
    Case("gemma-qat-8bit", GemmaQat(num_bits=8), GEMMA | {"num_bits": 8}),
    Case("gemma-qat-embedding", GemmaQat(is_embedding=True, blocks=4), GEMMA | {"quantize_embeddings": True}),
    Case(
        "blockwise-int8",
        BlockwiseInt8(block=(128, 128)),
        {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    Case(
        "blockwise-int8-ragged",
        BlockwiseInt8(block=(48, 80)),
        {"quant_method": "blockwise_int8", "activation_scheme": "dynamic", "weight_block_size": [48, 80]},
    ),
    Case("gptqmodel-gguf-q8_0", GptqmodelGguf("Q8_0"), {"quant_method": "gguf", "bits": 8, "format": "q_0"}),
    Case("gptqmodel-gguf-q4_0", GptqmodelGguf(), {"quant_method": "gguf", "bits": 4, "format": "q_0"}),
    Case("w8a8-int8", IntQuantized(scale_shape=(2, 1)), {"quant_method": "w8a8_int8"}),
    Case(
        "mxfp4-quark",
        Mxfp4(stored_codes_name="weight"),
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}),
    ),
    Case("mxfp6-e3m2", Mxfp6(), quark({"dtype": "fp6_e3m2", "scale_format": "e8m0"})),
    Case("mxfp6-e2m3", Mxfp6(mantissa_bits=3), quark({"dtype": "fp6_e2m3", "scale_format": "e8m0"})),
    Case(
        "nvfp4-quark",
        Nvfp4(stored_codes_name="weight", global_shape=()),
        quark(
            {"dtype": "fp4", "qscheme": "per_group", "group_size": 16},
            {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_scale_quant": True},
        ),
    ),
    Case(
        "amdfp4",
        Nvfp4E5m3(stored_codes_name="weight"),
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 16, "scale_format": "e5m3"}),
    ),
    Case(
        "amdfp4-g32",
        Nvfp4E5m3(stored_codes_name="weight", group_size=32),
        quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e5m3"}),
    ),
    Case(
        "fp8-quark-tensor",
        Fp8(strategy="tensor", scale_shape=(), scale_dtype="BF16"),
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}),
    ),
    Case(
        "fp8-quark-channel",
        Fp8(strategy="channel", scale_shape=(2,), scale_dtype="BF16"),
        quark({"dtype": "fp8_e4m3", "qscheme": "per_channel"}),
    ),
    Case(
        "quark-int8",
        IntQuantized(scale_shape=(), zero_dtype="I8"),
        quark({"dtype": "int8", "qscheme": "per_tensor", "symmetric": False}),
    ),
    Case(
        "quark-uint4-group",
        QuarkInt4(group_size=64),
        quark({"dtype": "uint4", "qscheme": "per_group", "group_size": 64}),
    ),
    Case(
        "quark-int4-group",
        QuarkInt4(is_signed=True, is_in_order=True, group_size=32),
        quark({"dtype": "int4", "qscheme": "per_group", "group_size": 32}, pack_method="order"),
    ),
    Case("quark-uint4-channel", QuarkInt4(), quark({"dtype": "uint4", "qscheme": "per_channel"})),
    Case(
        "quark-int4-channel-order",
        QuarkInt4(is_signed=True, is_in_order=True),
        quark({"dtype": "int4", "qscheme": "per_channel"}, pack_method="order"),
    ),
    Case(
        "quark-int4-fp8",
        QuarkInt4(is_signed=True, is_two_level=True),
        quark({"dtype": "fp8_e4m3", "qscheme": "per_tensor"}, {"dtype": "int4", "qscheme": "per_channel"}),
    ),
    Case("qmoe", Qmoe(), {"quant_method": "qmoe", "dictionary": DICTIONARY}),
]

REPRESENTATIVES = frozenset({type(case.format): case.id for case in reversed(CASES)}.values())
"""The first case of each format, for the fast tests.

Other cases run the same code with other numbers.
"""
