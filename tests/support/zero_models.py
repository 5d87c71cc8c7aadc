"""The checkpoints that ranks load: every format of the matrix, and special cases of ZeRO-3."""

import json
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

from hfq.formats.bitsandbytes import Bnb4Bit, BnbInt8
from hfq.formats.fp8 import Fp8
from hfq.formats.gptq import Gptq
from tests.contract.cases import Case
from tests.support import code_models, moe_models, tiny_models

BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
FORMATS = {
    "gptq4": (
        Gptq(4, 64, True, "word_plus_one", g_idx_length=128),
        {
            "quant_method": "gptq",
            "checkpoint_format": "gptq",
            "meta": {"quantizer": ["gptqmodel:7.7.0"]},
            "bits": 4,
            "group_size": 64,
        },
    ),
    "fp8-block": (
        Fp8(strategy="block", block_structure=(128, 128), scale_name="weight_scale_inv"),
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8-tensor-0-dim": (
        Fp8(strategy="tensor", scale_shape=()),
        {"quant_method": "modelopt", "quant_algo": "FP8"},
    ),
    "int8": (
        BnbInt8(scale_shape=(2,), others=(("weight_format", "U8", ()),)),
        {**BNB, "load_in_4bit": False, "load_in_8bit": True},
    ),
    "nf4": (Bnb4Bit(), {**BNB, "bnb_4bit_quant_type": "nf4"}),
}


def write_format(folder: Path, name: str, is_tied: bool = False, poisoned: str | None = None) -> str:
    """Writes a tiny Llama in one format; without an own head if tied, with a NaN scale if poisoned."""
    weight_format, config = FORMATS[name]
    tensors = tiny_models.model_tensors(weight_format)
    if is_tied:
        del tensors["lm_head.weight"]
    if poisoned is not None:
        tiny_models.poison(tensors[poisoned], 0)
    path = tiny_models.write_model(folder, tensors, config)
    if is_tied:
        written = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(written | {"tie_word_embeddings": True}))
    return str(path)


def write_own_code(folder: Path, name: str) -> str:
    """Writes a tiny Llama whose class comes with the checkpoint."""
    path = Path(write_format(folder, name))
    (path / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnForCausalLM(LlamaForCausalLM):\n    pass\n"
    )
    written = json.loads((path / "config.json").read_text())
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    (path / "config.json").write_text(json.dumps(written | own))
    return str(path)


def write_dialect(folder: Path, case: Case) -> str:
    """Writes the tiny Llama of one case of the contract suite."""
    tensors = tiny_models.model_tensors(case.format)
    return str(
        tiny_models.write_model(
            folder, tensors, case.config, tiny_models.schemas(tensors, case.schema), case.kind
        )
    )


def write_mixtral(folder: Path) -> str:
    scheme = next(scheme for scheme in moe_models.SCHEMES if scheme.id == "mixtral w1 w2 w3, gptq")
    return str(moe_models.write(scheme).save(folder))


def write_reading(folder: Path, kind: str) -> tuple[str, dict]:
    """Returns (a checkpoint of a model whose code reads its weights, the fields of its case)."""
    auto, model_type, options, packed, inputs = next(
        case for name, case in code_models.CASES.items() if name.startswith(kind)
    )
    _, path = code_models.write(folder, auto, model_type, options, packed)
    return str(path), {
        "auto": {
            AutoModelForCausalLM: "AutoModelForCausalLM",
            AutoModelForSeq2SeqLM: "AutoModelForSeq2SeqLM",
        }[auto],
        "inputs": [{name: tensor.tolist() for name, tensor in inputs.items()}] * 3,
        "generates": False,
    }
