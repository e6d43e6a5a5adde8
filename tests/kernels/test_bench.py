"""The kernel bench where there is no GPU, and the figures measured earlier that stand beside its products."""

import pytest

from arkbench import published
from arkbench.targets import bundled
from arkbench.targets.base import TargetError
from engine.kernels import bench


def test_off_the_gpu_it_is_refused_in_one_line():
    with pytest.raises(TargetError, match=r"timed on an NVIDIA GPU, not on 'cpu'; leave them out$"):
        bundled.measure_kernels("products", (1,), "cpu")


def test_an_unknown_part_is_named():
    with pytest.raises(TargetError, match="no part 'all'; there are products, attention, small"):
        bundled.measure_kernels("all", (1,), "cuda")


def test_figures_measured_earlier_join_the_products(monkeypatch):
    rows = [{"shape": "34816x5120", "rows": m, "us": 1.0} for m in (16, 17)]
    monkeypatch.setattr(bench, "measure", lambda part, rows_, device: [dict(row) for row in rows])
    found = bundled.measure_kernels("products", (16, 17), "cuda")
    assert [row["marlin_h200_measured_earlier_us"] for row in found] == [43.2, None]
    assert "marlin_h200_measured_earlier_us" not in bundled.measure_kernels("small", (16,), "cuda")[0]


def test_every_timed_shape_has_figures_of_a_peer():
    peers = published.table("peers")
    assert len(peers) == 54
    for n, k in bench.SHAPES:
        assert {int(p["rows"]) for p in peers if (int(p["n"]), int(p["k"])) == (n, k)} >= {1, 8, 16, 32, 64, 128, 256}


@pytest.mark.parametrize(("nbytes", "sets"), [(1, 24), (92e6, 3), (46e6, 6), (1e9, 2)])
def test_inputs_rotate_over_more_than_the_cache(nbytes, sets):
    assert bench.sets_for(nbytes) == sets
