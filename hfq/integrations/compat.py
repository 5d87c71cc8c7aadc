"""Every patch of another project, each with the upstream line it answers. All act only when an `HfqConfig` is passed.

Tested with transformers 5.17.0 and 5.23.0.

1. `modeling_utils.get_hf_quantizer` (quantizers/auto.py). Upstream refuses a config of another class than the checkpoint's
   ("The model is quantized with X but you are passing a HfqConfig config", `merge_quantization_configs`), and skips methods
   it does not know with a warning. hfq takes the checkpoint's config as its `source` instead. `hfq.take_over` needs no patch.
2. `PreTrainedModel.from_pretrained` and `_BaseAutoModelClass.from_pretrained`. Upstream opens files before any quantizer is
   asked, so that a wrong path, a damaged shard or an impossible size surfaces as an error of another library, or as the end
   of the process. hfq validates a local folder first, and refuses by name the arguments it does not support. Loads wait for
   each other: upstream swaps class attributes while it builds a model (`init.no_tie_weights`), which two threads at once
   leave swapped for good, so that later models are not tied.
"""

from __future__ import annotations

import functools
import os
import threading
from contextvars import ContextVar
from typing import Any

from hfq.checkpoint import Checkpoint
from hfq.errors import CheckpointError, HfqError
from hfq.integrations.preflight import check_arguments, check_sizes, open_local
from hfq.integrations.registration import run_pending
from hfq.integrations.transformers import METHOD, HfqConfig

__all__ = ["opened_checkpoint", "patch_auto_factory", "patch_modeling_utils"]

_one_load = threading.RLock()
_opened: ContextVar[Checkpoint | None] = ContextVar("hfq_opened_checkpoint", default=None)


def opened_checkpoint(files: list[str]) -> Checkpoint:
    """The checkpoint of these files: the one that was validated when the load began, or validated now."""
    checkpoint = _opened.get()
    if checkpoint is not None and set(checkpoint.headers) == set(files):
        return checkpoint
    return Checkpoint.from_files(files)


def patch_modeling_utils(module: Any) -> None:
    """Patch 1, and patch 2 for model classes."""
    if not hasattr(module.get_hf_quantizer, "__wrapped__"):
        module.get_hf_quantizer = _taking_over(module.get_hf_quantizer)
        _guard(module.PreTrainedModel)


def patch_auto_factory(module: Any) -> None:
    """Patch 2 for the auto classes."""
    if not hasattr(module._BaseAutoModelClass.from_pretrained.__func__, "__wrapped__"):
        _guard(module._BaseAutoModelClass)


def _taking_over(original):
    @functools.wraps(original)
    def get_hf_quantizer(config, quantization_config, *args: Any, **kwargs: Any):
        stored = getattr(config, "quantization_config", None)
        chosen = _as_hfq(quantization_config) or (_as_hfq(stored) if quantization_config is None else None)
        if chosen is not None:
            quantization_config = chosen.with_source(_take_source(config))
        return original(config, quantization_config, *args, **kwargs)

    return get_hf_quantizer


def _as_hfq(config: Any) -> HfqConfig | None:
    if isinstance(config, dict) and config.get("quant_method") == METHOD:
        return HfqConfig(**config)
    return config if isinstance(config, HfqConfig) else None


def _take_source(config: Any) -> dict | None:
    """Removes the checkpoint's own quantization_config from a model config (a private copy), and returns it."""
    for owner in (config, config.get_text_config(decoder=True)):
        stored = getattr(owner, "quantization_config", None)
        if stored is not None:
            del owner.quantization_config
            hfq = _as_hfq(stored)
            if hfq is not None:
                return hfq.source
            return dict(stored) if isinstance(stored, dict) else stored.to_dict()
    return None


def _new_lock() -> None:
    """A child of a fork must not wait for a load that only its parent runs."""
    global _one_load
    _one_load = threading.RLock()


os.register_at_fork(after_in_child=_new_lock)


def _guard(owner: type) -> None:
    original = owner.from_pretrained.__func__  # type: ignore[attr-defined]

    @functools.wraps(original)
    def from_pretrained(cls, pretrained_model_name_or_path=None, *args: Any, **kwargs: Any):
        if _as_hfq(kwargs.get("quantization_config")) is None:
            return original(cls, pretrained_model_name_or_path, *args, **kwargs)
        check_arguments(kwargs)
        checkpoint = _opened.get() or open_local(pretrained_model_name_or_path, kwargs)
        if checkpoint is not None:
            check_sizes(checkpoint)
        token = _opened.set(checkpoint)
        try:
            with _one_load:
                return original(cls, pretrained_model_name_or_path, *args, **kwargs)
        except OSError as error:
            if isinstance(error, HfqError) or checkpoint is not None:
                raise
            raise CheckpointError(
                "The model could not be found.", file=pretrained_model_name_or_path, found=str(error).splitlines()[0],
                expected="a local folder, or a model of the hub that is online or cached",
                fix=f"check the name; on a machine that is online: hf download {pretrained_model_name_or_path}",
            ) from error  # fmt: skip
        finally:
            _opened.reset(token)

    owner.from_pretrained = classmethod(from_pretrained)  # type: ignore[attr-defined]


run_pending()
