"""The tables of the training diagnostics, from the rules and numbers themselves."""

from __future__ import annotations

from relaxion.train.diagnostics import DIAGNOSTICS, RULES


def alarms() -> str:
    rows = [f"| `{rule.name}` | {rule.headline} | {rule.when} | {rule.remedy} |" for rule in RULES]
    return "\n".join(["| alarm | diagnosis | it begins when | what to do |", "|---|---|---|---|", *rows])


def numbers() -> str:
    rows = [f"| `{one.name}` | {one.unit} | {one.meaning} | {one.healthy} |" for one in DIAGNOSTICS]
    rows = [row.replace("|  |", "| |") for row in rows]
    return "\n".join(["| number | unit | meaning | healthy |", "|---|---|---|---|", *rows])
