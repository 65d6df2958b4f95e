"""What mkdocs adds to the pages of docs/: metrics, choices, experiments and figures, from where they are kept anyway.

A page says where: ``<!-- generated: metrics -->``. README.md and others outside docs/ become pages as well, and links
between files of the repository become links between pages, so that one text serves both readers.
"""

from __future__ import annotations

import csv
import os
import re
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path, PurePosixPath
from pydoc import locate
from textwrap import indent

import yaml
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from kvbench.figures.terminal import text
from kvbench.metrics import METRICS

ROOT = Path(__file__).resolve().parent.parent
CONF, REFERENCE = ROOT / "conf", ROOT / "results" / "reference"
ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "kernels/README.md": "kernels.md",
}
"""Pages that are not in docs/: file of the repository -> page."""
_OF_THE_FILE = re.compile(r"^<!-- not on the site -->.*\n\n", re.MULTILINE)
"""A paragraph for who reads a page as a file."""
_MARK = re.compile(r"<!-- generated: (\S+) -->")
_LINK = re.compile(r"(?<!!)\[([^\[\]]*)\]\(([^)#\s]+)\)")
_TARGET = re.compile(r"""(\]\(|\b(?:src|href|srcset)=")(?!https?:|mailto:|\#)([^)"\#\s]+)""")
_OUTSIDE = re.compile(
    r"""<(?:script|link|img|iframe|source|video)\b[^>]*\b(?:src|href|srcset)=["']?(?:https?:)?//[^>]*>"""
)


def on_pre_build(config: MkDocsConfig) -> None:
    """Refuse a page about the configuration that leaves a group out, or has one that is not there."""
    page = ROOT / "docs" / "configuration.md"
    groups = {path.parent.relative_to(CONF).as_posix() for path in CONF.rglob("*/*.yaml")} - {"experiment"}
    if differ := {"config", *groups} ^ set(_MARK.findall(page.read_text(encoding="utf-8"))):
        raise PluginError(f"docs/configuration.md and the folders of conf/ differ in {', '.join(sorted(differ))}")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are not in docs/, and the figures of results/reference/."""
    for source, page in ELSEWHERE.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for path in (path for path in REFERENCE.glob("*/*") if path.suffix in (".png", ".svg", ".gif")):
        files.append(File.generated(config, _figure(path), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace marks by what they stand for, and paths of the repository by paths of the site."""
    sources = {made: source for source, made in ELSEWHERE.items()}
    folder = PurePosixPath(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}")).parent
    markdown = _OF_THE_FILE.sub("", markdown)
    linked = _LINK.sub(lambda match: match[1] if _is_source(match[2], folder) else match[0], markdown)
    linked = _TARGET.sub(lambda match: match[1] + _page(match[2], folder), linked)
    return _MARK.sub(lambda match: _generated(match[1]), linked)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Refuse a page that would fetch something from elsewhere."""
    if outside := _OUTSIDE.search(output):
        raise PluginError(f"{page.file.src_uri} wants a network: {outside[0]}")
    return output


def metrics() -> str:
    """Every metric: name, unit, definition."""
    rows = [
        f'| <span id="{name}"></span>`{name}` | {metric.unit} | {_plain(metric.description)} |'
        for name, metric in METRICS.items()
    ]
    return "\n".join(["| metric | unit | definition |", "|---|---|---|", *rows])


def experiments() -> str:
    """Every experiment: what it is, its command, its figures and its claims; those of the paper by figure."""
    of_the_paper, others = [], []
    for path in sorted((CONF / "experiment").glob("*.yaml")):
        figure = re.match(r"(?:Table 1 and )?Fig\. (\d+)", _comment(path))
        if figure:
            of_the_paper.append((int(figure[1]), path))
        else:
            others.append(path)
    parts = ["## Of the paper", *(_experiment(path) for _, path in sorted(of_the_paper))]
    return "\n\n".join([*parts, "## Beyond it", *map(_experiment, others)])


def choices(group: str) -> str:
    """Every choice of a group of conf/: what it is, and its file."""
    return "\n\n".join(
        f'??? note "`{path.stem}`{_title(path)}"\n\n' + indent(_code(path), "    ")
        for path in sorted((CONF / group).glob("*.yaml"))
    )


def _generated(mark: str) -> str:
    pages: dict[str, Callable[[], str]] = {
        "metrics": metrics,
        "experiments": experiments,
        "config": lambda: _code(CONF / "config.yaml"),
    }
    return pages[mark]() if mark in pages else choices(mark)


def _experiment(path: Path) -> str:
    name = path.stem
    commands = "\n".join(_commands(path))
    parts = [f"### {name}", _plain(_comment(path)), f"```sh\n{commands}\n```"]
    has_picture = False
    for suffix, how in (
        ("_pairs", "replaying the authors' data"),
        ("", "without data files"),
        ("_measured", "measured"),
    ):
        folder = REFERENCE / f"{name}{suffix}"
        for picture in sorted(folder.glob("*.png")):
            address = _figure(picture)
            parts.append(f"[![{picture.stem}, {how}]({address})]({address})")
            has_picture = True
        parts.extend(_claims(path, how) for path in folder.glob("claims.csv"))
    if not has_picture:
        parts.append("*No picture of it is committed: the command draws it.*")
    return "\n\n".join(parts)


def _commands(path: Path) -> list[str]:
    """What to type for an experiment: with what real runs need, and after what they are compared with is fitted."""
    name = path.stem
    if not name.startswith("fig_") and name != "smoke":
        return [f"python -m kvbench +experiment={name}"]
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    points = [{"runner": "simulated", **content.get("common", {}), **point} for point in content["points"]]
    selected = content.get("selected", {})
    first = {point["runner"] for point in points if selected.items() <= point.items()}
    others = {point["runner"] for point in points} - first
    real = f"make {name} EXTRAS=dev,models"
    found = [f"make {name}" if first == {"simulated"} else f"{real}  # needs a GPU" if first == {"kernels"} else real]
    if any(point.get("costs") == "local" for point in points):
        found = ["make install EXTRAS=dev,models", "python -m kvbench.calibrate", *found]
    return found + [f"{real} ARGS=runner={runner}" for runner in sorted(others)]


def _claims(path: Path, how: str) -> str:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        return ""
    counts = Counter(row["verdict"] for row in rows)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    table = ["| claim | of | paper | measured | verdict | note |", "|---|---|---|---|---|---|", *map(_claim, rows)]
    title = f'??? abstract "Claims, {how}: {verdicts}"'
    return title + "\n\n" + indent("\n".join(table), "    ")


def _claim(row: dict[str, str]) -> str:
    low, high, measured = (_number(row[name]) for name in ("paper_low", "paper_high", "measured"))
    paper = (
        low if low == high else f"{low} to {high}" if low and high else f"at least {low}" if low else f"at most {high}"
    )
    cells = [row["claim"], row["figure"], f"{paper} {row['unit']}", measured, row["verdict"], row["note"]]
    return f"| {' | '.join(map(_plain, cells))} |"


def _number(cell: str) -> str:
    """With four significant digits at most; the file has more."""
    return text(float(cell)) if cell else ""


def _title(path: Path) -> str:
    """The first sentence of a choice's comment, else of its class, else its first numbers."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    text = _comment(path)
    if not text and "_target_" in content:
        text = (locate(content["_target_"]).__doc__ or "").split("\n\n")[0]
    if not text:
        facts = (f"{key} {value}" for key, value in content.items() if isinstance(value, str | int) and key != "name")
        text = ", ".join(islice(facts, 4))
    sentence = re.split(r"(?<!Fig)\.\s", text.strip().rstrip("."), maxsplit=1)[0]
    return f": {_plain(' '.join(sentence.split()))}"


def _comment(path: Path) -> str:
    """The comment that a file begins with."""
    lines = path.read_text(encoding="utf-8").splitlines()
    if lines[0].startswith("# @package"):
        del lines[0]
    end = next((i for i, line in enumerate(lines) if not line.startswith("#")), len(lines))
    return " ".join(line.removeprefix("#").strip() for line in lines[:end]).strip()


def _code(path: Path) -> str:
    return f"```yaml\n{path.read_text(encoding='utf-8').rstrip()}\n```"


def _plain(text: str) -> str:
    """A text that was not written as Markdown, but for a page of docs/ that it names and what it has as code."""
    escaped = re.sub(r"([*<|\[])", r"\\\1", text)
    return re.sub(r"docs/(\w+)\.md", r"[\1](\1.md)", escaped)


def _figure(path: Path) -> str:
    return f"figures/{path.parent.name}/{path.name}"


def _is_source(target: str, folder: PurePosixPath) -> bool:
    """Whether a link goes to a file that is no page: only its label stays."""
    path = os.path.normpath(folder / target)
    return (ROOT / path).exists() and path not in ELSEWHERE and not path.startswith(("docs/", "results/reference/"))


def _page(target: str, folder: PurePosixPath) -> str:
    """Where a link goes on the site; one into docs/ from there, or to nothing that exists, stays as it is."""
    path = os.path.normpath(folder / target)
    if path in ELSEWHERE:
        return ELSEWHERE[path]
    if path.startswith("results/reference/"):
        return _figure(Path(path))
    return path.removeprefix("docs/") if path.startswith("docs/") else target
