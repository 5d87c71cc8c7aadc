"""Stored tensors described without a file, for tests of detection."""

import pytest

from hfq.tensor_spec import DTYPE_BITS, ByteRange, TensorInfo

SAFETENSORS = {
    "torch.float8_e4m3fn": "F8_E4M3",
    "torch.float8_e5m2": "F8_E5M2",
    "torch.float8_e8m0fnu": "F8_E8M0",
    "torch.uint8": "U8",
    "torch.int8": "I8",
    "torch.int32": "I32",
    "torch.float16": "F16",
    "torch.bfloat16": "BF16",
    "torch.float32": "F32",
}


def describe_one(name: str, dtype: str, shape: tuple[int, ...]) -> TensorInfo:
    nbytes = DTYPE_BITS[dtype] // 8
    for size in shape:
        nbytes *= size
    return TensorInfo(name, dtype, tuple(shape), ByteRange("model.safetensors", 4096, nbytes))


@pytest.fixture
def describe():
    """describe(module, qweight=("I32", (8, 64)), …) → the module's tensors by local name.

    The tensors are described as in the header of a file.
    """

    def describe(module: str, **tensors):
        return {
            local: describe_one(f"{module}.{local}", dtype, shape)
            for local, (dtype, shape) in tensors.items()
        }

    return describe


@pytest.fixture
def describe_tensors():
    """describe_tensors(module, {local: torch tensor}) → the same for existing tensors."""

    def describe_tensors(module: str, tensors):
        return {
            local: describe_one(f"{module}.{local}", SAFETENSORS[str(tensor.dtype)], tuple(tensor.shape))
            for local, tensor in tensors.items()
        }

    return describe_tensors
