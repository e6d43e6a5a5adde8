"""From runs to a report: which sections, in which order."""

from __future__ import annotations

from collections.abc import Sequence

from arkbench.report import closing_sections, limit_section, scenario_section, verdict_section
from arkbench.report.blocks import Report
from arkbench.report.data import Run
from arkbench.report.figures import text


def build(runs: Sequence[Run]) -> Report:
    """The report of one or several runs."""
    sections = [
        verdict_section.section(runs),
        limit_section.section(runs),
        *scenario_section.sections(runs),
        closing_sections.method(),
        closing_sections.definitions(),
        closing_sections.environment(runs),
        closing_sections.marked(runs),
    ]
    return Report(_title(runs), verdict_section.lead(runs), _facts(runs), _warning(runs), sections)


def _title(runs: Sequence[Run]) -> str:
    hardware = list(dict.fromkeys(run.hardware for run in runs))
    place = hardware[0] if len(hardware) == 1 else ", ".join(hardware[:-1]) + f" and {hardware[-1]}"
    return f"ARK's published claims, measured on {place}"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    models = list(dict.fromkeys(model for run in runs for model in run.models))
    scenarios = list(dict.fromkeys(name for run in runs for name in run.summary["scenario"] if name))
    versions = dict.fromkeys(f"{text(run.meta.get('arkbench_version'))} {run.commit}".strip() for run in runs)
    dates = dict.fromkeys(text(run.meta.get("start_utc"))[:10] for run in runs)
    facts = [
        ("Model" if len(models) == 1 else "Models", ", ".join(models) if len(models) <= 4 else f"{len(models)} models"),
        ("Scenario" if len(scenarios) == 1 else "Scenarios", ", ".join(scenarios)),
        ("Hardware", ", ".join(dict.fromkeys(run.hardware for run in runs))),
        ("Measured", ", ".join(date for date in dates if date)),
        ("arkbench", ", ".join(version for version in versions if version)),
    ]
    return [(name, value) for name, value in facts if value]


def _warning(runs: Sequence[Run]) -> str:
    bad = [run for run in runs if run.status != "complete"]
    if not bad:
        return ""
    if len(runs) == 1:
        return f"This run is {bad[0].status}: figures and verdicts rest on what was measured before it ended."
    return "Not complete: " + ", ".join(f"{run.label} ({run.status})" for run in bad) + "."
