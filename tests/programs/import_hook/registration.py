"""Checks that transformers has hfq's changes, and each of them once."""

from transformers import modeling_utils
from transformers.models.auto import auto_factory
from transformers.quantizers import auto

assert "hfq" in auto.AUTO_QUANTIZER_MAPPING
assert "hfq" in auto.AUTO_QUANTIZATION_CONFIG_MAPPING
assert hasattr(modeling_utils.get_hf_quantizer, "__wrapped__")
assert hasattr(modeling_utils.PreTrainedModel.from_pretrained.__func__, "__wrapped__")
assert hasattr(auto_factory._BaseAutoModelClass.from_pretrained.__func__, "__wrapped__")
assert not hasattr(modeling_utils.get_hf_quantizer.__wrapped__, "__wrapped__")
