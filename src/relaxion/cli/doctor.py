"""`relaxion doctor`: is everything here that a relaxation needs, and is it as it should be?"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relaxion.cli.doctor_checks import CHECKS, FAIL, NOTE, OK, WARN, Finding
from relaxion.cli.progress import tell

WELL, SICK = 0, 1
STYLES = {OK: "green", NOTE: "cyan", WARN: "yellow", FAIL: "bold red"}


def doctor(*, as_json: bool) -> int:
    """Look at everything and return the exit code: 1 if something does not work."""
    findings = [finding for check in CHECKS for finding in examined(check)]
    sick = any(finding.state == FAIL for finding in findings)
    if as_json:
        tell(json.dumps({"ok": not sick, "findings": [asdict(one) for one in findings]}, ensure_ascii=False))
    else:
        Console(highlight=False).print(_table(findings))
        tell(_closing(findings))
    return SICK if sick else WELL


def examined(check: Callable[[], Iterator[Finding]]) -> list[Finding]:
    """A check that breaks is itself a finding."""
    try:
        return list(check())
    except Exception as error:  # noqa: BLE001 - what is being looked for is what is broken
        name = check.__name__.replace("_", " ")
        return [Finding(name, FAIL, f"it broke: {type(error).__name__}: {error}", "reinstall: pip install -U relaxion")]


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        advice = "" if finding.advice is None else f"; try: {finding.advice}"
        # Text: square brackets of 'relaxion[chgnet]' are no markup
        table.add_row(Text(finding.state, STYLES[finding.state]), Text(finding.check), Text(finding.sentence + advice))
    return table


def _closing(findings: list[Finding]) -> str:
    counts = {state: sum(finding.state == state for finding in findings) for state in (FAIL, WARN)}
    if not any(counts.values()):
        return "All is well."
    said = [f"{counts[FAIL]} thing{'s' * (counts[FAIL] != 1)} to repair"] * bool(counts[FAIL])
    said += [f"{counts[WARN]} warning{'s' * (counts[WARN] != 1)}"] * bool(counts[WARN])
    return f"{', '.join(said)}."
