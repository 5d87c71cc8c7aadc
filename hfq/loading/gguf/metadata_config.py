"""Comparison of a config with the metadata of a GGUF file, and configs made of metadata."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from hfq.checkpoint import Checkpoint, Reader
from hfq.checkpoint.gguf.header import GgufArray
from hfq.checkpoint.gguf.named_model import GgufModel
from hfq.errors import FormatError, HfqError, SetupError
from hfq.modules.flat_buffer import read_tensor

__all__ = ["check_metadata", "check_rope_tensors", "config_of_gguf", "rope_parameters", "unsaid_rope"]

_STUB = frozenset({"model_type", "architectures", "transformers_version", "dtype", "torch_dtype"})
"""Keys of a config.json that tells no size."""

_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
"""Arguments of `from_pretrained` that tell where files are."""

_COMPARED = {
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps",),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps"),
    "attention.sliding_window": ("sliding_window",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
}
"""Names in config.json of numbers that shapes do not tell, by key of the metadata."""

_SCALED = {"linear": ("linear",), "yarn": ("yarn",), "longrope": ("longrope", "su")}
"""Types of RoPE in config.json, by `rope.scaling.type`."""

_SCALING = {"factor": "factor", "original_context_length": "original_max_position_embeddings"}
"""Parameters of RoPE in config.json, by key of `rope.scaling`."""

_YARN = {"beta_fast": 32.0, "beta_slow": 1.0}
"""Parameters of YaRN with their defaults; the keys of `rope.scaling` have the prefix `yarn_`."""

_LONGROPE = ("longrope",)
"""Types of RoPE whose attention factor is `rope.scaling.attn_factor`, without `rope.scaling.type`."""

_LARGEST_GEMMA = {"gemma2": 46, "gemma3": 62}
"""Layers of the model whose attention is not scaled by the size of its heads, by architecture."""

_DEFAULT_BASE = 10000.0
"""The base of RoPE of files that tell none."""

_DIFFERENCE = 1e-5
"""The largest relative difference of numbers that are stored as float32."""


def config_of_gguf(path: Any, checkpoint: Checkpoint | None, kwargs: Mapping[str, Any]) -> Any:
    """Returns the config for a GGUF file if it differs from config.json, or None.

    Without config.json, or with one that tells no more than the class, it is transformers' config of the
    metadata. A GGUF file holds a language model alone, so of the config of a multimodal model it is the part
    of the language model. If the file lacks the rows of the embedding that no token has, its number of tokens
    counts.

    Args:
        path: The folder or Hub id.
        checkpoint: The opened checkpoint; None if it is not a GGUF file.
        kwargs: Arguments of `from_pretrained`.

    Raises:
        FormatError: The config of this architecture is not tested, or cannot be built; or a config that was
            passed counts tokens that the file lacks.
        SetupError: The package `gguf` is not installed.
    """
    from transformers import AutoConfig

    if checkpoint is None or checkpoint.gguf is None:
        return None
    if kwargs.get("config") is not None:
        _check_tokens(kwargs["config"], checkpoint, checkpoint.gguf)
        return None
    options = {name: kwargs[name] for name in _OPTIONS if kwargs.get(name) is not None}
    if checkpoint.config.keys() <= _STUB:
        return _config_of_metadata(path, checkpoint, options)
    tokens = _tokens(checkpoint.gguf)
    is_multimodal = isinstance(checkpoint.config.get("text_config"), Mapping)
    if tokens is None and not is_multimodal:
        return None
    whole = AutoConfig.from_pretrained(
        path, trust_remote_code=bool(kwargs.get("trust_remote_code")), **options
    )
    config = whole.get_text_config(decoder=True)
    lacks_rows = tokens is not None and tokens < config.vocab_size
    if lacks_rows:
        config.vocab_size = tokens
    if is_multimodal:
        config.dtype = config.dtype or whole.dtype
        config.tie_word_embeddings = "lm_head.weight" not in checkpoint.tensors
    return config if lacks_rows or is_multimodal else None


def _tokens(model: GgufModel) -> int | None:
    """Returns the number of the file's tokens if its embedding may lack other rows; else None."""
    tokens = model.keys.get("tokenizer.ggml.tokens")
    return tokens.count if model.known.omits_rows and isinstance(tokens, GgufArray) else None


def _check_tokens(config: Any, checkpoint: Checkpoint, model: GgufModel) -> None:
    tokens = _tokens(model)
    passed = getattr(config.get_text_config(decoder=True), "vocab_size", None)
    if tokens is not None and passed is not None and tokens < passed:
        raise FormatError(
            "The config counts more tokens than the GGUF file has. Nothing was loaded.",
            file=next(iter(checkpoint.headers)),
            expected=f"config=... with vocab_size={tokens}",
            found=f"vocab_size={passed}",
            fix=f"Set vocab_size of the config to {tokens}, or leave out config=.",
        )


def _config_of_metadata(path: Any, checkpoint: Checkpoint, options: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    model, file = checkpoint.gguf, Path(next(iter(checkpoint.headers)))
    gguf_file = file.relative_to(Path(checkpoint.root)).as_posix()
    has_experts = model is not None and any(".experts." in name for name in model.tensors)
    if model is None or not model.known.builds_config or has_experts:  # of Mixtral, upstream makes a Llama
        found = "no model" if model is None else model.architecture
        raise FormatError(
            "This GGUF file requires a config.json next to it. Nothing was loaded.",
            file=file,
            expected="config.json of the original model",
            found=f"architecture {found} without config.json",
            fix="Download config.json of the original model into the folder of the file.",
        )
    try:
        config = AutoConfig.from_pretrained(path, gguf_file=gguf_file, **options)
    except ImportError as error:
        raise SetupError(
            "transformers requires the package gguf to read the config of a GGUF file. Nothing was loaded.",
            file=file,
            expected="config.json next to the file, or the package gguf",
            found=str(error).splitlines()[0],
            fix="Run pip install 'hfq[gguf]', or download config.json of the original model into the folder.",
        ) from error
    except HfqError:
        raise
    except Exception as error:  # a parser of untrusted metadata raises many kinds
        raise FormatError(
            "transformers cannot make a config of the metadata of this GGUF file. Nothing was loaded.",
            file=file,
            expected="config.json of the original model",
            found=f"{type(error).__name__}: {error}",
            fix="Download config.json of the original model into the folder of the file.",
        ) from error
    _complete(config, model)
    return config


def _complete(config: Any, model: GgufModel) -> None:
    """Sets what transformers leaves out of a config of metadata, as llama.cpp does.

    Of a split file, transformers reads the first part alone, where the head is not.
    """
    config.tie_word_embeddings = f"{model.known.modules['output']}.weight" not in model.tensors
    size = model.keys.get(f"{model.architecture}.attention.key_length")
    if isinstance(size, int) and size > 0 and hasattr(config, "head_dim"):
        config.head_dim = size
    if config.model_type in ("mistral", "phi3"):
        window = model.keys.get(f"{model.architecture}.attention.sliding_window")
        config.sliding_window = window or None  # 0 means none
    largest = _LARGEST_GEMMA.get(model.architecture)
    if largest == config.num_hidden_layers:
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads
    elif largest is not None:
        config.query_pre_attn_scalar = config.head_dim


def check_metadata(config: Any, checkpoint: Checkpoint, is_template: bool = False) -> None:
    """Checks that a config does not contradict the metadata of a GGUF file.

    Args:
        config: The config of the model.
        checkpoint: The checkpoint.
        is_template: True for the template of a conversion to GGUF.

    Raises:
        FormatError: Lists every key that differs.
    """
    model = checkpoint.gguf
    if model is None:
        return
    text = config.get_text_config(decoder=True)
    problems = [
        f"{key} is {stored!r}, and {name} of the config is {found!r}"
        for key, name, stored, found in _compared(text, model)
        if not _is_close(stored, found)
    ]
    problems += [*_window_problems(text, model), *_rope_problems(text, model), *_scale_problems(text, model)]
    if text.model_type not in model.known.model_types:
        found = f"model_type of the config is {text.model_type!r}"
        problems.insert(0, f"general.architecture is {model.architecture!r}, and {found}")
    if problems:
        raise _contradiction(checkpoint, problems, is_template)


def check_rope_tensors(
    config: Any, checkpoint: Checkpoint, reader: Reader, is_template: bool = False
) -> None:
    """Checks that tensors with the frequencies of RoPE repeat what the config says.

    Args:
        config: The config of the model.
        checkpoint: The checkpoint.
        reader: Reader of its files.
        is_template: True for the template of a conversion to GGUF.

    Raises:
        FormatError: Names the tensors that differ.
    """
    model = checkpoint.gguf
    text = config.get_text_config(decoder=True)
    problems = []
    for name, info in (model.checked if model is not None else {}).items():
        stored = read_tensor(reader, info).to(torch.float32).flatten()
        if not stored.any():  # a rank that has headers alone; no factor is zero
            continue
        expected = _rope_factors(text, name)
        if expected is None or expected.shape != stored.shape:
            problems.append(f"{name} scales the frequencies of RoPE, and the config does not")
        elif not torch.allclose(stored, expected, rtol=1e-4, atol=0):
            problems.append(f"{name} scales the frequencies of RoPE by other factors than the config")
    if problems:
        raise _contradiction(checkpoint, problems, is_template)


def unsaid_rope(config: Any, checkpoint: Checkpoint) -> Iterator[tuple[str, str]]:
    """Yields keys about RoPE that a GGUF file lacks, with the parameter of the config.

    Args:
        config: The config of the model.
        checkpoint: The file.
    """
    model = checkpoint.gguf
    parameters = rope_parameters(config.get_text_config(decoder=True)) if model is not None else []
    keys, prefix = ({}, "") if model is None else (model.keys, f"{model.architecture}.rope")
    bases = [found["rope_theta"] for found in parameters if found.get("rope_theta") is not None]
    if (
        bases
        and f"{prefix}.freq_base" not in keys
        and not any(_is_close(_DEFAULT_BASE, each) for each in bases)
    ):
        yield f"{prefix}.freq_base", f"rope_theta {bases[0]!r}"
    kinds = [
        str(found.get("rope_type")) for found in parameters if found.get("rope_type") in ("linear", "yarn")
    ]
    if kinds and keys.get(f"{prefix}.scaling.type") in (None, "none"):
        yield f"{prefix}.scaling.type", f"rope_type {kinds[0]!r}"
    elif kinds and f"{prefix}.scaling.factor" not in keys:
        yield f"{prefix}.scaling.factor", f"rope_type {kinds[0]!r}"
    for found in parameters:
        for key, value in _beyond_defaults(config, found):
            if f"{prefix}.scaling.{key}" not in keys:
                yield f"{prefix}.scaling.{key}", value


def _compared(config: Any, model: GgufModel) -> Iterator[tuple[str, str, Any, Any]]:
    """Yields (key, name in the config, value of the metadata, value of the config)."""
    for key, names in _COMPARED.items():
        stored = model.keys.get(f"{model.architecture}.{key}")
        name = next((name for name in names if getattr(config, name, None) is not None), None)
        if stored is None or isinstance(stored, GgufArray) or name is None or key in model.known.other_keys:
            continue
        yield f"{model.architecture}.{key}", name, stored, getattr(config, name)


def _is_close(stored: Any, found: Any) -> bool:
    if isinstance(stored, (int, float)) and isinstance(found, (int, float)):
        return abs(stored - found) <= _DIFFERENCE * max(abs(stored), abs(found))
    return stored == found


def rope_parameters(config: Any) -> list[Mapping[str, Any]]:
    """Returns the parameters of RoPE; several if layers differ."""
    found = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


def _rope_problems(config: Any, model: GgufModel) -> list[str]:
    prefix, parameters = f"{model.architecture}.rope", rope_parameters(config)
    problems = []
    count = model.keys.get(f"{prefix}.dimension_count")
    counts = sorted({int(_head_dim(config) * found.get("partial_rotary_factor", 1)) for found in parameters})
    if count is not None and count not in counts:
        problems.append(f"{prefix}.dimension_count is {count!r}, and the config rotates {counts[0]} channels")
    base = model.keys.get(f"{prefix}.freq_base")
    bases = [found["rope_theta"] for found in parameters if found.get("rope_theta") is not None]
    if base is not None and bases and not any(_is_close(base, found) for found in bases):
        problems.append(f"{prefix}.freq_base is {base!r}, and rope_theta of the config is {bases[0]!r}")
    kind = model.keys.get(f"{prefix}.scaling.type")
    is_told = kind not in (None, "none")
    kinds = _SCALED.get(str(kind), ()) if is_told else _LONGROPE
    scaled = [found for found in parameters if found.get("rope_type") in kinds]
    if is_told and not scaled:
        types = ", ".join(sorted({str(found.get("rope_type")) for found in parameters}))
        problems.append(f"{prefix}.scaling.type is {kind!r}, and rope_type of the config is {types}")
    for key, name in _SCALING.items():
        stored = model.keys.get(f"{prefix}.scaling.{key}")
        values = [found[name] for found in scaled if found.get(name) is not None]
        if stored is not None and values and not any(_is_close(stored, found) for found in values):
            told = f"{name} of the config is {values[0]!r}"
            problems.append(f"{prefix}.scaling.{key} is {stored!r}, and {told}")
    for found in scaled:
        for key, name, agreeing in _factors(config, found):
            stored = model.keys.get(f"{prefix}.scaling.{key}")
            if stored is not None and not any(_is_close(stored, value) for value in agreeing):
                told = f"{name} of the config is {agreeing[0]!r}"
                problems.append(f"{prefix}.scaling.{key} is {stored!r}, and {told}")
    return problems


def _factors(config: Any, parameters: Mapping[str, Any]) -> Iterator[tuple[str, str, tuple[float, ...]]]:
    """Yields (key of `rope.scaling`, name in the config, values of the key that agree)."""
    kind = parameters.get("rope_type")
    if kind == "yarn":
        for name, default in _YARN.items():
            yield f"yarn_{name}", name, (parameters.get(name) or default,)
        stated, usual = parameters.get("attention_factor"), _attention_factor(config, parameters)
        # 1 leaves the usual factor to the reader
        yield "yarn_attn_factor", "attention_factor", (usual, 1.0) if stated is None else (stated,)
    elif kind in _LONGROPE:
        yield "attn_factor", "attention_factor", (_attention_factor(config, parameters),)


def _beyond_defaults(config: Any, parameters: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields (key of `rope.scaling`, parameter of the config) that readers would take otherwise."""
    usual = {"attention_factor": 1.0, **_YARN}
    if parameters.get("rope_type") == "yarn":
        without = {name: value for name, value in parameters.items() if name != "attention_factor"}
        usual["attention_factor"] = _attention_factor(config, without)
    for key, name, (value, *_) in _factors(config, parameters):
        if not _is_close(usual[name], value):
            yield key, f"{name} {value!r}"


def _attention_factor(config: Any, parameters: Mapping[str, Any]) -> float:
    """Returns the factor by which transformers multiplies sines and cosines."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    alone = copy.copy(config)
    alone.rope_parameters = dict(parameters)  # of layers that differ, one kind
    return float(ROPE_INIT_FUNCTIONS[parameters["rope_type"]](alone, torch.device("cpu"))[1])


def _window_problems(config: Any, model: GgufModel) -> Iterator[str]:
    """Yields a problem if the file has a sliding window, and the model, as a Llama, has none."""
    key = f"{model.architecture}.attention.sliding_window"
    stored = model.keys.get(key)
    if stored and not hasattr(config, "sliding_window"):
        yield f"{key} is {stored!r}, and {config.model_type} has no sliding_window"


def _scale_problems(config: Any, model: GgufModel) -> Iterator[str]:
    """Yields a problem if the file scales products of queries and keys by another factor."""
    key = f"{model.architecture}.attention.scale"
    stored = model.keys.get(key)
    if not stored or "attention.scale" in model.known.other_keys:  # 0 means the usual factor
        return
    found = (getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)) ** -0.5
    if not _is_close(stored, found):
        yield f"{key} is {stored!r}, and the config scales by {found:g}"


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _rope_factors(config: Any, name: str) -> torch.Tensor | None:
    """Returns the factors by which a config scales frequencies of RoPE; None for no factors."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = next((found for found in rope_parameters(config) if found.get("rope_type")), {})
    if name != "rope_freqs.weight":
        factors = parameters.get("long_factor" if "long" in name else "short_factor")
        return None if factors is None else torch.tensor(factors, dtype=torch.float32)
    kind = parameters.get("rope_type")
    if kind in (None, "default") or kind not in ROPE_INIT_FUNCTIONS:
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    size = 2 * scaled.numel()
    plain = 1.0 / parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)
    return plain / scaled


def _contradiction(checkpoint: Checkpoint, problems: list[str], is_template: bool) -> FormatError:
    consequence, expected = "loaded", "the config of the model that the file was made from"
    fix = "Download config.json of the original model into the folder of the file."
    if is_template:
        consequence, expected = "written", "a template of the model that is converted"
        fix = "Pass a GGUF file of this model."
    return FormatError(
        f"The config contradicts the GGUF file. Nothing was {consequence}.",
        file=next(iter(checkpoint.headers)),
        problems=problems,
        expected=expected,
        found=f"other values of {', '.join(problem.partition(' ')[0] for problem in problems)}",
        fix=fix,
    )
