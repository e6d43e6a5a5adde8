"""The notes' tables of two variants, as data: which figures of a run stand beside which published ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from arkbench.report.figures import show

Change = Literal["ratio", "percent", "reduction"]


@dataclass(frozen=True)
class Measure:
    """One quantity of a note: its summary column, and the published columns of the two variants.

    `published_change`: the published column of the change; empty where none was printed, and it is computed.
    """

    title: str
    name: str
    column: str
    unit: str
    published_base: str
    published_new: str
    change: Change = "ratio"
    limit: bool = False
    published_change: str = ""

    def compare(self, base: float | None, new: float | None) -> float | None:
        """new / base, base / new for a reduction, or the change in percent."""
        if base is None or new is None or base == 0 or new == 0:
            return None
        if self.change == "percent":
            return 100 * (new / base - 1)
        return base / new if self.change == "reduction" else new / base

    def show_change(self, change: float | None) -> str:
        return "" if change is None else show(change, "change" if self.change == "percent" else "ratio")


@dataclass(frozen=True)
class RowKey:
    """What a row of the published table stands for: its column there, in the summary, and its heading."""

    published: str
    column: str
    header: str


@dataclass(frozen=True)
class Comparison:
    """A published table of two variants.

    `streams`: cells of these numbers of streams only, for base and new (empty: any); behind the first stands what the
    note measured at for some of its models (`base_streams_column` says which). `published_names`: the note's own words
    for the two, where they are not the names of the variants.
    """

    key: str
    note: str
    file: str
    base: str
    new: str
    workloads: Sequence[str]
    rows: Sequence[RowKey]
    measures: Sequence[Measure]
    published_names: tuple[str, str] = ("", "")
    streams: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    base_streams_column: str = ""

    @property
    def by_model(self) -> bool:
        return self.rows[0].column == "model"


TOK = "tok/s"
COMPARISONS = (
    Comparison(
        "fused-kernels-decode",
        "fused-kernels",
        "fused_kernels_decode.csv",
        "standard",
        "fused",
        ("decode",),
        (RowKey("concurrent_requests", "streams", "requests"),),
        (
            Measure(
                "Decode throughput by requests at once",
                "decode throughput",
                "decode_tok_s",
                TOK,
                "standard_tok_s",
                "fused_tok_s",
                limit=True,
            ),
        ),
    ),
    Comparison(
        "fused-kernels-prefill",
        "fused-kernels",
        "fused_kernels_prefill.csv",
        "standard",
        "fused",
        ("prefill",),
        (RowKey("prompt_tokens", "prompt_tokens", "prompt tokens"),),
        (
            Measure(
                "Prompt reading by prompt length",
                "prompt reading",
                "prefill_tok_s",
                TOK,
                "standard_tok_s",
                "fused_tok_s",
                "percent",
                published_change="change_percent",
            ),
        ),
    ),
    Comparison(
        "decode-batching-releases",
        "decode-batching",
        "decode_batching_releases.csv",
        "ark-1.0",
        "ark-2.0",
        ("sustained", "decode"),
        (RowKey("model", "model", "model"),),
        (
            Measure(
                "Total throughput at full load",
                "total throughput",
                "decode_tok_s",
                TOK,
                "ark_1_0_tok_s",
                "ark_2_0_tok_s",
                limit=True,
                published_change="gain",
            ),
            Measure(
                "Energy per 1,000 tokens at full load",
                "energy",
                "wh_per_1k_tokens",
                "Wh",
                "ark_1_0_wh_per_1k_tokens",
                "ark_2_0_wh_per_1k_tokens",
                "percent",
            ),
        ),
        streams=((12, 10), (64,)),
        base_streams_column="ark_1_0_streams",
    ),
    Comparison(
        "inverted-loops",
        "inverted-loops",
        "inverted_loops.csv",
        "driven",
        "inverted",
        ("decode", "sustained"),
        (RowKey("model", "model", "model"),),
        (
            Measure(
                "Decode of a single stream",
                "single-stream decode",
                "decode_tok_s",
                TOK,
                "ark_1_1_tok_s",
                "ark_2_0_tok_s",
                limit=True,
                published_change="speed_up",
            ),
        ),
        published_names=("ARK 1.1", "ARK 2.0"),
        streams=((1,), (1,)),
    ),
    Comparison(
        "pipelined-prefill",
        "pipelined-prefill",
        "pipelined_prefill.csv",
        "ark-2.0",
        "ark-2.1",
        ("burst",),
        (RowKey("prompt_tokens", "prompt_tokens", "prompt tokens"), RowKey("at_once", "at_once", "at once")),
        (
            Measure(
                "Combined prefill rate of a burst",
                "combined prefill rate",
                "prefill_tok_s",
                TOK,
                "ark_2_0_tok_s",
                "ark_2_1_tok_s",
                published_change="gain",
            ),
            Measure(
                "Slowest first token of a burst",
                "slowest first token",
                "ttft_max_s",
                "s",
                "ark_2_0_slowest_ttft_s",
                "ark_2_1_slowest_ttft_s",
                "reduction",
            ),
        ),
    ),
)
