"""From what was typed to a plan: the points of a command, each resolved and its parts built once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from textwrap import shorten
from typing import Any

from tqdm import tqdm

from kvbench.capacity import Capacity
from kvbench.composition import SELECTORS, Composer, Resolved, Setting, check_choice, groups, key_of, load_experiment
from kvbench.core import KvbenchError
from kvbench.estimate import arrivals_s
from kvbench.executors.base import Executor
from kvbench.executors.serial import Serial
from kvbench.instantiate import instantiate
from kvbench.parts import build, is_real
from kvbench.parts import inputs_of as point_inputs
from kvbench.point import Point, identify
from kvbench.schedulers.base import MissingCorner
from kvbench.statistics import Method

ADHOC = "adhoc"
"""The experiment of points that are typed on the command line."""
_OF_THE_COMMAND = ("name", "results_dir", "memory_map", "live", "records", "interval")
"""Keys that all points of a command have in common."""
_MAX_WORDS = 160
"""Characters that a message may spend on which point it is about."""
_SECTIONS = {"experiment", "common", "points", "selected", "axes"}
"""Of an experiment's file."""
RESERVED = "reference"
"""The folder of the results that are part of the project."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of ``summary.csv`` to be: a point, and what an experiment calls it."""

    point: Point
    panel: str | int | None
    repeat: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What a command asks for.

    Attributes:
        experiment: its stem, or ``adhoc``.
        folder: ``<results_dir>/<name>``.
        rows: in the order of the experiment; two may share a point.
        keeps_steps: whether points leave ``steps.parquet``.
        keeps_map: whether they leave ``memory_map.parquet``.
        is_live: whether they are shown while they run.
        interval: how intervals of means over repeats are made.
        capacities: the distinct capacity reports.
    """

    experiment: str
    folder: Path
    rows: list[Row]
    keeps_steps: bool
    executor: Executor
    capacities: list[Capacity]
    keeps_map: bool = False
    is_live: bool = False
    interval: Method = "t"

    @property
    def points(self) -> dict[str, Point]:
        """The distinct points by key."""
        return {row.point.key: row.point for row in self.rows}

    @property
    def arrivals_s(self) -> float:
        """For how long requests arrive in all its points that run in real time: it takes at least that."""
        return sum(arrivals_s(point.config) for point in self.points.values() if is_real(point.config))


def plan(composer: Composer, typed: list[list[Setting]], launcher: Seq[str] = ()) -> Plan:
    """Expand what was typed, resolve every point and build its parts once.

    Args:
        composer: resolves them.
        typed: the command's settings, one list for each combination of a sweep (see ``kvbench.composition.parse``).
        launcher: overrides of one of Hydra's launchers, which then runs the points; empty for ``executor``.

    Raises:
        KvbenchError: an unknown key, choice or combination; the point is named where there are several.
    """
    _check(typed, launcher)
    experiment = _experiment_of(typed[0])
    expanded = [settings for command in typed for settings in _expand(experiment, command)]
    rows: dict[tuple[object, int, str], Row] = {}
    capacities: dict[str, Capacity] = {}
    inputs_of: dict[str, dict[str, str]] = {}
    commands: dict[str, Resolved] = {}
    needs_one_clock = False
    for settings in tqdm(expanded, "planning", unit="point", leave=False, delay=1, disable=None):
        try:
            for repeat, resolved in enumerate(_repeated(composer, settings)):
                common, parts = resolved.common, build(resolved.point)
                workload = repr((resolved.point["workload"], is_real(resolved.point), resolved.point["model"]))
                if workload not in inputs_of:
                    inputs_of[workload] = point_inputs(resolved.point, parts.workload)
                point = identify(resolved.point, inputs_of[workload])
                rows.setdefault((common.panel, repeat, point.key), Row(point, common.panel, repeat))
                capacities.setdefault(parts.capacity.line(), parts.capacity)
                commands[repr((*(getattr(common, name) for name in _OF_THE_COMMAND), resolved.executor))] = resolved
                needs_one_clock |= is_real(resolved.point)
        except KvbenchError as error:
            if isinstance(error, MissingCorner) and any(each.key == "axes" for each in typed[0]):
                continue
            words = _words(settings, expanded)
            if len(expanded) == 1 or str(error).startswith(words):
                raise
            raise KvbenchError(f"{words}: {error}") from None
    if not commands:
        raise KvbenchError(f"no combination of {next(each for each in typed[0] if each.key == 'axes')} exists")
    if len(commands) > 1:
        raise KvbenchError(f"{', '.join(_OF_THE_COMMAND)} and executor belong to the whole command; give one of each")
    (command,) = commands.values()
    name = command.common.name or experiment or ADHOC
    if name == RESERVED:
        raise KvbenchError(f"name={RESERVED} is kept for the results that are part of the project; choose another")
    folder = Path(command.common.results_dir) / name
    executor: Executor
    if launcher:
        from kvbench.executors.launcher import Launcher  # takes Hydra's plug-ins a while

        executor = Launcher(launcher, folder / ".launcher")
    else:
        executor = instantiate(command.executor, "executor")
    return Plan(
        experiment=experiment or ADHOC,
        folder=folder,
        rows=list(rows.values()),
        keeps_steps=command.common.records == "full",
        # Beside another point a real clock would measure both; a terminal shows one.
        executor=Serial() if needs_one_clock or command.common.live else executor,
        capacities=list(capacities.values()),
        keeps_map=command.common.memory_map,
        is_live=command.common.live,
        interval=command.common.interval,
    )


def _check(typed: list[list[Setting]], launcher: Seq[str]) -> None:
    """Refuse what is wrong with a command before any point of it is looked at."""
    if not typed:
        raise KvbenchError("the sweep has no point: one of its options lists no value")
    if launcher and any(each.key.partition(".")[0] == "executor" for each in typed[0]):
        raise KvbenchError(f"{launcher[0]} and executor= both say where points run; give one of them")
    for each in typed[0]:
        if each.key == "data_dir" and not Path(str(each.value)).is_dir():  # the default one need not be there
            raise KvbenchError(f"{each}: there is no such folder; make data fetches what is public into one")


def _repeated(composer: Composer, settings: list[Setting]) -> Iterator[Resolved]:
    """A point as often as its ``repeats`` says, with consecutive seeds and common random numbers.

    One repeat has one seed, hence the same requests for every system; and for every rate, since Poisson arrivals are
    those at one request a second, closer together. The paper's generator has other requests at every rate: what
    arrives by it is replayed by the first repeat only, unless ``workload/arrivals`` is given.
    """
    first = composer.resolve(settings)
    yield first
    others = [each for each in settings if each.key != "seed"]
    arrivals = first.point["choices"].get("workload/arrivals")
    if arrivals == "paper" and not any(
        each.key.startswith(("workload/arrivals", "workload.arrivals")) for each in settings
    ):
        others.append(Setting("workload/arrivals", "poisson"))
    for repeat in range(1, first.common.repeats):
        yield composer.resolve([*others, Setting("seed", first.common.seed + repeat)])


def _experiment_of(settings: Iterable[Setting]) -> str | None:
    chosen = [each.value for each in settings if each.key == "experiment"]
    if not chosen:
        return None
    check_choice("experiment", chosen[0])
    return str(chosen[0])


def _expand(experiment: str | None, command: list[Setting]) -> list[list[Setting]]:
    """The settings of every point of a command: the experiment's, under those that were typed."""
    typed = {each.key: each for each in command if each.key != "experiment"}
    if experiment is None:
        return [list(typed.values())]
    content = load_experiment(experiment)
    if unknown := sorted(content.keys() - _SECTIONS):
        raise KvbenchError(
            f"conf/experiment/{experiment}.yaml: unknown {unknown[0]}; it has {', '.join(sorted(_SECTIONS))}"
        )
    if content.get("experiment", experiment) != experiment:
        raise KvbenchError(
            f"conf/experiment/{experiment}.yaml calls itself {content['experiment']}; the two must agree"
        )
    common = content.get("common") or {}
    entries = [
        settings
        for entry in content.get("points") or [{}]
        for settings in _multiply(_written(key, value) for key, value in {**common, **entry}.items())
    ]
    selectors = (*SELECTORS, "runner")
    if typed.keys().isdisjoint(selectors):
        typed |= {key: _written(key, value) for key, value in (content.get("selected") or {}).items()}
    for selector in selectors:
        entries = _select(experiment, entries, selector, typed)
    if "axes" in typed:
        entries = _crossed(experiment, entries, content.get("axes") or {}, typed.pop("axes").value)
    return [
        settings
        for entry in entries
        for settings in _multiply([*(each for each in entry if each.key not in typed), *typed.values()])
    ]


def _select(
    experiment: str, entries: list[list[Setting]], selector: str, typed: dict[str, Setting]
) -> list[list[Setting]]:
    """Keep the entries with the typed panel, system or runner.

    Without such a key in the experiment, or where all points have the same runner, it is a plain override.
    """
    if selector not in typed:
        return entries
    values = [next((str(each.value) for each in entry if each.key == selector), None) for entry in entries]
    there = list(dict.fromkeys(value for value in values if value is not None))
    if len(there) < {"panel": 0, "system": 1, "runner": 2}[selector]:
        return entries
    asked = typed.pop(selector).value
    wanted = [str(value) for value in (asked if isinstance(asked, tuple) else (asked,))]
    for value in wanted:
        if selector in groups():
            check_choice(selector, value)
        if value not in there:
            has = f"{selector} is one of {', '.join(there)}" if there else f"it has no {selector}s"
            raise KvbenchError(f"experiment={experiment} has no {selector}={value}; {has}")
    return [entry for entry, value in zip(entries, values, strict=True) if value in wanted]


def _crossed(
    experiment: str, entries: list[list[Setting]], axes: Mapping[str, Mapping[str, Any]], asked: object
) -> list[list[Setting]]:
    """The last entry of every panel with each of the named axes at each of its values, whatever combination exists."""
    names = [str(name) for name in (asked if isinstance(asked, tuple) else (asked,))]
    for name in names:
        if name not in axes:
            has = f"it has {', '.join(axes)}" if axes else "it has none"
            raise KvbenchError(f"experiment={experiment} has no axis {name}; {has}")
    varied = [_written(key, value) for name in names for key, value in axes[name].items()]
    keys = {each.key for each in varied}
    ends = {next((each.value for each in entry if each.key == "panel"), None): entry for entry in entries}
    return [
        settings
        for entry in ends.values()
        for settings in _multiply([*(each for each in entry if each.key not in keys), *varied])
    ]


def _written(key: object, value: object) -> Setting:
    """A setting of an experiment's file, where a list means each of its elements."""
    return Setting(key_of(str(key)), tuple(value) if isinstance(value, list) else value)


def _multiply(settings: Iterable[Setting]) -> list[list[Setting]]:
    """The product over the settings whose value is a tuple."""
    axes = [
        [each._replace(value=value) for value in (each.value if isinstance(each.value, tuple) else (each.value,))]
        for each in settings
    ]
    return [list(combination) for combination in product(*axes)]


def _words(settings: list[Setting], among: list[list[Setting]]) -> str:
    """What tells a point apart from the others of its command, as it would be typed."""
    different = [each for each in settings if any(each not in other for other in among)]
    return shorten(" ".join(map(str, different or settings)), _MAX_WORDS, placeholder=" ...")
