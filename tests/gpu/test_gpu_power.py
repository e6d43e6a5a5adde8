"""The meter on a real GPU."""

from __future__ import annotations

import time

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture
def busy():
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def work(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for _ in range(10):
                a @ a
            torch.cuda.synchronize()

    work(0.5)
    return work


def test_counter_and_samples_agree_under_load(busy):
    from arkbench.power import meter

    with meter([0]) as m:
        if not m.sources:
            pytest.skip(m.missing[0])
        idle = m.idle(3.0)
        busy(3.0)  # the load must be steady before the window: some power readings are a one-second mean
        t0 = time.monotonic()
        busy(5.0)
        reading = m.window(t0, time.monotonic())
    gpu = next(d for d in reading.devices if d.part == "gpu")
    assert gpu.counter_j == pytest.approx(gpu.integrated_j, rel=0.1)
    assert reading.energy_j > 1.5 * idle.mean_w * reading.duration_s
    assert reading.idle_w == idle.mean_w
    assert not any("short" in note for note in reading.notes)
    clocks = [row["sm_clock_mhz"] for row in m.rows() if row["source"] == "nvml"]
    assert all(clock and clock > 100 for clock in clocks)


def test_counter_updates_are_seen(busy):
    from arkbench.power import meter

    with meter([0]) as m:
        if not m.sources:
            pytest.skip(m.missing[0])
        busy(3.0)
    steps = {row["energy_j"] for row in m.rows() if row["source"] == "nvml" and row["energy_j"] is not None}
    assert len(steps) >= 10
