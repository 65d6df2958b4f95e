"""The choices of ``conf/`` as they are written."""

from __future__ import annotations

from typing import Any

import yaml

from kvbench.composition import CONF


def load(group: str, name: str) -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((CONF / group / f"{name}.yaml").read_text())
    content.pop("defaults", None)
    return content
