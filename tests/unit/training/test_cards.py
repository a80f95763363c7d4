"""A card cannot lie: the command on it, with the recipe as it is, has exactly the settings on it."""

from __future__ import annotations

import shlex
import warnings
from pathlib import Path

import pytest

import relaxion
from relaxion.errors import RelaxionWarning
from relaxion.model.policy_file import PolicyFile
from relaxion.settings import assigned
from relaxion.train.tasks.settings import RunSettings, find, read_settings, settings_from_recipe

SHIPPED = sorted((Path(relaxion.__file__).parent / "policies").glob("*.safetensors"))


def settings_of(command: str) -> RunSettings:
    """What `relaxion train …` would train with."""
    program, train, recipe, *words = shlex.split(command)
    assert (program, train) == ("relaxion", "train")
    options = list(zip(words[::2], words[1::2], strict=True))
    given = assigned([value for name, value in options if name == "--set"])
    given |= {n[2:]: int(value) for n, value in options if n in ("--seed", "--steps")}
    return settings_from_recipe(find(recipe), dict(options).get("--agent"), given)


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_command_on_a_card_has_the_settings_on_it(file: Path) -> None:
    card = PolicyFile.read(file).card
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RelaxionWarning)
        assert settings_of(card.training_command).flat() == read_settings(card.training_settings).flat()


@pytest.mark.parametrize("file", SHIPPED, ids=lambda file: file.stem)
def test_the_card_to_read_is_the_card_in_the_bundle(file: Path) -> None:
    card, text = PolicyFile.read(file).card, file.with_suffix(".md").read_text()
    assert card.training_command in text
    for name, value in card.training_settings.items():
        assert value is None or f"\n{name} = " in text


def test_there_are_cards_to_look_at() -> None:
    assert {file.stem for file in SHIPPED} >= {"metals", "universal"}
