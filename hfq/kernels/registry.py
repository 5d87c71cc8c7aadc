"""Registry of the kernels, and the choice of one for each layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from hfq.errors import SetupError, nearest
from hfq.formats import ActivationScheme, Format
from hfq.kernels import reference
from hfq.kernels.cpp import kernel as cpu
from hfq.kernels.cpp.expert_products import ExpertProducts, Layers, add_products
from hfq.kernels.cpp.layers import reason_against
from hfq.kernels.cpp.library import reason_missing, start
from hfq.kernels.cpu import int8, panels
from hfq.kernels.cuda import expert_products as cuda
from hfq.kernels.cuda import scaled_mm, triton_linear
from hfq.kernels.cuda.libraries import capability

__all__ = ["KERNELS", "ExpertKernel", "Kernel", "check_kernel", "choose_kernel", "explain_kernels"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _nothing(*_: object) -> str | None:
    return None


def _any_size(*_: object) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class ExpertKernel:
    """Products by all experts of a layer.

    Attributes:
        products: `ExpertProducts` of `hfq.kernels.cpp.expert_products`, or a class with its methods.
        block_size: See `hfq.kernels.cuda.expert_products.block_size`.
        multiply_rows: Multiplies by one expert with the bits of `products`, see
            `hfq.kernels.cuda.expert_products.multiply_rows`; None if `Kernel.linear` does.
        needs_all: True if products read the weights of all experts of a layer, routed or not.
        add: Multiplies by experts that are in memory for one call, see
            `hfq.kernels.cpp.expert_products.add_products`; None if there is no such function.
    """

    products: Callable[[Sequence[Layers], Layers, bool], ExpertProducts | cuda.ExpertProducts]
    block_size: Callable[[int, int, int, torch.dtype], int | None]
    multiply_rows: Callable[..., torch.Tensor] | None = None
    needs_all: bool = True
    add: Callable[..., bool] | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A multiplication by quantized weights, its gradient, and its requirements.

    Attributes:
        name: The name in `HfqConfig(kernel=…)`.
        linear: See `hfq.kernels.reference.linear`. A kernel with `refuses_scheme` also receives the scheme
            and rounds the activations itself.
        linear_grad: See `hfq.kernels.reference.linear_grad`.
        devices: The device types that the kernel computes on; `"any"` for all.
        capability: The lowest compute capability of a CUDA device, (major, minor).
        dtypes: The dtypes of activations that the kernel accepts.
        priority: `"auto"` chooses the available kernel of the highest priority.
        lacks: Returns why the kernel is unavailable, or None. May block on the C++ build.
        refuses: (format, in_features, out_features) → the reason why the kernel does not support the layer,
            or None.
        refuses_scheme: (format, scheme, in_features, out_features) → the reason why the kernel cannot
            multiply rounded activations by the layer, or None. The attribute is None if the kernel multiplies
            floats, rounded before or not.
        experts: Multiplies by all experts of a layer on a device; None if the kernel does not.
    """

    name: str
    linear: Callable[..., torch.Tensor]
    linear_grad: Callable[..., torch.Tensor]
    devices: tuple[str, ...] = ("any",)
    capability: tuple[int, int] = (0, 0)
    dtypes: tuple[torch.dtype, ...] = _FLOATS
    priority: int = 0
    lacks: Callable[[], str | None] = _nothing
    refuses: Callable[[Format, int, int], str | None] = _nothing
    refuses_scheme: Callable[[Format, ActivationScheme, int, int], str | None] | None = None
    experts: ExpertKernel | None = None

    @property
    def rounds(self) -> bool:
        """True if the kernel rounds activations itself and multiplies the codes."""
        return self.refuses_scheme is not None

    def computes_on(self, device: str) -> bool:
        """Returns True if the kernel computes on a type of device."""
        return "any" in self.devices or device in self.devices


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel("reference", reference.linear, reference.linear_grad),
        Kernel("torch", panels.linear, panels.linear_grad, devices=("cpu",), priority=10),
        Kernel(
            "cpp",
            cpu.linear,
            cpu.linear_grad,
            devices=("cpu",),
            priority=20,
            lacks=reason_missing,
            refuses=reason_against,
            experts=ExpertKernel(ExpertProducts, _any_size, needs_all=False, add=add_products),
        ),
        Kernel(
            "int8",
            int8.linear,
            panels.linear_grad,
            devices=("cpu",),
            priority=30,
            refuses_scheme=int8.reason_against,
        ),
        Kernel(
            "triton",
            triton_linear.linear,
            reference.linear_grad,
            devices=("cuda",),
            capability=(8, 0),
            priority=20,
            lacks=triton_linear.reason_missing,
            refuses=triton_linear.reason_against,
            experts=ExpertKernel(cuda.ExpertProducts, cuda.block_size, cuda.multiply_rows),
        ),
        Kernel(
            "triton_fp8",
            triton_linear.quantized_linear,
            reference.linear_grad,
            devices=("cuda",),
            capability=(8, 0),
            priority=30,
            lacks=triton_linear.reason_missing,
            refuses_scheme=triton_linear.reason_against_scheme,
        ),
        Kernel(
            "scaled_mm",
            scaled_mm.linear,
            reference.linear_grad,
            devices=("cuda",),
            capability=(8, 9),
            priority=40,
            lacks=triton_linear.reason_missing,
            refuses_scheme=scaled_mm.reason_against,
        ),
    )
}


def check_kernel(preference: str) -> None:
    """Checks a kernel name, and starts the C++ build if the kernel may need it.

    Raises:
        SetupError: No kernel has that name.
    """
    names = ["auto", *KERNELS]
    if not isinstance(preference, str) or preference not in names:
        raise SetupError(
            f"kernel={preference!r} is not valid.{nearest(str(preference), names)}",
            expected=" or ".join(map(repr, names)),
            found=repr(preference),
            fix='Use kernel="auto", or one of the names above.',
        )
    if preference in ("auto", "cpp"):
        start()


def choose_kernel(
    preference: str,
    weight_format: Format | None = None,
    in_features: int = 0,
    out_features: int = 0,
    device: str = "cpu",
    scheme: ActivationScheme | None = None,
) -> Kernel:
    """Returns the kernel for a layer.

    Args:
        preference: A kernel's name, or `"auto"`. If the named kernel does not support the layer, the next
            kernel that does is returned.
        weight_format: The layer's format; None for any layer.
        in_features: The size of an input.
        out_features: The size of an output.
        device: The type of the device that computes.
        scheme: How activations are rounded; None to leave them unchanged.

    Raises:
        SetupError: No kernel has that name, or the kernel is not available on this machine.
    """
    check_kernel(preference)
    if preference != "auto":
        missing = KERNELS[preference].lacks()
        if missing is not None:
            raise SetupError(
                f"Kernel {preference!r} is not available.",
                expected="a kernel that this machine can run",
                found=missing,
                fix='Use kernel="auto" for the fastest available kernel.',
            )
        if weight_format is None:
            return KERNELS[preference]
    reasons = explain_kernels(preference, weight_format, in_features, out_features, device, scheme)
    return next(KERNELS[name] for name, reason in reasons.items() if reason is None)


def explain_kernels(
    preference: str,
    weight_format: Format | None,
    in_features: int = 0,
    out_features: int = 0,
    device: str = "cpu",
    scheme: ActivationScheme | None = None,
) -> dict[str, str | None]:
    """Returns why each kernel is not chosen for a layer, in the order of preference.

    The reason of the chosen kernel is None. Two groups of kernels are left out unless `preference` names one:
    those for other devices, and, without a scheme, those for rounded activations.

    Args:
        preference: A kernel's name, or `"auto"`.
        weight_format: The layer's format; None for any layer.
        in_features: The size of an input.
        out_features: The size of an output.
        device: The type of the device that computes.
        scheme: How activations are rounded; None to leave them unchanged.
    """
    order = sorted(KERNELS.values(), key=lambda kernel: (kernel.name != preference, -kernel.priority))
    reasons: dict[str, str | None] = {}
    chosen = ""
    for kernel in order:
        is_meant = kernel.computes_on(device) and (scheme is not None or not kernel.rounds)
        if not is_meant and kernel.name != preference:
            continue
        reason = f"not used: {chosen} is preferred" if chosen else _reason_against(kernel, device, scheme)
        if reason is None and weight_format is not None:
            reason = kernel.refuses(weight_format, in_features, out_features)
        if (
            reason is None
            and weight_format is not None
            and kernel.refuses_scheme is not None
            and scheme is not None
        ):
            reason = kernel.refuses_scheme(weight_format, scheme, in_features, out_features)
        chosen = chosen or (kernel.name if reason is None else "")
        reasons[kernel.name] = reason
    return reasons


def _reason_against(kernel: Kernel, device: str, scheme: ActivationScheme | None) -> str | None:
    """Returns why a kernel cannot run on a device of this machine, or None."""
    if not kernel.computes_on(device):
        return f"it computes on {' and '.join(kernel.devices)}"
    if kernel.rounds and scheme is None:
        return "it multiplies rounded activations only"
    found = capability() if device == "cuda" else None
    if found is not None and found < kernel.capability:
        return f"it needs compute capability {'%d.%d' % kernel.capability}, the device has {'%d.%d' % found}"
    return kernel.lacks()
