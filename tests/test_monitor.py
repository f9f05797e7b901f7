"""The monitor's lines and means, with a driver written by hand in place of NVML."""

# ruff: noqa: N802 - its functions have the names of NVML's

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch

from train import monitor
from train.monitor import GpuMonitor, GpuReading, find_handle, open_monitor, slow_decline, slowdowns

HOUR_S = 3600.0
"""An interval that no test outlasts: only the tests sample."""
CARD = SimpleNamespace(
    uuid="1b2c", pci_domain_id=0, pci_bus_id=0x65, pci_device_id=0, name="CUDA's first"
)


class FakeNvml:
    """A driver with one card, whose answers and errors a test sets."""

    NVMLError = pynvml.NVMLError
    NVMLError_NotSupported = pynvml.NVMLError_NotSupported
    NVMLError_FunctionNotFound = pynvml.NVMLError_FunctionNotFound
    NVMLError_NoPermission = pynvml.NVMLError_NoPermission
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_CLOCK_SM = pynvml.NVML_CLOCK_SM

    def __init__(self) -> None:
        self.temp_c, self.milliwatts, self.clock_mhz, self.mask = 60, 250_000, 1700, 0
        self.errors: dict[str, int] = {}
        self.users = 1
        self.num_asked = 0
        self.asked_thrice = threading.Event()

    def _answer(self, name: str, value: Any) -> Any:
        if name in self.errors:
            raise pynvml.NVMLError(self.errors[name])
        return value

    def nvmlInit(self) -> None:
        self._answer("init", None)
        self.users += 1

    def nvmlShutdown(self) -> None:
        self.users -= 1

    def nvmlDeviceGetTemperature(self, _: str, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        self.num_asked += 1
        if self.num_asked == 3:
            self.asked_thrice.set()
        return self._answer("temperature", self.temp_c)

    def nvmlDeviceGetTemperatureV(self, _: str, sensor: int) -> Any:
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return self._answer("new temperature", self.temp_c)

    def nvmlDeviceGetPowerUsage(self, _: str) -> Any:
        return self._answer("power", self.milliwatts)

    def nvmlDeviceGetClockInfo(self, _: str, clock: int) -> Any:
        assert clock == pynvml.NVML_CLOCK_SM
        return self._answer("clock", self.clock_mhz)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, _: str) -> Any:
        return self._answer("reasons", self.mask)

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> Any:
        return self._answer("uuid", f"card {uuid}")

    def nvmlDeviceGetHandleByPciBusId(self, place: str) -> Any:
        return self._answer("bus", f"card at {place}")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self._answer("index", f"card number {index}")


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Give a driver that `import pynvml` finds, and a torch with a CUDA device."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: CARD)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    return fake


@contextmanager
def watched(
    nvml: FakeNvml, say: Callable[[str], None], interval_s: float = HOUR_S
) -> Iterator[GpuMonitor]:
    subject = GpuMonitor("card", nvml, say, interval_s)
    try:
        yield subject
    finally:
        subject.close()


def test_a_reading_is_the_mean_since_the_last_one() -> None:
    nvml = FakeNvml()
    with watched(nvml, pytest.fail) as subject:
        assert subject.take() is None
        subject._sample()
        nvml.temp_c, nvml.milliwatts, nvml.clock_mhz = 70, 350_000, 1500
        subject._sample()
        assert subject.take() == GpuReading(temp_c=65.0, power_w=300.0, clock_mhz=1600.0)
        assert subject.take() is None
        subject._sample()
        assert subject.take() == GpuReading(temp_c=70.0, power_w=350.0, clock_mhz=1500.0)


@pytest.mark.parametrize(
    "error",
    [
        pynvml.NVML_ERROR_NOT_SUPPORTED,
        pynvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        pynvml.NVML_ERROR_NO_PERMISSION,
    ],
)
def test_what_a_card_does_not_report_is_none_and_the_rest_works(error: int) -> None:
    nvml = FakeNvml()
    nvml.errors = {"power": error, "clock": error, "reasons": error}
    with watched(nvml, pytest.fail) as subject:
        subject._sample()
        assert subject.take() == GpuReading(temp_c=60.0, power_w=None, clock_mhz=None)


def test_a_card_that_reports_nothing_gives_no_reading() -> None:
    nvml = FakeNvml()
    names = ("temperature", "new temperature", "power", "clock", "reasons")
    nvml.errors = dict.fromkeys(names, pynvml.NVML_ERROR_NOT_SUPPORTED)
    with watched(nvml, pytest.fail) as subject:
        subject._sample()
        assert subject.take() is None


def test_a_driver_without_the_old_temperature_is_asked_for_the_new_one() -> None:
    nvml = FakeNvml()
    nvml.errors = {"temperature": pynvml.NVML_ERROR_FUNCTION_NOT_FOUND}
    with watched(nvml, pytest.fail) as subject:
        subject._sample()
        reading = subject.take()
    assert reading is not None
    assert reading.temp_c == 60.0


def test_heat_is_said_once_a_run_and_only_by_take() -> None:
    nvml = FakeNvml()
    lines: list[str] = []
    nvml.temp_c, nvml.mask = 87, monitor.SW_THERMAL | monitor.HW_SLOWDOWN
    with watched(nvml, lines.append) as subject:
        for _ in range(3):
            assert lines == []
            subject._sample()
        subject.take()
        subject._sample()
        subject.take()
    assert lines == [
        "warning: the GPU slows itself down because it is hot (87 C, 250 W, 1700 MHz): clean fans "
        "and filters, give the case more air, or lower the power limit (nvidia-smi -pl)"
    ]


def test_a_reason_that_stands_in_two_samples_only_is_not_said() -> None:
    nvml = FakeNvml()
    with watched(nvml, pytest.fail) as subject:
        for mask in (monitor.HW_SLOWDOWN, 0, monitor.HW_SLOWDOWN, 0, 0):
            nvml.mask = mask
            subject._sample()
        subject.take()


def test_a_second_reason_is_said_too() -> None:
    nvml = FakeNvml()
    lines: list[str] = []
    with watched(nvml, lines.append) as subject:
        for mask in (monitor.SW_POWER_CAP, monitor.SW_POWER_CAP | monitor.HW_THERMAL):
            nvml.mask = mask
            for _ in range(3):
                subject._sample()
            subject.take()
    assert [line.split(" (")[0] for line in lines] == [
        "the GPU runs at its power limit",
        "warning: the GPU slows itself down because it is hot",
    ]


def test_a_reason_without_figures_has_no_empty_brackets() -> None:
    nvml = FakeNvml()
    lines: list[str] = []
    names = ("temperature", "new temperature", "power", "clock")
    nvml.errors = dict.fromkeys(names, pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.mask = monitor.HW_SLOWDOWN
    with watched(nvml, lines.append) as subject:
        for _ in range(3):
            subject._sample()
        assert subject.take() is None
    assert lines == [
        "warning: the GPU slows itself down: check its cooling, its power supply and cables"
    ]


@pytest.mark.parametrize(
    ("mask", "texts"),
    [
        (pynvml.nvmlClocksThrottleReasonNone, []),
        (pynvml.nvmlClocksThrottleReasonGpuIdle, []),
        (pynvml.nvmlClocksThrottleReasonSwPowerCap, [monitor.CAPPED]),
        (pynvml.nvmlClocksThrottleReasonSwThermalSlowdown, [monitor.HOT]),
        (pynvml.nvmlClocksThrottleReasonHwThermalSlowdown, [monitor.HOT]),
        (pynvml.nvmlClocksThrottleReasonHwSlowdown, [monitor.SLOWED]),
        (pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown, [monitor.BRAKED]),
        (0x08 | 0x40, [monitor.HOT]),
        (0x08 | 0x80, [monitor.BRAKED]),
        (0x08 | 0x04, [monitor.SLOWED, monitor.CAPPED]),
        (0x1FF, [monitor.HOT, monitor.BRAKED, monitor.CAPPED]),
    ],
)
def test_each_bit_has_its_text(mask: int, texts: list[str]) -> None:
    assert slowdowns(mask) == texts


def test_the_package_has_the_functions_that_are_called() -> None:
    ours = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    called = [*monitor.TEMPERATURE, *monitor.POWER, *monitor.CLOCK, *monitor.REASONS]
    missing = [name for name in (*ours, *called) if not hasattr(pynvml, name)]
    assert set(missing) <= {"nvmlDeviceGetTemperatureV"}, "in newer packages only"


def test_the_thread_samples_by_itself_and_ends_on_close() -> None:
    nvml = FakeNvml()
    with watched(nvml, pytest.fail, interval_s=0.001) as subject:
        assert nvml.asked_thrice.wait(30)
        assert subject.take() is not None
    assert not subject._thread.is_alive()
    assert nvml.users == 0
    subject.close()
    assert nvml.users == 0


def test_an_error_in_the_thread_stops_it_with_one_line() -> None:
    nvml = FakeNvml()
    lines: list[str] = []
    nvml.errors = {"power": pynvml.NVML_ERROR_GPU_IS_LOST}
    with watched(nvml, lines.append, interval_s=0.001) as subject:
        subject._thread.join(30)
        assert not subject._thread.is_alive()
        assert lines == []
        assert subject.take() is None
        assert subject.take() is None
    assert lines == ["GPU temperature and clock are not watched: GPU is lost (from now on)"]
    assert nvml.users == 0


def test_the_cpu_has_no_monitor() -> None:
    assert open_monitor(torch.device("cpu"), pytest.fail) is None


def test_without_the_package_one_line_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_monitor(torch.device("cuda"), lines.append) is None
    assert lines == [
        "GPU temperature and clock are not watched: the package nvidia-ml-py is missing"
    ]


def test_without_the_driver_one_line_gives_the_reason(nvml: FakeNvml) -> None:
    lines: list[str] = []
    nvml.errors = {"init": pynvml.NVML_ERROR_LIBRARY_NOT_FOUND}
    assert open_monitor(torch.device("cuda"), lines.append) is None
    assert lines == ["GPU temperature and clock are not watched: NVML Shared Library Not Found"]


def test_a_card_that_nvml_does_not_know_is_not_watched(nvml: FakeNvml) -> None:
    lines: list[str] = []
    nvml.errors = dict.fromkeys(("uuid", "bus", "index"), pynvml.NVML_ERROR_NOT_FOUND)
    assert open_monitor(torch.device("cuda"), lines.append) is None
    assert len(lines) == 1
    assert nvml.users == 1


def test_a_monitor_opens_and_closes_the_driver(nvml: FakeNvml) -> None:
    subject = open_monitor(torch.device("cuda", 0), pytest.fail)
    assert subject is not None
    assert nvml.users == 2
    subject.close()
    assert nvml.users == 1


def test_a_card_is_found_by_uuid_then_address_then_number(nvml: FakeNvml) -> None:
    device = torch.device("cuda", 1)
    assert find_handle(nvml, device) == "card GPU-1b2c"
    nvml.errors = {"uuid": pynvml.NVML_ERROR_NOT_FOUND}
    assert find_handle(nvml, device) == "card at 00000000:65:00.0"
    nvml.errors["bus"] = pynvml.NVML_ERROR_NOT_FOUND
    assert find_handle(nvml, device) == "card number 1"
    assert find_handle(nvml, torch.device("cuda")) == "card number 3"


def test_an_older_torch_leaves_the_number(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace())
    assert find_handle(nvml, torch.device("cuda", 2)) == "card number 2"


@pytest.mark.parametrize(
    "rates",
    [
        [],
        [100.0],
        [100.0, 50.0],
        [100.0, 89.0, 91.0],  # one slow epoch
        [100.0, 91.0, 89.0],
        [100.0, 50.0, 50.0, 95.0],  # over again
        [100.0, 90.0, 90.0],  # 10 % is not more than 10 %
        [50.0, 60.0, 70.0],
    ],
)
def test_a_steady_run_is_not_warned_about(rates: list[float]) -> None:
    assert slow_decline(rates) is None


def test_two_slow_epochs_are_warned_about() -> None:
    assert slow_decline([800.0, 1000.0, 990.0, 880.0, 700.4]) == (
        "warning: the last two epochs ran at 880 and 700 img/s, the best one at 1000: look at "
        "other programs, the antivirus, the power plan and, where there is one, the GPU's "
        "temperature"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_real_card_reports_what_it_does() -> None:
    lines: list[str] = []
    subject = open_monitor(torch.device("cuda", 0), lines.append)
    assert subject is not None, lines
    subject._sample()
    reading = subject.take()
    subject.close()
    assert reading is not None
    assert reading.temp_c is None or 0 < reading.temp_c < 120
    assert reading.clock_mhz is None or 0 < reading.clock_mhz < 10_000
