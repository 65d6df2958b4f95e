"""Turns overrides into resolved configurations: Hydra composes, this module translates what it says.

The only module beside ``app`` that knows Hydra. Composing is slow (a tenth of a second), so it is done once for each
combination of group choices; values are then set on a copy.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override, OverrideType
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from kvbench.capacity import batch_limit, capacity_of, memory_bytes, model_of, session_len
from kvbench.core import KvbenchError
from kvbench.instantiate import check_arguments
from kvbench.search import FALLING, RISING
from kvbench.statistics import Method, check_bootstrap

CONF = Path(__file__).resolve().parent.parent / "conf"
AXES = ("allocator", "reservation", "scheduler", "costs")
"""Groups that a system presets: a point that differs in one of them does not carry the preset's bare name."""
OWN = "own"
"""The choice of a group that is a class of the user's, named by its ``_target_``."""
SELECTORS = ("panel", "system")
"""Keys that select among the points of an experiment."""
CONSTRUCTED = ("allocator", "reservation", "scheduler", "runner", "costs", "model", "hardware", "workload", "executor")
"""Groups whose keys are checked by a constructor, so that ``+`` may add one."""
RESOLVERS_READ = ("model", "hardware", "kv_cache_bytes", "kv_cache_seqs", "workload.name")
"""What the functions named ``kvbench.`` in ``conf/`` depend on."""


class Setting(NamedTuple):
    """One override: ``key`` is a group or a dotted path. ``add`` allows a key that is not there yet (Hydra's ``+``)."""

    key: str
    value: Any
    add: bool = False

    def __str__(self) -> str:
        """As it would be typed."""
        written = {None: "null", True: "true", False: "false"}
        plain = self.value is None or isinstance(self.value, bool)
        return f"{self.key}={written[self.value] if plain else self.value}"


@dataclass(frozen=True, slots=True)
class Common:
    """The top-level values of ``conf/config.yaml``.

    Raises:
        KvbenchError: a value outside its range.
    """

    name: str | None
    panel: str | int | None
    seed: int
    trial: int
    repeats: int
    interval: Method
    records: Literal["full", "summary"]
    memory_map: bool
    live: bool
    data_dir: str
    kv_cache_bytes: float | None
    kv_cache_seqs: float | None
    swap_space_bytes: float | None
    measure_from_s: float
    measure_to_s: float | None
    slo_ttft_s: float | None
    slo_tpot_s: float | None
    metric: str | None
    threshold: float | None
    results_dir: str

    def __post_init__(self) -> None:
        """Check what the types do not say."""
        if self.seed < 0:
            raise KvbenchError(f"seed={self.seed} is negative; give 0 or more")
        if self.trial < 0:
            raise KvbenchError(f"trial={self.trial} is negative; give 0 or more")
        if self.repeats < 1:
            raise KvbenchError(f"repeats={self.repeats} runs nothing; give 1 or more")
        if self.interval == "bootstrap":
            check_bootstrap(self.repeats)
        self._check_folders()
        self._check_memory()
        if not self.measure_from_s >= 0:
            raise KvbenchError(f"measure_from_s={self.measure_from_s} is no time of the run; give 0 or more")
        if self.measure_to_s is not None and not self.measure_to_s > self.measure_from_s:
            raise KvbenchError(
                f"measure_to_s={self.measure_to_s} does not lie after measure_from_s={self.measure_from_s}; "
                "give more, or null for the end"
            )
        for key in ("slo_ttft_s", "slo_tpot_s", "threshold"):
            if (value := getattr(self, key)) is not None and not value > 0:
                raise KvbenchError(f"{key}={value} can never be kept; give a number above 0")
        if self.memory_map and self.records != "full":
            raise KvbenchError("memory_map=true needs the times of steps.parquet: leave records= at full")
        self._check_search()

    def _check_folders(self) -> None:
        if self.name is not None and not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise KvbenchError(f"name={self.name} names no folder; use letters, digits, and . _ + - inside")
        if not self.results_dir:
            raise KvbenchError("results_dir= names no folder; give one, or . for the current one")

    def _check_memory(self) -> None:
        if self.kv_cache_seqs is not None and not self.kv_cache_seqs > 0:
            raise KvbenchError(f"kv_cache_seqs={self.kv_cache_seqs} holds no sequence; give a number above 0")
        if self.kv_cache_seqs is not None and self.kv_cache_bytes is not None:
            raise KvbenchError("kv_cache_bytes and kv_cache_seqs both size the KV pool; give one of them")
        if self.swap_space_bytes is not None and not 0 <= self.swap_space_bytes < math.inf:
            raise KvbenchError(f"swap_space_bytes={self.swap_space_bytes} is no size; give 0 for none, or more")

    def _check_search(self) -> None:
        if self.metric is not None and self.metric not in RISING + FALLING:
            raise KvbenchError(
                f"metric={self.metric} has no threshold to search{_hint(self.metric, RISING + FALLING)}\n"
                f"metric is one of {', '.join(RISING + FALLING)}"
            )
        if (self.metric is None) != (self.threshold is None):
            raise KvbenchError("metric= and threshold= make a search together; give both, or none")
        if self.metric is None:
            return
        if self.memory_map or self.live:
            raise KvbenchError("memory_map= and live= look at one run, and a search for metric= makes many")
        if self.metric in FALLING and self.slo_ttft_s is None and self.slo_tpot_s is None:
            raise KvbenchError(f"metric={self.metric} needs an objective; give slo_ttft_s= or slo_tpot_s=")
        if self.repeats < 2:
            raise KvbenchError(
                f"repeats={self.repeats}: one run is no capacity, as it says nothing of the next; give 2 or more, say 8"
            )


@dataclass(frozen=True, slots=True)
class Resolved:
    """A configuration without interpolations.

    Attributes:
        point: plain containers, of the point alone: without its label, its repeats and the keys of the command.
            ``system`` is the label, ``choices`` the names of the group choices, ``costs`` those of its model.
        common: the top-level values.
        executor: the node of the executor.
    """

    point: dict[str, Any]
    common: Common
    executor: dict[str, Any]


@cache
def groups() -> dict[str, list[str]]:
    """Group -> names of its choices, from the folders of ``conf/``; a group within a group is ``outer/inner``."""
    found: dict[str, list[str]] = {}
    for path in sorted(CONF.rglob("*/*.yaml")):
        found.setdefault(path.parent.relative_to(CONF).as_posix(), []).append(path.stem)
    return found


def load_experiment(stem: str) -> dict[str, Any]:
    """The content of ``conf/experiment/<stem>.yaml``.

    Raises:
        KvbenchError: there is no such experiment, or the file is no mapping.
    """
    check_choice("experiment", stem)
    content = yaml.safe_load((CONF / "experiment" / f"{stem}.yaml").read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise KvbenchError(f"conf/experiment/{stem}.yaml is no mapping of common: and points:")
    return content


def check_choice(group: str, choice: object) -> None:
    """Refuse a choice that a group does not have. Raises KvbenchError, which names those it has."""
    options = groups()[group]
    if choice not in options:
        message = (
            f"{group}={choice} does not exist{_hint(str(choice), options)}\n{group} is one of {', '.join(options)}"
        )
        if group == "costs":
            message += f"; python -m kvbench.calibrate --name {choice} makes one of this machine"
        raise KvbenchError(message)


def key_of(written: str) -> str:
    """The key as it is used here: a group within a group may be written with a dot, too (``workload.arrivals``)."""
    nested = written.replace(".", "/")
    return nested if nested in groups() else written


def parse(overrides: list[str], *, sweep: bool) -> list[list[Setting]]:
    """Parse command-line overrides with Hydra's own grammar.

    Args:
        overrides: as typed.
        sweep: whether comma lists, ``choice()`` and ``range()`` are multiplied, as with Hydra's ``-m``. Beside an
            experiment, lists of ``panel``, ``system`` and ``axes`` are about its points; they are kept as tuples.

    Returns:
        One list of settings for each combination, in Hydra's order.

    Raises:
        KvbenchError: a malformed override, a deletion, a sweep without ``sweep``.
    """
    parser = OverridesParser.create()
    parsed: dict[str, Override] = {}
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException:
            raise KvbenchError(
                f"cannot read {text!r}: an override is key=value; put text with special characters in quotes, "
                "as in workload.path=\"'my trace.csv'\""
            ) from None
        override.key_or_group = key_of(override.key_or_group)
        parsed[override.key_or_group] = override
    selectors = (*SELECTORS, "axes") if "experiment" in parsed else ()
    axes = [_settings(override, parser, sweep, selectors) for override in parsed.values()]
    return [list(combination) for combination in product(*axes)]


def is_launcher(override: str) -> bool:
    """Whether an override chooses or sets up one of Hydra's launchers."""
    return re.match(r"\+{0,2}hydra[./]launcher\b", override) is not None


def _settings(override: Override, parser: OverridesParser, sweep: bool, selectors: tuple[str, ...]) -> list[Setting]:
    key = override.key_or_group
    if override.package is not None or override.is_hydra_override() or key == "hydra":
        raise KvbenchError(
            f"{override.input_line}: kvbench writes results itself and has no packages and no hydra.* keys"
        )
    if override.type is OverrideType.DEL:
        raise KvbenchError(f"{override.input_line}: nothing can be deleted; give {key} another value")
    add = override.type in (OverrideType.ADD, OverrideType.FORCE_ADD)
    if not override.is_sweep_override():
        return [Setting(key, override.value(), add)]
    if not override.is_discrete_sweep():
        raise KvbenchError(f"{override.input_line}: an interval has no points; give a list or range()")
    value: object = override._value
    if isinstance(value, Glob):
        texts = [f"{key}={name}" for name in value.filter(groups().get(key, []))]
        if not texts:
            raise KvbenchError(f"{override.input_line} matches nothing; {key} is {_known(key)}")
    else:
        texts = [f"{key}={value}" for value in override.sweep_string_iterator()]
    values = [parser.parse_override(text).value() for text in texts]
    if key == "experiment":
        raise KvbenchError(f"{override.input_line}: one experiment at a time")
    if key in selectors:
        return [Setting(key, tuple(values), add)]
    if not sweep:
        raise KvbenchError(f"{override.input_line} lists several values; add -m to run all of them")
    return [Setting(key, value, add) for value in values]


def _known(key: str) -> str:
    return f"one of {', '.join(groups()[key])}" if key in groups() else "no group"


@contextmanager
def composer() -> Iterator[Composer]:
    """A ``Composer``, with Hydra set up while it is used."""
    with initialize_config_dir(str(CONF), version_base="1.3", job_name="kvbench"):
        yield Composer()


@dataclass(frozen=True, slots=True)
class _Composed:
    """A combination of group choices, and which of its values stand for themselves alone.

    Resolving interpolations is slow (several milliseconds) and most points of a sweep differ in values that none
    depends on but by naming it (``${seed}``): those are put into a resolved configuration directly.

    Attributes:
        config: a pickled DictConfig.
        chosen: the choice of every group.
        leaves: dotted keys that hold a value of their own.
        followers: key -> keys that are this key's value, by ``${key}``.
        entangled: keys that other expressions read.
    """

    config: bytes
    chosen: dict[str, str]
    leaves: frozenset[str]
    followers: dict[str, list[str]]
    entangled: frozenset[str]

    @classmethod
    def of(cls, config: DictConfig, chosen: dict[str, str]) -> _Composed:
        raw = dict(_leaves(cast("dict[str, Any]", OmegaConf.to_container(config))))
        reads = {key: value for key, value in raw.items() if isinstance(value, str) and "${" in value}
        names = {key: match[1] for key, value in reads.items() if (match := re.fullmatch(r"\$\{([\w.]+)\}", value))}
        entangled = {
            _absolute(key, word) for key in reads.keys() - names.keys() for word in re.findall(r"[\w.]+", reads[key])
        }
        if any("kvbench." in value for value in reads.values()):
            entangled.update(RESOLVERS_READ)
        followers: dict[str, list[str]] = {}
        for key, name in names.items():
            chain = [name]
            while chain[-1] in names:
                chain.append(names[chain[-1]])
            if key in entangled or chain[-1] not in raw:
                entangled.update(chain)
            for each in chain:
                followers.setdefault(each, []).append(key)
        given = frozenset(key for key in raw.keys() - reads.keys() if raw[key] != "???")
        return cls(pickle.dumps(config), chosen, given, followers, frozenset(entangled))

    def is_plain(self, setting: Setting, keys: Set[str]) -> bool:
        """Whether a setting, beside others of these keys, changes a value and its followers only."""
        return (
            setting.key in self.leaves
            and keys.isdisjoint(self.followers.get(setting.key, ()))
            and not any(_overlap(setting.key, key) for key in self.entangled)
        )

    def put(self, plain: dict[str, Any], setting: Setting) -> object:
        """Set a plain value and its followers in a resolved configuration; returns what was there."""
        before = _put(plain, setting.key, setting.value)
        for key in self.followers.get(setting.key, ()):
            _put(plain, key, setting.value)
        return before


def _leaves(node: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, value in node.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _absolute(key: str, name: str) -> str:
    """What ``name`` means in the value of ``key``: each leading dot is one level above."""
    levels = len(name) - len(name.lstrip("."))
    return ".".join([*key.split(".")[:-levels], name[levels:]]) if levels else name


def _put(plain: dict[str, Any], key: str, value: object) -> object:
    *parents, last = key.split(".")
    node = plain
    for name in parents:
        node = node[name]
    before, node[last] = node[last], value
    return before


def _overlap(key: str, other: str) -> bool:
    return key == other or key.startswith(f"{other}.") or other.startswith(f"{key}.")


class Composer:
    """Resolves settings to configurations; remembers what it composed."""

    def __init__(self) -> None:
        _register_resolvers()
        self._composed: dict[tuple[tuple[str, str], ...], _Composed] = {}
        self._plain: dict[str, tuple[bytes, list[Setting]]] = {}

    def resolve(self, settings: Iterable[Setting]) -> Resolved:
        """Apply ``settings`` to ``conf/config.yaml``: group choices first, then values in the order given.

        Raises:
            KvbenchError: a key, choice or value that does not exist here, naming those that do.
        """
        choices: dict[str, str] = {}
        values: list[Setting] = []
        for each in settings:
            if each.key in groups():
                check_choice(each.key, each.value)
                choices[each.key] = each.value
            else:
                values.append(each)
        composed = self._compose(choices)
        keys = {each.key for each in values}
        reads = any(isinstance(each.value, dict | list) or "${" in str(each.value) for each in values)
        slow = [each for each in values if reads or not composed.is_plain(each, keys)]
        base, changed = self._resolved(composed, slow)
        plain: dict[str, Any] = pickle.loads(base)  # a copy
        for each in values:
            if each not in slow and composed.put(plain, each) != each.value and _is_axis(each.key):
                changed.append(each)
        changed.sort(key=values.index)
        return _split(plain, composed.chosen, self._label(choices, composed.chosen, changed))

    def _resolved(self, composed: _Composed, values: list[Setting]) -> tuple[bytes, list[Setting]]:
        """The pickled plain configuration with ``values``, and those of them that change an axis; remembered."""
        key = repr((id(composed), values))
        if key not in self._plain:
            config: DictConfig = pickle.loads(composed.config)  # a copy; copy.deepcopy takes seven times as long
            changed = [each for each in values if _set(config, each) != each.value and _is_axis(each.key)]
            self._plain[key] = pickle.dumps(_to_plain(config)), changed
        base, changed = self._plain[key]
        return base, list(changed)

    def _compose(self, choices: Mapping[str, str]) -> _Composed:
        """What a combination of group choices composes to; remembered."""
        key = tuple(sorted(choices.items()))
        if key not in self._composed:
            try:
                config = compose("config", [f"{group}={choice}" for group, choice in key], return_hydra_config=True)
            except (HydraException, OmegaConfBaseException) as error:
                for group in choices:
                    outer, slash, inner = group.rpartition("/")
                    if slash and f"Could not override '{group}'" in str(error):
                        raise KvbenchError(
                            f"{outer}={choices.get(outer)} has no {inner} to choose, as {group}={choices[group]} asks; "
                            f"choose another {outer}"
                        ) from None
                raise KvbenchError(f"conf/ cannot be composed with {dict(key)}: {_first_line(error)}") from error
            chosen = {group: str(name) for group, name in config.hydra.runtime.choices.items() if group in groups()}
            OmegaConf.set_readonly(config, False)
            with open_dict(config):
                del config["hydra"]
                if config.runner.real_clock:  # which measures what an iteration costs
                    if "costs" in choices:
                        raise KvbenchError(
                            f"costs={choices['costs']} prices simulated runs: not with runner={chosen['runner']}"
                        )
                    config.costs = None
                    if config.model.get("dtype") == "auto":
                        config.model.dtype = _dtype_of(str(config.runner.device))
                else:
                    config.costs = _costs_of(config.costs, config.model.name)
            OmegaConf.set_struct(config, True)
            self._composed[key] = _Composed.of(config, chosen)
        return self._composed[key]

    def _label(self, asked: Mapping[str, str], chosen: Mapping[str, str], changed: Iterable[Setting]) -> str:
        """The system's name, followed by what differs from its preset."""
        different = []
        if any(axis in asked for axis in AXES):
            preset = self._compose({"system": chosen["system"]}).chosen
            different = [f"{axis}={chosen[axis]}" for axis in AXES if chosen[axis] not in (preset[axis], OWN)]
        different += [str(each._replace(key=each.key.removesuffix("._target_"))) for each in changed]
        return chosen["system"] + (f"[{','.join(different)}]" if different else "")


def _is_axis(key: str) -> bool:
    return key.partition(".")[0] in (*AXES, "system")


def _set(config: DictConfig, setting: Setting) -> object:
    """Set one value in place; returns what was there."""
    *parents, last = setting.key.split(".")
    node: Any = config
    for depth, name in enumerate(parents):
        if not isinstance(node, DictConfig) or name not in node:
            raise _unknown(config, setting.key, ".".join(parents[:depth]), node)
        node = node[name]
    known = isinstance(node, DictConfig) and last in node
    if not known and not (setting.add and isinstance(node, DictConfig) and parents and parents[0] in CONSTRUCTED):
        raise _unknown(config, setting.key, ".".join(parents), node)
    before = _value(node, last) if known else None
    if isinstance(before, dict) and before and not isinstance(setting.value, dict):
        raise KvbenchError(f"{setting} would replace the keys {', '.join(map(str, before))}; set one of them")
    OmegaConf.update(config, setting.key, setting.value, merge=True, force_add=True)
    return before


def _value(node: DictConfig, name: str) -> object:
    try:
        value = node[name]
    except OmegaConfBaseException:  # not given yet, or not resolvable as it stands
        return None
    return OmegaConf.to_container(value) if OmegaConf.is_config(value) else value


def _unknown(config: DictConfig, key: str, parent: str, node: object) -> KvbenchError:
    if not isinstance(node, DictConfig):
        return KvbenchError(f"unknown key {key}: {parent} is a value and has no keys")
    if "_target_" in node and not str(node["_target_"]).startswith("kvbench."):
        return KvbenchError(f"unknown key {key}: what a part of your own takes is given as +{key}=")
    here = [str(name) for name in node]
    names = [f"{parent}.{name}" if parent else name for name in here]
    close = get_close_matches(key, names, n=1)
    if not close:  # the last part may be right, at another place
        everywhere = list(_paths(OmegaConf.to_container(config)))
        last = key.rpartition(".")[2]
        close = [each for each in everywhere if each.rpartition(".")[2] == last] or get_close_matches(
            key, everywhere, n=1
        )
    hint = f"; did you mean {close[0]}?" if close else ""
    return KvbenchError(f"unknown key {key}{hint}\n{parent or 'the top level'} has {', '.join(here)}")


def _paths(node: object, prefix: str = "") -> Iterator[str]:
    if isinstance(node, dict):
        for name, value in node.items():
            yield f"{prefix}{name}"
            yield from _paths(value, f"{prefix}{name}.")


def _to_plain(config: DictConfig) -> dict[str, Any]:
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        cause: BaseException | None = error
        while cause is not None:  # what one of our own resolvers said
            if isinstance(cause, KvbenchError):
                raise cause from None
            cause = cause.__cause__ or cause.__context__
        if isinstance(error, MissingMandatoryValue):
            raise KvbenchError(f"{error.full_key} has no default; give {error.full_key}=...") from None
        raise KvbenchError(f"{error.full_key or 'the configuration'}: {_first_line(error)}") from None
    return cast(dict[str, Any], plain)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0]


def _hint(name: str, names: Iterable[str]) -> str:
    close = get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _costs_of(costs: Any, model: str) -> dict[str, Any]:
    """The entry of a costs file for a model."""
    if model not in costs.models:
        raise KvbenchError(
            f"costs={costs.name} has no entry for model={model}; it has {', '.join(costs.models)}\n"
            f"python -m kvbench.calibrate model={model} fits one to this machine, for costs=local"
        )
    entry = cast("dict[str, Any]", OmegaConf.to_container(costs.models[model]))
    return {"name": costs.name, **entry}


def _dtype_of(device: str) -> str:
    """What ``model.dtype=auto`` is there."""
    try:
        from kvbench.models.dtypes import resolve
    except ModuleNotFoundError as error:
        raise KvbenchError(f"a real run needs {error.name}: make install EXTRAS=dev,models") from None
    return resolve("auto", device)


def _gpu_memory_bytes() -> int:
    """What ``hardware=local_gpu`` has. Raises KvbenchError where there is no GPU, or no torch to ask."""
    try:
        from kvbench.runners.device import gpu_memory_bytes
    except ModuleNotFoundError as error:
        raise KvbenchError(f"a real run needs {error.name}: make install EXTRAS=dev,models") from None
    return gpu_memory_bytes()


def _split(config: dict[str, Any], chosen: Mapping[str, str], label: str) -> Resolved:
    """Check the top-level values, and set aside what is no part of the point."""
    top = {each.name: config[each.name] for each in fields(Common)}
    check_arguments(Common, top, "")
    common = Common(**top)
    executor = config.pop("executor")
    for key in ("name", "panel", "repeats", "interval", "results_dir", "memory_map", "live"):
        del config[key]
    config["system"] = label
    config["choices"] = {group: chosen[group] for group in sorted(chosen) if group not in ("executor", "experiment")}
    return Resolved(config, common, executor)


def _register_resolvers() -> None:
    def plain(root: Any) -> dict[str, Any]:
        keys = ("model", "hardware", "kv_cache_bytes", "kv_cache_seqs")
        return {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value := root[key]) else value
            for key in keys
        }

    def batch(*, _root_: Any) -> int:
        config = plain(_root_)
        return batch_limit(model_of(config), capacity_of(config), _root_.workload.name)

    def session(max_num_seqs: int, *, _root_: Any) -> int:
        config = plain(_root_)
        return session_len(model_of(config), capacity_of(config), max_num_seqs)

    OmegaConf.register_new_resolver("kvbench.memory_bytes", memory_bytes, replace=True)
    OmegaConf.register_new_resolver("kvbench.gpu_memory_bytes", _gpu_memory_bytes, replace=True)
    OmegaConf.register_new_resolver("kvbench.batch_limit", batch, replace=True)
    OmegaConf.register_new_resolver("kvbench.session_len", session, replace=True)
