"""Meta model of a checkpoint, matched with its headers, before any weight is read.

`from_pretrained` itself builds the meta model, so that a plan describes the model that a load returns. An
exception that no `except Exception` catches ends the call at that point.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hfq.checkpoint import Checkpoint
from hfq.errors import CheckpointError, SetupError
from hfq.loading.config import HfqConfig
from hfq.loading.context import within_load

if TYPE_CHECKING:
    from hfq.loading.model_loader import ModelLoader

__all__ = ["MetaModelReached", "load_meta_model", "model_class"]


class MetaModelReached(BaseException):
    """Exception that ends `from_pretrained` once the meta model is built.

    Args:
        loading: The loader, with the meta model and its match; no device is chosen yet.
    """

    def __init__(self, loading: ModelLoader) -> None:
        super().__init__()
        self.loading = loading


def load_meta_model(
    path: str | os.PathLike, dtype: Any = "auto", quantize_output_head: Any = None
) -> ModelLoader:
    """Returns the loader of a checkpoint, from its config and headers alone.

    Args:
        path: Folder with weights or with headers alone (`hfq.integrations.hub.find`).
        dtype: Same as in `from_pretrained`.
        quantize_output_head: Same as in `HfqConfig`.

    Raises:
        HfqError: The checkpoint fails a check that a load makes before it reads weights.
    """
    folder = os.fspath(path)
    cls = _plannable_class(folder)
    # this kernel works without a compiler
    config = HfqConfig(kernel="reference", quantize_output_head=quantize_output_head)
    try:
        with within_load(stops_at_meta_model=True):
            # an automatic map keeps the load from reading into the page cache
            cls.from_pretrained(folder, quantization_config=config, device_map="auto", dtype=dtype)
    except MetaModelReached as reached:
        return reached.loading
    raise SetupError(
        "transformers loaded a model without calling hfq.",
        file=folder,
        expected="a call to HfqQuantizer",
        found=cls.__name__,
        fix="Report this error, and install the transformers version in constraints.txt.",
    )


def model_class(checkpoint: Checkpoint) -> Any:
    """Returns the class that config.json names, else `AutoModelForCausalLM`.

    The latter decides between a class of transformers and custom code, if the checkpoint has both. It also
    finds the class of the language model of which a GGUF file consists.
    """
    import transformers

    own = checkpoint.config.get("auto_map")
    has_other_class = checkpoint.gguf is not None and "text_config" in checkpoint.config
    if has_other_class or (isinstance(own, dict) and "AutoModelForCausalLM" in own):
        return transformers.AutoModelForCausalLM
    names = _architectures(checkpoint)
    known = (getattr(transformers, name, None) for name in names)
    return next((cls for cls in known if hasattr(cls, "from_pretrained")), transformers.AutoModelForCausalLM)


def _architectures(checkpoint: Checkpoint) -> list[str]:
    """Returns the class names in config.json, which may name none."""
    names = checkpoint.config.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(
            "The architectures in config.json are damaged.",
            file=os.path.join(checkpoint.root, "config.json"),
            expected="a list of class names",
            found=repr(names)[:80],
            fix="Download this file again.",
        )
    return names


def _plannable_class(folder: str) -> Any:
    import transformers

    checkpoint = Checkpoint.open(folder)
    names = _architectures(checkpoint)
    if checkpoint.config.get("auto_map") and not hasattr(transformers, next(iter(names), "")):
        raise SetupError(
            "This model requires custom code, which hfq plan does not run.",
            file=folder,
            found=", ".join(names),
            expected="a model class of transformers",
            fix="Choose a model whose class is part of transformers.",
        )
    return model_class(checkpoint)
