"""What is predicted of one H100 (SXM, 80 GB) before the tier has run there, and how each figure is measured.

`python -m tests.gpu.predictions` prints them as a table. A figure that deviates by half is a finding: either the reason
given here is wrong, or the code does something else than is believed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.measured import device_name, device_peak_bytes, iteration_s, recorded, tflops
from tests.gpu.profiles import attention, profiles_of
from tools.common.tables import markdown_table

_STEP = "`ckpt-plan`"
_ATTENTION = "`ckpt-plan`: FlashAttention-2; cuDNN's kernel is about twice as fast"
DEVIATES = 0.5  # of the predicted figure
H100_TFLOPS = 989.4  # dense bf16: NVIDIA's data sheet of the H100 SXM


@dataclass(frozen=True)
class Prediction:
    """A figure: `measured` finds it below the tier's OUT, None if it was not observed there."""

    what: str
    unit: str
    predicted: float
    why: str
    measured: Callable[[Path], float | None]

    def deviates(self, measured: float | None) -> bool | None:
        """Whether by half or more; None if it was not observed."""
        return None if measured is None else abs(measured - self.predicted) >= DEVIATES * self.predicted


def is_of_the_predicted_kind(device: str) -> bool:
    """Whether a device, by its name, has the peak of an H100 SXM: an H200 has it, and forms of other power have not."""
    return any(name in device for name in ("H100", "H200")) and not any(form in device for form in ("PCIe", "NVL"))


def _mfu(part: str) -> Callable[[Path], float | None]:
    def measured(out: Path) -> float | None:
        found, device = tflops(out, part), device_name(out)
        if found is None or device is None or not is_of_the_predicted_kind(device):
            return None
        return 100 * found / H100_TFLOPS

    return measured


def _peak_gb(out: Path) -> float | None:
    found = device_peak_bytes(out / "step-time" / "trace")
    return None if found is None else found / 1e9


def _attention_s(part: str) -> Callable[[Path], float | None]:
    def measured(out: Path) -> float | None:
        found = [attention(path) for path in profiles_of(out, part)]
        return found[0].seconds if found and found[0] is not None else None

    return measured


def _test(part: str, name: str) -> Callable[[Path], float | None]:
    return lambda out: recorded(out, part, name)


PREDICTIONS = (
    Prediction("`step-time`: an iteration", "s", 0.167, _STEP, lambda out: iteration_s(out, "step-time")),
    Prediction("`step-time`: MFU, 1 micro-batch", "%", 37.5, _STEP, _mfu("step-time")),
    Prediction("`step-time`: attention's kernels", "s", 0.0207, _ATTENTION, _attention_s("step-time")),
    Prediction("`step-time-4`: an iteration", "s", 0.590, _STEP, lambda out: iteration_s(out, "step-time-4")),
    Prediction("`step-time-4`: MFU, 4 micro-batches", "%", 42.3, _STEP, _mfu("step-time-4")),
    Prediction("`step-time-4`: attention's kernels", "s", 0.083, _ATTENTION, _attention_s("step-time-4")),
    Prediction("`step-time`: device peak", "GB", 32.9, _STEP, _peak_gb),
    Prediction(
        "`copies`: a save's copies to pinned memory", "GB/s", 50,
        "PCIe 5.0 x16 carries 63 GB/s each way; large copies reach about 80 % of that",
        _test("copies", "device_to_host_GBps"),
    ),
    Prediction(
        "`copies`: the same beside computing", "GB/s", 50,
        "copy engines take no multiprocessor; the copies need 2 % of the device memory's bandwidth",
        _test("copies", "beside_computing_GBps"),
    ),
    Prediction(
        "`copies`: computing beside copies, compared with alone", "x", 1.0,
        "the same", _test("copies", "computing_beside_copies"),
    ),
    Prediction(
        "`copies`: to pageable memory", "GB/s", 5,
        "the driver copies through a pinned buffer of its own, and a processor copies from there",
        _test("copies", "pageable_GBps"),
    ),
    Prediction(
        "`copies`: pinning touched memory", "GB/s", 5, "the driver locks and maps each page; 14 GB in 3 s",
        _test("copies", "pin_GBps"),
    ),
)  # fmt: skip


def table() -> list[str]:
    rows = [(one.what, f"{one.predicted:g} {one.unit}", one.why) for one in PREDICTIONS]
    return markdown_table(("figure", "predicted", "reason"), rows)


if __name__ == "__main__":
    print("\n".join(table()))
