"""What a run prints at its end, from the rows of its folder."""

from rich.console import Console

from arkbench import commands
from arkbench.records import SUMMARY_COLUMNS, write_csv


def printed(function, *arguments):
    console = Console(record=True, width=200)
    function(*arguments, console)
    return console.export_text()


def row(cell, **values):
    return {"model": "m", "variant": "fused", "cell": cell, "valid": True, "decode_tok_s": 90.0} | values


def test_a_figure_above_its_limit_is_named(tmp_path):
    shares = {"decode-s1": 0.9, "decode-s8": 1.04, "decode-s16": 1.2}
    rows = [row(name, limit_fraction=share) for name, share in shares.items()]
    write_csv(tmp_path / "summary.csv", rows, SUMMARY_COLUMNS)
    remark = "above the measured limit: the limit was measured too low"
    assert f"note: fused decode-s8 and 1 cell more: {remark}\n" in printed(commands.print_summary, tmp_path)
    write_csv(tmp_path / "summary.csv", rows[:1], SUMMARY_COLUMNS)
    assert remark not in printed(commands.print_summary, tmp_path)


def test_near_ties_are_counted_and_faults_are_named():
    entry = {"cell": "c", "variants": ["off", "on"], "switches": ["prompt_cache"]}
    tie = entry | {"fault": False, "near_tie": True, "gap": 0.008}
    fault = entry | {"fault": True, "near_tie": False, "gap": 0.12}
    unknown = entry | {"fault": True, "near_tie": False, "gap": None}
    bounded = entry | {"switches": ["kernels"], "fault": False, "near_tie": False, "gap": None}
    text = printed(commands.print_answers, {"compared": 5, "identical": 1, "different": [tie, bounded, fault, unknown]})
    assert text.startswith(
        "Answers: 1 of 5 comparisons of variants are token for token the same; others differ in switches that may "
        "round differently: kernels; 1 where two tokens are all but equal and rounding decides (at most 0.8% apart).\n"
    )
    assert text.count("Wrong: c: off and on differ only in prompt_cache, which must not change a token") == 2
    assert "(where they part, a token lies 12.0% of the best logit below it; rounding explains 1.6%)" in text
    assert "(whether two tokens were all but equal is not known)" in text
