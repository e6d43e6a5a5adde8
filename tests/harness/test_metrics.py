"""Every definition against figures worked out by hand."""

import pytest

from arkbench import metrics
from arkbench.metrics import Machine, StepCost
from arkbench.records import RequestRecord


def record(request=0, sent=0.0, times=(), counts=None, prompt=10, status="ok", scheduled=None, output=None):
    counts = list(counts) if counts is not None else [1] * len(times)
    return RequestRecord(
        scenario="s", variant="v", cell="c", repetition=0, request=request,
        scheduled_s=sent if scheduled is None else scheduled, sent_s=sent,
        first_token_s=times[0] if times else None, last_token_s=times[-1] if times else None,
        token_times_s=list(times), token_counts=counts, prompt_tokens=prompt, cached_tokens=0,
        output_tokens=sum(counts) if output is None else output, status=status,
    )  # fmt: skip


def test_ttft_is_from_sent_and_from_schedule():
    late = record(sent=2.0, times=[2.5], scheduled=1.0)
    assert metrics.ttft(late) == pytest.approx(0.5)
    assert metrics.ttft_from_schedule(late) == pytest.approx(1.5)


def test_a_request_without_a_token_has_no_times():
    silent = record(status="timeout")
    assert metrics.ttft(silent) is None
    assert metrics.tpot(silent) is None
    assert metrics.token_gaps(silent) == []


def test_one_token_has_no_tpot():
    assert metrics.tpot(record(times=[0.2])) is None


def test_a_bundled_first_piece_does_not_inflate_the_rate():
    times = [1.0] + [1.0 + 0.01 * n for n in range(1, 25)]
    assert metrics.tpot(record(times=times, counts=[8] + [1] * 24)) == pytest.approx(0.010)


def test_pieces_of_four_tokens_count_as_four_gaps():
    four = record(times=[0.0, 0.04, 0.08], counts=[4, 4, 4])
    assert metrics.token_gaps(four) == pytest.approx([0.01] * 8)


def test_tokens_are_those_of_usage_not_of_pieces():
    assert metrics.tpot(record(times=[0.0, 1.0], counts=[1, 1], output=11)) == pytest.approx(0.1)


def test_steady_window_of_two_streams():
    a = record(0, times=[1.0, 2.0, 3.0, 4.0])
    b = record(1, times=[1.5, 2.5, 3.5, 4.5])
    window, why = metrics.steady_window([a, b], 2)
    assert why == ""
    assert (window.start_s, window.end_s, window.tokens) == (1.5, 4.0, 5)
    assert window.tok_s == pytest.approx(2.0)


def test_no_steady_window_says_so():
    window, why = metrics.steady_window([record(0, times=[1.0, 2.0]), record(1, times=[3.0, 4.0])], 2)
    assert window is None
    assert why == "no steady window: a stream ended before the last one had its first token"


def test_fewer_streams_than_planned_have_no_window():
    window, why = metrics.steady_window([record(0, times=[1.0, 2.0]), record(1, status="failed")], 2)
    assert window is None
    assert why == "only 1 of 2 streams made tokens"


def test_one_token_streams_have_no_window():
    assert metrics.steady_window([record(0, times=[1.0])], 1)[0] is None


def test_closed_loop_window_ends_when_a_stream_ends_for_good():
    # Stream A: 0-2, 2-4; stream B: 0-3, 3-6. The first stream to end for good is A, at 4.
    records = [
        record(0, sent=0.0, times=[1.0, 2.0]),
        record(1, sent=0.0, times=[1.0, 3.0]),
        record(2, sent=2.0, times=[2.5, 4.0]),
        record(3, sent=3.0, times=[3.5, 6.0]),
    ]
    window, _ = metrics.steady_window(records, 2)
    assert (window.start_s, window.end_s) == (1.0, 4.0)
    assert window.tokens == 5  # at 2, 3, 2.5, 4 and 3.5


def test_tokens_of_cut_requests_are_in_the_window():
    records = [record(0, times=[1.0, 2.0, 3.0]), record(1, times=[1.0, 2.0, 3.0, 4.0], status="cancelled")]
    window, _ = metrics.steady_window(records, 2)
    assert (window.end_s, window.tokens) == (3.0, 4)


def test_combined_rate_leaves_refused_ones_out():
    burst = [
        record(0, sent=1.0, times=[2.0], prompt=1000),
        record(1, sent=1.0, times=[5.0], prompt=3000),
        record(2, sent=1.0, status="refused", prompt=9000),
        record(3, sent=1.0, status="timeout", prompt=9000),
    ]
    assert metrics.combined_prefill_rate(burst) == pytest.approx(1000.0)


def test_combined_rate_of_nothing_answered_is_none():
    assert metrics.combined_prefill_rate([record(0, status="refused")]) is None


def test_prefill_rate_of_one_prompt_is_tokens_over_ttft():
    assert metrics.combined_prefill_rate([record(0, sent=1.0, times=[1.5], prompt=256)]) == pytest.approx(512.0)


def test_most_in_flight():
    records = [record(0, times=[0.0, 2.0]), record(1, times=[1.0, 3.0]), record(2, times=[2.5, 4.0])]
    assert metrics.most_in_flight(records) == 2


def test_energy():
    assert metrics.wh_per_1k_tokens(3600.0, 500) == pytest.approx(2.0)
    assert metrics.wh_per_1k_tokens(684.0, 1000) == pytest.approx(0.19)
    assert metrics.wh_per_1k_tokens(None, 500) is None
    assert metrics.wh_per_1k_tokens(3600.0, 0) is None


def test_spread_is_range_over_median():
    assert metrics.spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert metrics.spread([10.0]) is None


def test_quantiles_are_linear():
    assert metrics.quantile([4.0, 1.0, 3.0, 2.0], 0.5) == pytest.approx(2.5)
    assert metrics.quantile([0.0, 10.0], 0.99) == pytest.approx(9.9)
    assert metrics.quantile([], 0.5) is None


def test_decode_limit_by_memory():
    cost = StepCost(weight_bytes=1000, cache_bytes_per_token=2, state_bytes_per_request=10)
    # 1000 + 4 x (100 x 2 + 10) = 1840 bytes at 18,400 bytes/s: 0.1 s a step for 4 tokens.
    assert metrics.decode_limit(Machine(18_400.0), cost, 4, 100) == pytest.approx(40.0)


def test_decode_limit_by_arithmetic():
    cost = StepCost(weight_bytes=1000, active_parameters=500)
    assert metrics.decode_limit(Machine(1e9, 4000.0), cost, 8, 0) == pytest.approx(4.0)


def test_stages_share_the_cache_but_not_the_weights():
    cost = StepCost(weight_bytes=1000, cache_bytes_per_token=1)
    assert metrics.decode_limit(Machine(1000.0, None, 2), cost, 10, 100) == pytest.approx(10 / 1.5)


def test_prefill_limit():
    cost = StepCost(weight_bytes=1000, active_parameters=500)
    assert metrics.prefill_limit(Machine(1e6, 1e6), cost, 100) == pytest.approx(1000.0)
    assert metrics.prefill_limit(Machine(1000.0, 1e9), cost, 100) == pytest.approx(100.0)
    assert metrics.prefill_limit(Machine(), cost, 100) is None
