"""Tests of activations rounded to FP8, against a numpy list of the 253 numbers of e4m3."""

import numpy as np
import pytest
import torch

from hfq.formats import ActivationScheme
from hfq.kernels.activations import quantize_activations

_POSITIVE = sorted(
    {m / 8 * 2.0**-6 for m in range(8)}
    | {(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)}
)
NUMBERS = np.array([*(-number for number in _POSITIVE[:0:-1]), *_POSITIVE][: 2 * len(_POSITIVE) - 1])
NUMBERS = NUMBERS[np.abs(NUMBERS) <= 448]


def to_e4m3(value: float) -> float:
    """Rounds to the nearest number of e4m3, ties to an even mantissa."""
    value = min(max(value, -448.0), 448.0)
    distance = np.abs(NUMBERS - value)
    nearest = np.flatnonzero(distance == distance.min())
    # numbers of e4m3 alternate between even and odd mantissas, and 0 is even
    zero = len(NUMBERS) // 2
    return float(NUMBERS[nearest[0] if len(nearest) == 1 or (nearest[0] - zero) % 2 == 0 else nearest[1]])


def round_by_hand(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    scales = np.broadcast_to(scales, values.shape).astype(np.float32)
    quotients = (values.astype(np.float32) / scales).astype(np.float32)
    codes = np.array([to_e4m3(float(value)) for value in quotients.ravel()], dtype=np.float32)
    return codes.reshape(values.shape) * scales


def dynamic_scale(amplitudes: np.ndarray, upper_bound: float | None = None) -> np.ndarray:
    amax = amplitudes.astype(np.float32)
    if upper_bound is not None:
        amax = np.minimum(amax, np.float32(upper_bound))
    return np.where(amax == 0, np.float32(1), amax / np.float32(448))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.logspace(-3, 2, shape[-1])


def test_the_list_of_numbers_is_that_of_e4m3():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    assert sorted(set(codes[torch.isfinite(codes)].tolist())) == NUMBERS.tolist()
    assert len(NUMBERS) == 253


def test_a_scale_for_each_token():
    values = random(3, 5, 48)
    expected = round_by_hand(values.numpy(), dynamic_scale(np.abs(values.numpy()).max(-1, keepdims=True)))
    assert torch.equal(
        quantize_activations(values, ActivationScheme("token"), {}), torch.from_numpy(expected)
    )


def test_one_scale_for_the_tensor():
    values = random(3, 5, 48)
    expected = round_by_hand(values.numpy(), dynamic_scale(np.abs(values.numpy()).max()))
    assert torch.equal(
        quantize_activations(values, ActivationScheme("tensor"), {}), torch.from_numpy(expected)
    )


@pytest.mark.parametrize(
    "group_size", [16, 48, 20, 64]
)  # 20 leaves 8 channels over; groups of 64 are never complete
def test_a_scale_for_each_group_of_channels(group_size):
    values = random(2, 3, 48).numpy()
    expected = np.empty_like(values)
    for left in range(0, 48, group_size):
        part = values[..., left : left + group_size]
        expected[..., left : left + group_size] = round_by_hand(
            part, dynamic_scale(np.abs(part).max(-1, keepdims=True))
        )
    found = quantize_activations(
        torch.from_numpy(values), ActivationScheme("group", group_size=group_size), {}
    )
    assert torch.equal(found, torch.from_numpy(expected))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_static_scale_is_the_stored_one_and_saturates(shape, dtype):
    values = random(4, 48)
    tensors = {"input_scale": torch.full(shape, 0.05).to(dtype), "other": torch.tensor(9.0)}
    expected = round_by_hand(values.numpy(), np.float32(tensors["input_scale"].float().item()))
    found = quantize_activations(values, ActivationScheme("tensor", scale_name="input_scale"), tensors)
    assert values.abs().max() > 448 * 0.05
    assert torch.equal(found, torch.from_numpy(expected))
    assert found.abs().max() == np.float32(448) * np.float32(tensors["input_scale"].float().item())


@pytest.mark.parametrize("upper_bound", [1.5, 1e6])
def test_an_upper_bound_limits_the_scale_of_a_token(upper_bound):
    values = random(4, 48)
    expected = round_by_hand(
        values.numpy(), dynamic_scale(np.abs(values.numpy()).max(-1, keepdims=True), upper_bound)
    )
    found = quantize_activations(values, ActivationScheme("token", upper_bound=upper_bound), {})
    assert torch.equal(found, torch.from_numpy(expected))
    assert (found.abs().max().item() <= 1.5) is (upper_bound == 1.5)


@pytest.mark.parametrize(
    "scheme", [ActivationScheme("token"), ActivationScheme("tensor"), ActivationScheme("group", group_size=4)]
)
def test_zeros_stay_zeros(scheme):
    assert torch.equal(quantize_activations(torch.zeros(2, 8), scheme, {}), torch.zeros(2, 8))


def test_ties_go_to_the_even_mantissa():
    values = torch.tensor([448.0, 17.0, 19.0, 21.0, 2.0**-10, 3 * 2.0**-10, -17.0])
    found = quantize_activations(values, ActivationScheme("tensor"), {})
    assert found.tolist() == [448.0, 16.0, 20.0, 20.0, 0.0, 2.0**-8, -16.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "scheme",
    [ActivationScheme("token"), ActivationScheme("tensor"), ActivationScheme("group", group_size=20)],
)
def test_activations_come_back_in_their_own_dtype_computed_in_float32(dtype, scheme):
    values = random(3, 48).to(dtype)
    found = quantize_activations(values, scheme, {})
    assert found.dtype == dtype
    assert torch.equal(found, quantize_activations(values.float(), scheme, {}).to(dtype))


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8)])
@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("token"),
        ActivationScheme("group", group_size=4),
        ActivationScheme("tensor"),
    ],
)
def test_an_empty_batch_stays_empty(shape, scheme):
    assert quantize_activations(torch.zeros(shape), scheme, {}).shape == shape


def test_int8_is_rounded_as_compressed_tensors_rounds_it():
    values = torch.tensor([[0.0, 1.0, -2.55, 0.013], [0.0, 0.0, 0.0, 0.0], [5.0, -1.0, 0.5, 0.49]])
    found = quantize_activations(values, ActivationScheme("token", dtype="int8"), {})
    steps = values.abs().amax(1, keepdim=True) / 127.5
    assert torch.equal(found[0], (values[0] / steps[0]).round().clamp(-128, 127) * steps[0])
    assert found[1].tolist() == [0.0] * 4
    assert torch.equal(found[2], (values[2] / steps[2]).round().clamp(-128, 127) * steps[2])
    assert found[2, 0] < 5.0  # the largest code is 127, but the scale divides by 127.5
