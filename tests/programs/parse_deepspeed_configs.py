"""Prints what DeepSpeed and transformers read in each config file of the arguments, as JSON."""

import json
import sys
from pathlib import Path

from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from transformers.integrations import HfDeepSpeedConfig

from tests.configs.run_deepspeed import filled

fields = DeepSpeedZeroConfig.model_fields
known = set(fields) | {field.alias for field in fields.values() if field.alias}
found = {}
for file in map(Path, sys.argv[1:]):
    stored = json.loads(file.read_text())
    hf = HfDeepSpeedConfig(str(file))
    parsed = DeepSpeedConfig(filled(json.loads(file.read_text())))
    zero = parsed.zero_config
    found[file.stem] = {
        "is_zero3": hf.is_zero3(),
        "is_offload": hf.is_offload(),
        "bf16": parsed.bfloat16_config.enabled,
        "unknown": sorted(set(stored["zero_optimization"]) - known)
        + sorted(set(stored.get("aio", {})) - set(AIO_DEFAULT_DICT)),
        "param": zero.offload_param.device if zero.offload_param else "none",
        "optimizer": zero.offload_optimizer.device if zero.offload_optimizer else "none",
        "harmful": [
            zero.use_all_reduce_for_fetch_params,
            zero.zero_quantized_weights,
            zero.zero_quantized_nontrainable_weights,
            zero.gather_16bit_weights_on_model_save,
        ],
        "reuse": zero.max_reuse_distance,
        "aio": parsed.aio_config["queue_depth"],
    }
print(json.dumps(found))
