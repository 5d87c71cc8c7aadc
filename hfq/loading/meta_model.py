"""A model as a load sees it before its first weight byte: transformers' skeleton on meta, matched with the
headers, packed modules in.

It is reached by the loader's own way, so that what is planned is what is loaded: `from_pretrained` runs until
the skeleton stands, and is left there by an exception that no `except Exception` takes.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from hfq.errors import SetupError
from hfq.loading.config import HfqConfig
from hfq.loading.context import within_load

if TYPE_CHECKING:
    from hfq.loading.model_loader import ModelLoader

__all__ = ["MetaModelReached", "load_meta_model"]


class MetaModelReached(BaseException):
    """Leaves `from_pretrained` when the skeleton stands.

    Args:
        loading: The load, with its skeleton and its match; no homes are settled.
    """

    def __init__(self, loading: ModelLoader) -> None:
        super().__init__()
        self.loading = loading


def load_meta_model(path: str | os.PathLike, dtype: Any = "auto") -> ModelLoader:
    """The load of a checkpoint, from its config and headers alone.

    Args:
        path: Its folder, with weights or with headers alone (`hfq.integrations.hub.find`).
        dtype: As in `from_pretrained`.

    Raises:
        HfqError: Whatever a load would refuse before it reads weights.
    """
    folder = os.fspath(path)
    cls = _model_class(folder)
    config = HfqConfig(kernel="reference")  # needs no compiler
    try:
        with within_load(stops_at_meta_model=True):
            # an automatic map is inferred later, and keeps the load from reading ahead
            cls.from_pretrained(folder, quantization_config=config, device_map="auto", dtype=dtype)
    except MetaModelReached as reached:
        return reached.loading
    raise SetupError(
        "transformers loaded a model and did not ask hfq.",
        file=folder,
        expected="a call of HfqQuantizer",
        found=cls.__name__,
        fix="report this; the versions of transformers that hfq is tested with are in constraints.txt",
    )


def _model_class(folder: str) -> Any:
    """The class that config.json names, else a causal language model."""
    import transformers

    from hfq.checkpoint import Checkpoint

    config = Checkpoint.open(folder).config
    names = config.get("architectures") or []
    if config.get("auto_map") and not hasattr(transformers, str(next(iter(names), ""))):
        raise SetupError(
            "This model brings code of its own, which hfq plan does not run.",
            file=folder,
            found=", ".join(map(str, names)),
            expected="a model class of transformers",
            fix="plan a model that transformers knows",
        )
    known = [getattr(transformers, str(name)) for name in names if hasattr(transformers, str(name))]
    return next((cls for cls in known if hasattr(cls, "from_pretrained")), transformers.AutoModelForCausalLM)
