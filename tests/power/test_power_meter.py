"""The meter over a fake NVML, a fake powercap tree and real commands."""

from __future__ import annotations

import sys
import time
from itertools import pairwise

import pynvml
import pytest
from fake_nvml import FakeGpu, install

import arkbench.power.rapl as rapl
from arkbench.power import PowerError, meter
from arkbench.power.base import DeviceEnergy, Meter, combine
from arkbench.power.command import CommandMeter, parse_watts
from arkbench.power.nvml import throttle_names
from arkbench.power.rapl import RaplDomain, rapl_sources
from arkbench.power.window import POWER_COLUMNS

LOST = pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
UNSUPPORTED = pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


@pytest.fixture(autouse=True)
def no_rapl(monkeypatch, tmp_path):
    monkeypatch.setattr(rapl.rapl_sources, "__defaults__", (tmp_path / "powercap",))


def measure(m: Meter, seconds: float = 0.5, settle: float = 0.1):
    with m:
        time.sleep(settle)
        t0 = time.monotonic()
        time.sleep(seconds)
        return m.window(t0, t0 + seconds)


def test_counter_and_samples_agree(monkeypatch):
    install(monkeypatch, [FakeGpu(watts=300)])
    m = meter([0])
    reading = measure(m)
    (gpu,) = reading.devices
    assert gpu.counter_j == pytest.approx(150, rel=0.1) and gpu.integrated_j == pytest.approx(150, rel=0.05)
    assert reading.energy_j == gpu.energy_j == gpu.counter_j == reading.gpu_j
    assert reading.valid and reading.cpu_j is None and reading.idle_w is None
    assert any("CPU energy not available" in line for line in reading.missing)
    rows = m.rows()
    assert tuple(rows[0]) == POWER_COLUMNS
    assert rows[0]["sm_clock_mhz"] == 1980 and rows[0]["mem_clock_mhz"] == 3201 and rows[0]["throttle"] == ""
    assert rows[0]["temperature_c"] == 41 and rows[0]["power_limit_w"] == 700 and rows[0]["energy_j"] == 0
    assert 0 <= rows[0]["time_s"] < 0.5 and all(a["time_s"] <= b["time_s"] for a, b in pairwise(rows))


def test_gpus_are_read_apart_and_summed(monkeypatch):
    install(monkeypatch, [FakeGpu(watts=100), FakeGpu(watts=400)], instant=True)
    reading = measure(meter([0, 1]))
    assert [d.device for d in reading.devices] == ["0", "1"]
    assert [d.energy_j for d in reading.devices] == [pytest.approx(50, rel=0.1), pytest.approx(200, rel=0.1)]
    assert reading.energy_j == sum(d.energy_j for d in reading.devices)


def test_missing_counter_falls_back_to_samples(monkeypatch):
    install(monkeypatch, [FakeGpu(counter=UNSUPPORTED)])
    (gpu,) = measure(meter([0])).devices
    assert gpu.counter_j is None and gpu.energy_j == gpu.integrated_j == pytest.approx(150, rel=0.05)
    assert gpu.notes == ("nvml 0: energy is the integral of power samples",)


def test_frozen_counter_is_not_zero_energy(monkeypatch):
    install(monkeypatch, [FakeGpu(counter=lambda elapsed: 5_000_000)])
    (gpu,) = measure(meter([0]), 0.3).devices
    assert gpu.counter_j is None and gpu.energy_j == pytest.approx(90, rel=0.05)
    assert "nvml 0: the energy counter did not move" in gpu.notes


@pytest.mark.parametrize("fall", [5_000_000, 2**32 - 1])
def test_counter_that_falls_is_not_subtracted(monkeypatch, fall):
    install(monkeypatch, [FakeGpu(counter=lambda t: int(t * 300_000) + (fall if t < 0.4 else 0))])
    (gpu,) = measure(meter([0]), 0.6).devices
    assert gpu.counter_j is None and gpu.energy_j == pytest.approx(180, rel=0.05)
    assert "nvml 0: the energy counter was reset" in gpu.notes


def test_disagreement_above_a_tenth_is_marked(monkeypatch):
    install(monkeypatch, [FakeGpu(counter=lambda t: int(t / 0.02) * 20 * 360)])  # 360 W by counter, 300 W by samples
    (gpu,) = measure(meter([0])).devices
    assert gpu.energy_j == gpu.counter_j == pytest.approx(180, rel=0.1)
    assert any("differ by more than 10%" in n for n in gpu.notes)


def test_gpu_that_disappears_has_no_figure(monkeypatch):
    gone, healthy = FakeGpu(), FakeGpu()
    install(monkeypatch, [gone, healthy])
    with meter([0, 1]) as m:
        time.sleep(0.1)
        t0 = time.monotonic()
        time.sleep(0.1)
        gone.counter = gone.power_error = LOST
        time.sleep(0.3)
        reading = m.window(t0, time.monotonic())
    assert reading.devices[0].energy_j is None and reading.devices[1].energy_j is not None
    assert reading.energy_j is None and reading.gpu_j is None
    assert any("GPU is lost" in n for n in reading.notes)
    assert any("nvml 0: no energy figure" in line for line in reading.missing)


def test_mig_is_not_available(monkeypatch):
    install(monkeypatch, [FakeGpu(mig=[1, 1]), FakeGpu(mig=[0, 0])])
    reading = measure(meter([0, 1]), 0.2)
    assert reading.energy_j is None and reading.gpu_j is None
    assert any(line.startswith("GPU 0 energy not available: MIG is on") for line in reading.missing)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1234")
    assert "it is a MIG instance" in meter([0]).missing[0]


def test_cuda_visible_devices_chooses_the_gpu(monkeypatch):
    install(monkeypatch, [FakeGpu(watts=100), FakeGpu(watts=200, uuid="GPU-bbbb-cccc")])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-bbbb,0")
    first, second = meter([0, 1]).sources
    assert first.sample(0.0).watts == 200 and second.sample(0.0).watts == 100
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert meter([0]).sources[0].sample(0.0).watts == 200
    assert meter([1]).missing[0] == "GPU 1 energy not available: CUDA_VISIBLE_DEVICES=1 shows no device 1"


def test_unlike_gpus_ask_for_a_device_order(monkeypatch):
    install(monkeypatch, [FakeGpu(name="A"), FakeGpu(name="B")])
    assert any("CUDA_DEVICE_ORDER" in line for line in meter([0]).missing)
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    assert not any("CUDA_DEVICE_ORDER" in line for line in meter([0]).missing)


def test_nvml_absent_is_named(monkeypatch):
    def absent():
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    reading = measure(meter([0]), 0.05)
    assert reading.energy_j is None and reading.devices == ()
    assert reading.missing[0].startswith("GPU energy not available: NVML cannot be used")


def test_binding_absent_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert meter([0]).missing[0].startswith("GPU energy not available")


@pytest.mark.parametrize(
    ("mask", "names", "valid"),
    [
        (0x00, "", True),
        (0x01 | 0x02 | 0x10 | 0x100, "", True),
        (0x04, "sw_power_cap", True),
        (0x04 | 0x08, "sw_power_cap+hw_slowdown", False),
        (0x20, "sw_thermal_slowdown", False),
        (0x40, "hw_thermal_slowdown", False),
        (0x80, "hw_power_brake", False),
    ],
)
def test_throttling_invalidates_and_the_power_limit_is_noted(monkeypatch, mask, names, valid):
    assert throttle_names(mask) == names
    install(monkeypatch, [FakeGpu(throttle=mask)])
    reading = measure(meter([0]), 0.15)
    assert reading.valid is valid
    assert reading.reason == ("" if valid else f"nvml 0 throttled: {names.removeprefix('sw_power_cap+')}")
    assert any("at its power limit" in n for n in reading.notes) is bool(mask & 4)
    assert reading.energy_j is not None


def test_throttle_reasons_unknown_are_not_none(monkeypatch):
    install(monkeypatch, [FakeGpu(throttle=UNSUPPORTED)])
    assert meter([0]).sources[0].sample(0.0).throttle is None


def test_idle_power_is_of_the_rest_before(monkeypatch):
    gpu = FakeGpu(watts=100)
    install(monkeypatch, [gpu])
    with meter([0]) as m:
        time.sleep(0.1)
        idle = m.idle(0.4)
        assert idle.mean_w == pytest.approx(100, rel=0.1)
        gpu.watts, gpu.counter = 300, lambda elapsed: 2 * 10**9 + int(elapsed * 300_000)
        time.sleep(0.1)
        t0 = time.monotonic()
        time.sleep(0.4)
        busy = m.window(t0, t0 + 0.4)
        assert busy.idle_w == idle.mean_w
        assert busy.energy_j == pytest.approx(120, rel=0.1)
        m.idle(0.3)
    assert m.idle_drift().startswith("idle power was ")


def test_reader_that_raises_does_not_end_the_meter():
    class Broken:
        kind, device, part, derived, interval_s, max_gap_s = "nvml", "0", "gpu", False, 0.01, 0.5

        def sample(self, now):
            raise RuntimeError("boom")

    reading = measure(Meter([Broken()], gpus=1), 0.1)
    assert reading.energy_j is None and any("boom" in n for n in reading.notes)


def test_window_must_end_after_it_begins():
    with pytest.raises(ValueError, match="must end after"):
        Meter([]).window(2.0, 2.0)


def test_meter_starts_and_stops_twice(monkeypatch):
    install(monkeypatch, [FakeGpu()])
    m = meter([0])
    m.start()
    m.start()
    time.sleep(0.1)
    m.stop()
    m.stop()
    assert len(m.rows()) > 1


def device(part: str, joules: float | None) -> DeviceEnergy:
    return DeviceEnergy({"gpu": "nvml", "cpu": "rapl"}.get(part, part), "0", part, joules, joules, None)


@pytest.mark.parametrize(
    ("devices", "gpus", "energy"),
    [
        ([("gpu", 10.0), ("cpu", 5.0)], 1, 15.0),
        ([("gpu", 10.0), ("cpu", None)], 1, 10.0),
        ([("gpu", None), ("cpu", 5.0)], 1, None),
        ([("gpu", 10.0)], 2, None),
        ([("cpu", 5.0)], 1, None),
        ([("cpu", 5.0), ("cpu", 2.0)], 0, 7.0),
        ([("gpu", 10.0), ("command", 30.0)], 1, 30.0),
        ([("gpu", 10.0), ("command", None)], 1, None),
        ([("command", 30.0)], 0, 30.0),
        ([], 0, None),
    ],
)
def test_what_counts_into_the_sum(devices, gpus, energy):
    assert combine([device(*d) for d in devices], 0.0, 1.0, gpus=gpus).energy_j == energy


def powercap(root, domains: dict[str, tuple[str, int]]):
    for folder, (name, value) in domains.items():
        path = root / folder
        path.mkdir(parents=True)
        (path / "name").write_text(name + "\n")
        (path / "energy_uj").write_text(f"{value}\n")
        (path / "max_energy_range_uj").write_text("1000000000\n")
    return root


def test_rapl_reads_packages_and_dram_only(tmp_path):
    root = powercap(
        tmp_path / "cap",
        {
            "intel-rapl:0": ("package-0", 1),
            "intel-rapl:0:0": ("core", 2),
            "intel-rapl:0:1": ("dram", 3),
            "intel-rapl:1": ("package-1", 4),
            "intel-rapl:2": ("psys", 5),
            "intel-rapl-mmio:0": ("package-0", 6),
        },
    )
    sources, missing = rapl_sources(root)
    assert [s.device for s in sources] == ["package-0", "package-0/dram", "package-1"] and missing == []


def test_rapl_counter_wraps(tmp_path):
    root = powercap(tmp_path / "cap", {"intel-rapl:0": ("package-0", 999_000_000)})
    domain = RaplDomain(root / "intel-rapl:0", "package-0")
    counter = root / "intel-rapl:0" / "energy_uj"
    assert domain.sample(10.0).watts is None
    counter.write_text("999500000")
    assert domain.sample(10.5).watts == pytest.approx(1.0)
    counter.write_text("500000")
    wrapped = domain.sample(11.5)
    assert wrapped.watts == pytest.approx(1.0) and wrapped.energy_j == pytest.approx(1.5)


def test_rapl_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    root = powercap(tmp_path / "cap", {"intel-rapl:0": ("package-0", 1)})

    def refuse(self, *args):
        if self.name == "energy_uj":
            raise PermissionError(13, "Permission denied")
        return open(self).read()

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    sources, missing = rapl_sources(root)
    assert sources == [] and "CPU energy of package-0 not available" in missing[0] and "chmod a+r" in missing[0]


def test_no_powercap_is_named(tmp_path):
    sources, missing = rapl_sources(tmp_path / "absent")
    assert sources == [] and missing[0].startswith("CPU energy not available")


def test_rapl_is_the_energy_of_a_cpu_run(tmp_path, monkeypatch):
    root = powercap(tmp_path / "cap", {"intel-rapl:0": ("package-0", 0)})
    monkeypatch.setattr(rapl.rapl_sources, "__defaults__", (root,))
    counter, start = root / "intel-rapl:0" / "energy_uj", time.monotonic()
    original = rapl.Path.read_text

    def moving(self, *args):
        return str(int((time.monotonic() - start) * 50e6)) if self == counter else original(self, *args)

    monkeypatch.setattr(rapl.Path, "read_text", moving)
    reading = measure(meter([]), 1.0)
    assert reading.energy_j == reading.cpu_j == pytest.approx(50, rel=0.05)
    assert reading.gpu_j is None and reading.missing == () and reading.notes == ()


@pytest.mark.parametrize(
    ("output", "watts"), [("231.5", 231.5), ("power:\n 12 W\n\n", 12), ("7watts", 7), ("1e2 Watt", 100), ("0", 0)]
)
def test_watts_of_a_command(output, watts):
    assert parse_watts(output) == watts


@pytest.mark.parametrize("output", ["", "\n", "nan", "inf", "-5", "12 kW", "abc", "12 13", "1,5"])
def test_what_is_not_watts(output):
    with pytest.raises(ValueError):
        parse_watts(output)


def test_command_meter_measures_the_machine():
    reading = measure(meter(None, "echo 200"), 1.2, settle=0.2)
    assert reading.energy_j == reading.command_j == pytest.approx(240, rel=0.05) and reading.missing == ()


@pytest.mark.parametrize("command", ["exit 3", "echo hello", "true", "no-such-command-here"])
def test_command_that_does_not_work_is_one_line(command):
    with pytest.raises(PowerError, match=r"^--power-command: .*must print watts") as caught:
        meter(None, command)
    assert "\n" not in str(caught.value)


def test_command_that_hangs_is_a_gap():
    sample = CommandMeter("sleep 30", timeout_s=0.2).sample(1.0)
    assert sample.watts is None and "no answer within 0.2 s" in sample.error


def test_remote_endpoint_has_no_local_power():
    m = meter(None)
    assert m.sources == () and "--power-command" in m.missing[0]
