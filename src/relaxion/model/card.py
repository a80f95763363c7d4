"""The model card: what a policy was trained on, how it was made, how good it is and where it fails."""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, field_validator

from relaxion.settings import Settings


class CardResult(Settings):
    """One optimizer on the assessment starts."""

    optimizer: str
    """"policy" for the policy itself, otherwise ASE's name."""

    mean_force_calls: float = Field(ge=0)
    """Force calls per relaxation, the first included; failures count with their limit."""

    mean_interval_95: tuple[float, float] | None = None
    """Where that mean lies in 95 of 100 resamplings of the starts; None: not written down."""

    success_rate: float | None = Field(default=None, ge=0, le=1)
    """Share of the starts that converged; None: not written down."""

    largest_force_calls: float | None = Field(default=None, ge=0)
    """Of the worst start."""


class LearnedFrom(Settings):
    """Of a policy that `relaxion learn` made: the memory it learned from, and how it proved better."""

    origin: str
    """The policy it began as."""

    origin_sha256: str
    """Of the weights of that."""

    calculators: tuple[str, ...]
    """Fingerprints of the calculators of the database (`potentials/counting.py`)."""

    elements: tuple[str, ...]
    """Symbols of the elements in the database."""

    relaxations: int = Field(ge=1)
    """In the database."""

    relaxations_apart: int = Field(ge=0)
    """Of them those that judged."""

    error_ratio: float = Field(gt=0)
    """Relative error of predicted ways on those, after over before."""

    error_ratio_low: float = Field(ge=0)
    """In 95 of 100 resamplings the ratio lies above this,"""

    error_ratio_high: float = Field(gt=0)
    """and below this."""

    calls_ratio: float | None = Field(default=None, gt=0)
    """Of force calls on starts held out, where they were relaxed for real."""


class ModelCard(Settings):
    """Values of a model card. Nothing here changes what the policy does, save that elements decide what it covers."""

    elements: tuple[str, ...] = Field(min_length=1)
    """Symbols of all elements it was trained on."""

    adsorbates: tuple[str, ...] = ()
    """Symbols of elements that it saw as single atoms among many others only."""

    unseen: tuple[str, ...] = ()
    """Symbols of elements it was never trained on and yet found to do better on than the classical optimizer."""

    smallest_n_atoms: int = Field(ge=1)
    """Atoms of the smallest structure trained on."""

    largest_n_atoms: int = Field(ge=1)
    """Atoms of the largest structure trained on."""

    potential: str
    """The potential that answered, by the name that `potential` takes."""

    starts: tuple[str, ...] = ()
    """Where relaxations began: perturbations and kinds of starts, one phrase each."""

    cells: str = "fixed"
    """fixed, free or both."""

    periodic: bool | None = None
    """True: for structures that repeat in some direction only; False: for those that do not; None: for both."""

    force_tolerance_ev_per_angstrom: float = Field(gt=0)
    """Converged at or below, in training and in the results here."""

    agent: str
    """The algorithm that trained it."""

    training_command: str
    """What repeats the training."""

    seed: int
    """Of the training."""

    environment_steps: int = Field(ge=0)
    """Steps of the environment (force calls) in training."""

    policy_step: int | None = Field(default=None, ge=0)
    """Of these, when the policy was best on validation starts: it is the one of that step. None: the last."""

    wall_time_seconds: float | None = Field(default=None, ge=0)
    """Of the training, pauses excluded; None: not written down."""

    n_assessment_starts: int | None = Field(default=None, ge=0)
    """Held-apart structures behind `results`."""

    results: tuple[CardResult, ...] = ()
    """The policy and classical optimizers from the same starts; none: never assessed."""

    fails_on: tuple[str, ...] = ()
    """What is known to go wrong, one sentence each."""

    relaxion_version: str
    """That packaged it."""

    date: str
    """Day of packaging, ISO 8601."""

    run_weights_sha256: str | None = None
    """Of the whole agent, as the run's result.json says."""

    training_settings: dict[str, Any] = Field(default_factory=dict)
    """Every setting of the run."""

    learned_from: LearnedFrom | None = None
    """Of policies fine-tuned on a database."""

    @field_validator("elements")
    @classmethod
    def _known(cls, elements: tuple[str, ...]) -> tuple[str, ...]:
        from ase.data import atomic_numbers

        for symbol in elements:
            if symbol not in atomic_numbers:
                raise ValueError(f"'{symbol}' is not an element")
        return tuple(sorted(set(elements), key=atomic_numbers.__getitem__))

    @property
    def policy_result(self) -> CardResult | None:
        """The policy's own row."""
        return next((result for result in self.results if result.optimizer == POLICY), None)


TAUGHT = "imitation"  # the agent of policies that learned from relaxations alone
POLICY = "policy"  # what it is called among the optimizers of a card
BODIES = {True: "periodic in some direction", False: "not periodic"}


def as_markdown(name: str, about: dict[str, str], card: ModelCard) -> str:
    """The card for people. `about` is what the bundle knows of itself: kind, size, digest."""
    rows = about | {
        "elements": " ".join(card.elements),
        **({"adsorbates": " ".join(card.adsorbates)} if card.adsorbates else {}),
        **({"covered though never trained on": " ".join(card.unseen)} if card.unseen else {}),
        "atoms per structure": _range(card),
        "cells": card.cells,
        **({} if card.periodic is None else {"structures": BODIES[card.periodic]}),
        "potential": card.potential,
        "starts": "; ".join(card.starts) or "not written down",
        "force tolerance": f"{card.force_tolerance_ev_per_angstrom:g} eV/Å",
    }
    lines = [f"# {name}", "", "| | |", "|---|---|"]
    lines += [f"| {what} | {_cell(value)} |" for what, value in rows.items()]
    lines += [] if card.learned_from is None else ["", "## What it learned", "", _learned(card.learned_from)]
    lines += ["", "## Results", "", *_results(card)]
    lines += ["", "## What it fails on", "", *_failures(card)]
    lines += ["", "## How it was made", "", "```", card.training_command, "```", "", _made(card)]
    if card.training_settings:
        lines += ["", "## Settings of the training", "", "```toml", *_toml(card), "```"]
    return "\n".join(lines) + "\n"


def _learned(source: LearnedFrom) -> str:
    interval = f"{source.error_ratio:.2f} ({source.error_ratio_low:.2f}–{source.error_ratio_high:.2f})"
    calls = "" if source.calls_ratio is None else f" Force calls there: {source.calls_ratio:.2f} of {source.origin}'s."
    return (
        f"From {source.relaxations} relaxations of {' '.join(source.elements)}, beginning as {source.origin}. On "
        f"{source.relaxations_apart} relaxations held out its error is {interval} of that.{calls}"
    )


def _range(card: ModelCard) -> str:
    small = card.smallest_n_atoms
    large = card.largest_n_atoms
    return str(small) if small == large else f"{small}–{large}"


def _results(card: ModelCard) -> list[str]:
    if not card.results:
        return ["Never assessed."]
    number = "" if card.n_assessment_starts is None else f"{card.n_assessment_starts} "
    with_intervals = any(result.mean_interval_95 is not None for result in card.results)
    told = " In brackets: 95 % intervals by resampling the starts." if with_intervals else ""
    return [
        f"Force calls to {card.force_tolerance_ev_per_angstrom:g} eV/Å from the same {number}held-out starts; "
        f"failures count with their limit.{told}",
        "",
        "| optimizer | mean force calls | worst | converged |",
        "|---|---|---|---|",
        *[_row(result) for result in card.results],
    ]


def _row(result: CardResult) -> str:
    interval = "" if result.mean_interval_95 is None else " ({:.1f}–{:.1f})".format(*result.mean_interval_95)
    mean = f"{result.mean_force_calls:.1f}{interval}"
    cells = (mean, _number(result.largest_force_calls), percent(result.success_rate))
    return f"| {' | '.join([result.optimizer, *cells])} |"


def _failures(card: ModelCard) -> list[str]:
    known = [f"- {sentence}" for sentence in card.fails_on] or ["- Not known: it was never assessed."]
    return [*known, "- Elements, sizes, cells and starts other than those above were never tried."]


def _made(card: ModelCard) -> str:
    seconds = "" if card.wall_time_seconds is None else f", {card.wall_time_seconds:.0f} s"
    chosen = "" if card.policy_step is None else f"; the policy of step {card.policy_step}, best on validation starts"
    run = "" if card.run_weights_sha256 is None else f"; agent of the run: sha256 {card.run_weights_sha256}"
    unit = "force calls" if card.agent == TAUGHT else "environment steps"
    return (
        f"{card.agent}, seed {card.seed}, {card.environment_steps} {unit}{seconds}{chosen}. "
        f"Packaged by relaxion {card.relaxion_version} on {card.date}{run}."
    )


def _toml(card: ModelCard) -> list[str]:
    # JSON's numbers, strings and lists are TOML's as well; TOML has no word for None
    return [f"{key} = {json.dumps(value)}" for key, value in card.training_settings.items() if value is not None]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:g}"


def percent(share: float | None) -> str:
    """In words; whole percents only where they are exact enough not to hide a failure."""
    if share is None:
        return "–"
    return f"{100 * share:.1f} %".replace(".0 ", " ")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
