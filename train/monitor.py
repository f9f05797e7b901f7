"""What the card does while a run goes on: temperature, power, clock, and why it slows down."""

from __future__ import annotations

import math
import statistics
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import torch

CLOSE_S: Final = 5.0
"""Longest wait for the thread to end: a call of a hung driver may never come back."""
NUM_SEEN: Final = 3
"""Samples of a run that must show a reason before it is said: single ones come while a card
changes its clocks."""
DECLINE: Final = 0.9
"""Share of the best epoch's throughput below which an epoch counts as slow."""

# Functions of NVML that give the same under two names: which one is there depends on the driver and
# on the package.
TEMPERATURE: Final = ("nvmlDeviceGetTemperature", "nvmlDeviceGetTemperatureV")
POWER: Final = ("nvmlDeviceGetPowerUsage",)
CLOCK: Final = ("nvmlDeviceGetClockInfo",)
REASONS: Final = (
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
)

# Bits of nvmlDeviceGetCurrentClocksEventReasons, from nvml.h: the same under either of its names.
SW_POWER_CAP: Final = 0x04
HW_SLOWDOWN: Final = 0x08
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80

HOT: Final = (
    "warning: the GPU slows itself down because it is hot{figures}: clean fans and filters, give "
    "the case more air, or lower the power limit (nvidia-smi -pl)"
)
BRAKED: Final = (
    "warning: the GPU slows itself down because of its power supply{figures}: check the supply's "
    "wattage and cables; a laptop needs its own charger"
)
SLOWED: Final = (
    "warning: the GPU slows itself down{figures}: check its cooling, its power supply and cables"
)
CAPPED: Final = (
    "the GPU runs at its power limit{figures}: normal under full load, nothing needs to be done"
)
UNWATCHED: Final = "GPU temperature and clock are not watched: {reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading:
    """Means over the samples since the last reading; None for what the card does not report."""

    temp_c: float | None
    power_w: float | None
    clock_mhz: float | None
    """Of the streaming multiprocessors."""


class GpuMonitor:
    """Samples one card in a thread of its own until it is closed; never ends a run.

    Args:
        handle: NVML's handle of the card.
        nvml: The module `pynvml`, after its nvmlInit.
        say: Takes a line; called by `take` only, hence in the caller's thread.
        interval_s: Seconds between two samples; the first comes after one of them.
    """

    def __init__(
        self, handle: Any, nvml: Any, say: Callable[[str], None], interval_s: float = 1.0
    ) -> None:
        self._handle, self._nvml, self._say = handle, nvml, say
        self._interval_s = interval_s
        self._lock = threading.Lock()  # over the next three
        self._samples: list[dict[str, float]] = []
        self._seen: Counter[str] = Counter()
        self._lines: list[str] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu-monitor", daemon=True)
        self._thread.start()

    def take(self) -> GpuReading | None:
        """Say what came up, and give the means since the last call; None without any sample."""
        with self._lock:
            samples, self._samples = self._samples, []
            lines, self._lines = self._lines, []
        for line in lines:
            self._say(line)
        if not any(samples):
            return None
        return GpuReading(
            temp_c=_mean(samples, "temp_c"),
            power_w=_mean(samples, "power_w"),
            clock_mhz=_mean(samples, "clock_mhz"),
        )

    def close(self) -> None:
        """End the thread, within `CLOSE_S`, and let go of NVML; a second call does nothing."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():  # else its call still needs NVML
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def _run(self) -> None:
        try:
            while not self._closed.wait(self._interval_s):
                self._sample()
        except self._nvml.NVMLError as error:
            with self._lock:
                self._lines.append(UNWATCHED.format(reason=f"{error} (from now on)"))

    def _sample(self) -> None:
        """Ask the card once.

        Raises:
            NVMLError: The card cannot be asked any more.
        """
        nvml = self._nvml
        milliwatts = self._ask(POWER)
        answers = {
            "temp_c": self._ask(TEMPERATURE, nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if milliwatts is None else milliwatts / 1000,
            "clock_mhz": self._ask(CLOCK, nvml.NVML_CLOCK_SM),
        }
        sample = {name: value for name, value in answers.items() if value is not None}
        texts = slowdowns(self._ask(REASONS) or 0)
        with self._lock:
            self._samples.append(sample)
            self._seen.update(texts)
            self._lines += [
                text.format(figures=_figures(sample))
                for text in texts
                if self._seen[text] == NUM_SEEN
            ]

    def _ask(self, names: tuple[str, ...], *arguments: int) -> int | None:
        """Call the first of the functions that answers; None where the card has no answer."""
        nvml = self._nvml
        unanswered = (
            nvml.NVMLError_NotSupported,
            nvml.NVMLError_FunctionNotFound,
            nvml.NVMLError_NoPermission,
        )
        for function in (getattr(nvml, name, None) for name in names):
            if function is not None:
                with suppress(*unanswered):
                    answer: int = function(self._handle, *arguments)
                    return answer
        return None


def open_monitor(device: torch.device, say: Callable[[str], None]) -> GpuMonitor | None:
    """Watch the card of a CUDA device.

    Args:
        device: Of the run.
        say: Takes the reason where there is nothing to watch with, later the card's warnings.

    Returns:
        None for another device than CUDA, and where NVML is missing or does not know the card.
    """
    if device.type != "cuda":
        return None
    try:
        import pynvml
    except ImportError:
        say(UNWATCHED.format(reason="the package nvidia-ml-py is missing"))
        return None
    try:
        pynvml.nvmlInit()
        try:
            handle = find_handle(pynvml, device)
        except pynvml.NVMLError:
            pynvml.nvmlShutdown()
            raise
    except pynvml.NVMLError as error:
        say(UNWATCHED.format(reason=error))
        return None
    return GpuMonitor(handle, pynvml, say)


def find_handle(nvml: Any, device: torch.device) -> Any:
    """Find a CUDA device among NVML's cards: by UUID, else by PCI address, else by number.

    CUDA_VISIBLE_DEVICES renumbers CUDA's devices and not NVML's, so the number comes last. A slice
    of a card (MIG) has a UUID that is no card's; its PCI address gives the card.

    Raises:
        NVMLError: NVML knows no such card.
    """
    properties: Any = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    if hasattr(properties, "pci_bus_id"):
        place = (properties.pci_domain_id, properties.pci_bus_id, properties.pci_device_id)
        with suppress(nvml.NVMLError):
            return nvml.nvmlDeviceGetHandleByPciBusId("{:08x}:{:02x}:{:02x}.0".format(*place))
    index: Any = device.index  # None for plain "cuda", whatever its annotation says
    return nvml.nvmlDeviceGetHandleByIndex(torch.cuda.current_device() if index is None else index)


def slowdowns(mask: int) -> list[str]:
    """Give the texts, still without figures, for what slows the card by NVML's bits."""
    texts = []
    if mask & (SW_THERMAL | HW_THERMAL):
        texts.append(HOT)
    if mask & HW_POWER_BRAKE:
        texts.append(BRAKED)
    if mask & HW_SLOWDOWN and not texts:  # it stands beside its cause, where that is known
        texts.append(SLOWED)
    if mask & SW_POWER_CAP:
        texts.append(CAPPED)
    return texts


def slow_decline(rates: Sequence[float]) -> str | None:
    """Warn when the last two epochs are both more than 10 % slower than the best one.

    Args:
        rates: Images per second of the epochs so far, all with the same crop size.

    Returns:
        One line; None where all is well.
    """
    best = max(rates, default=math.nan)
    if len(rates) < 3 or not max(rates[-2:]) < DECLINE * best:
        return None
    return (
        f"warning: the last two epochs ran at {rates[-2]:.0f} and {rates[-1]:.0f} img/s, the best "
        f"one at {best:.0f}: look at other programs, the antivirus, the power plan and, where "
        "there is one, the GPU's temperature"
    )


def _mean(samples: Sequence[dict[str, float]], name: str) -> float | None:
    values = [sample[name] for sample in samples if name in sample]
    return statistics.fmean(values) if values else None


def _figures(sample: dict[str, float]) -> str:
    units = {"temp_c": "C", "power_w": "W", "clock_mhz": "MHz"}
    figures = ", ".join(f"{value:.0f} {units[name]}" for name, value in sample.items())
    return f" ({figures})" if figures else ""
