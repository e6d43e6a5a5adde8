"""Whether variants gave the same tokens; where they did not, whether rounding explains it."""

import math

import pytest

from arkbench import answers
from arkbench.answers import AnswerBook, Exchange, compare_answers, differences, largest_gap
from arkbench.plan import RunOptions, make_plan
from arkbench.records import read_details, read_rows
from arkbench.scenario import Overrides
from arkbench.targets.base import TargetError
from tests.harness.fakes import FakeTarget
from tests.harness.test_runner import OPTIONS, execute

NEAR = {5: -1.0, 6: -1.05, 7: -8.95, 8: -9.0}
"""Mean -5: the best is 4 high, token 6 lies 1.25 % of that below it and token 7 as good as all of it."""


class Oracle:
    """Has the same table for every prompt and keeps the prompts."""

    def __init__(self, table):
        self.table, self.prompts = table, []

    def next_token(self, prompt):
        self.prompts.append(prompt)
        if isinstance(self.table, Exception):
            raise self.table
        return self.table


def found_in(path):
    return differences(read_details(path))


def test_the_same_prompts_give_the_same_hash_in_every_variant(tmp_path):
    execute(tmp_path / "r", FakeTarget([]))
    rows = read_rows(tmp_path / "r" / "cells.csv")
    assert len({r["output_hash"] for r in rows}) == 6
    result = compare_answers(rows, make_plan(OPTIONS), ("loop",), found_in(tmp_path / "r"))
    assert (result["compared"], result["identical"], result["different"]) == (6, 6, [])


def test_different_answers_are_a_fault_only_of_exact_switches(tmp_path):
    execute(tmp_path / "r", FakeTarget([], spoil=("fused",)))
    rows, plan = read_rows(tmp_path / "r" / "cells.csv"), make_plan(OPTIONS)
    bounded = compare_answers(rows, plan, ("loop",), {})
    exact = compare_answers(rows, plan, ("kernels",), {})
    assert bounded["identical"] == 0
    assert [answers.kind(d) for d in bounded["different"]] == ["bounded"] * 6
    assert [answers.kind(d) for d in exact["different"]] == ["fault"] * 6
    assert exact["different"][0]["switches"] == ["kernels"]


@pytest.mark.parametrize(
    ("behind", "gap", "kind"),
    [(0.0, 0.0, "tie"), (0.0125, 0.0125, "tie"), (0.03, 0.03, "fault"), (1.0, 1.0, "fault"), (None, None, "fault")],
)
def test_a_difference_that_rounding_explains_is_no_fault(tmp_path, monkeypatch, behind, gap, kind):
    """The first token is n in one variant and n + 1 in the other; the odd one of them lies `behind` the best."""
    monkeypatch.setattr("arkbench.targets.bundled.EXACT_SWITCHES", ("kernels",))
    table = None if behind is None else {token: -behind if token % 2 else 0.0 for token in range(1000)}
    if table is not None:
        table |= {1000 + i: -2 + behind / 2 for i in range(1000)}  # the mean of all is -1
    path = tmp_path / "r"
    execute(path, FakeTarget([], spoil=("fused",), table=table))
    result = compare_answers(read_rows(path / "cells.csv"), make_plan(OPTIONS), ("kernels",), found_in(path))
    assert [answers.kind(d) for d in result["different"]] == [kind] * 6
    assert [d["gap"] for d in result["different"]] == [pytest.approx(gap) if gap else gap] * 6


def test_only_the_first_difference_of_one_prompt_is_looked_at():
    """Request 1 has another prompt in each: a conversation that went on behind a difference."""
    first = {0: Exchange([1, 2], [9, 5, 3]), 1: Exchange([4], [5]), 2: Exchange([7], [6])}
    second = {0: Exchange([1, 2], [9, 6, 4]), 1: Exchange([3], [7]), 2: Exchange([7], [6])}
    oracle = Oracle(NEAR)
    assert largest_gap(oracle, first, second) == pytest.approx(0.0125)
    assert oracle.prompts == [[1, 2, 9]]


def test_the_largest_gap_of_all_requests_counts():
    first = {0: Exchange([1], [5]), 1: Exchange([2], [5])}
    second = {0: Exchange([1], [6]), 1: Exchange([2], [7])}
    assert largest_gap(Oracle(NEAR), first, second) == pytest.approx(7.95 / 4)


@pytest.mark.parametrize(
    ("tokens", "table"),
    [
        ([6], {5: -1.0, 7: -9.0}),
        ([6], {5: -1.0, 6: -1.0}),
        ([6], {5: -1.0, 6: -1.01, 7: -math.inf}),
        ([], NEAR),
        ([5], NEAR),
    ],
    ids=["token not known", "all alike", "no mean", "no token", "none differs"],
)
def test_what_cannot_be_told_is_no_near_tie(tokens, table):
    assert largest_gap(Oracle(table), {0: Exchange([1], [5])}, {0: Exchange([1], tokens)}) is None


def test_a_target_that_fails_at_the_question_leaves_the_difference_a_fault():
    (plan,) = make_plan(RunOptions(("quick",), Overrides(models=("SmolLM2-135M",)))).scenarios
    book = AnswerBook(("kernels",))
    found = [
        book.examine(plan, cell, 0, Oracle(TargetError("gone")), cell.variant, {0: Exchange([1], [n])})
        for n, cell in enumerate(plan.cells)
        if cell.id == plan.cells[0].id
    ]
    assert found == [{}, {"answers": {"against": plan.variants[0].name, "gap": None}}]
