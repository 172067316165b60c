"""The hand-off holds in its model, and the model is sharp enough to miss each rule that the hand-off needs."""

from __future__ import annotations

import pytest

from tests.contract.handoff.checker import check
from tests.contract.handoff.rules import HELPFUL, NEEDED
from tests.contract.handoff_model import first_finding, main

MODES = pytest.mark.parametrize("aggregated", [False, True], ids=["disaggregated", "aggregated"])


def story(problem: str, trace: tuple[str, ...]) -> str:
    return "\n".join([problem, *trace])


@MODES
def test_without_faults_the_first_try_succeeds(aggregated: bool) -> None:
    finding = check(0, aggregated=aggregated)
    assert not finding.problem, story(finding.problem, finding.trace)
    assert finding.num_states > 20


@MODES
def test_one_fault_anywhere_breaks_no_promise(aggregated: bool) -> None:
    finding = check(1, aggregated=aggregated)
    assert not finding.problem, story(finding.problem, finding.trace)
    assert finding.num_states > 1_000


def test_a_missing_rule_is_found_with_the_way_there() -> None:
    finding = check(0, off={"repeat-first"})
    assert finding.problem == "safety: token 1 is delivered when 0 is due"
    assert finding.trace[0] == "R takes the request"


def test_the_command_line_says_what_a_missing_rule_leads_to(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["handoff_model", "--faults", "0", "--off", "release"])
    assert main() == 1
    assert "no way out" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(1200)
@MODES
def test_two_faults_anywhere_break_no_promise(aggregated: bool) -> None:
    finding = check(2, aggregated=aggregated)
    assert not finding.problem, story(finding.problem, finding.trace)
    assert finding.num_states > 10_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("rule", NEEDED)
def test_each_needed_rule_is_missed(rule: str) -> None:
    assert first_finding(2, {rule}).problem, f"without {rule} nothing goes wrong: {NEEDED[rule]}"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rule", HELPFUL)
def test_a_helpful_rule_alone_is_no_lifeline(rule: str) -> None:
    finding = first_finding(1, {rule})
    assert not finding.problem, story(finding.problem, finding.trace)
