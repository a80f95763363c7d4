"""The page of requirements, from the list beside the tests."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

FILE = "tests/requirements.toml"


def requirements(root: Path) -> str:
    groups = tomllib.loads((root / FILE).read_text())["group"]
    return "\n\n".join(f"## {group['title']}\n\n{_items(group['requirement'])}" for group in groups)


def _items(found: list[dict[str, Any]]) -> str:
    return "\n".join(_item(one) for one in found)


def _item(one: dict[str, Any]) -> str:
    name = f"**{one['id']}** " if "id" in one else ""
    return f"- {name}{one['text']} " + ", ".join(f"`{test}`" for test in one["tests"])
