"""Every Python block of the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("CONTRIBUTING.md")), *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks() -> list:
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            line = text[: match.start()].count("\n") + 1
            name = f"{page.relative_to(ROOT)}:{line}"
            found.append(pytest.param("\n" * line + match[1], page, id=name))
    return found


@pytest.mark.parametrize(("source", "page"), blocks())
def test_block_runs(source: str, page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(source, str(page), "exec"), {"__name__": "__example__"})
    printed = capsys.readouterr().out.splitlines()
    expected = re.findall(r"^print\(.*?#\s*(.+)$", source, re.MULTILINE)
    assert [line for line in expected if line not in printed] == []


def test_readme_has_an_integration_example() -> None:
    examples = FENCE.findall((ROOT / "README.md").read_text())
    assert any("select_and_pack(" in example and "out=" in example for example in examples)
