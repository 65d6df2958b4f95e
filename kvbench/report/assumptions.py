"""What has to be believed for the numbers to hold: read from rows, configurations and manifests, each said once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from kvbench.figures.terminal import text
from kvbench.report.tables import Column, Row, Table
from kvbench.results import SIMULATED, leaves

_PARTS = ("allocator", "reservation", "scheduler", "runner")


class Assumption(NamedTuple):
    """Something that is taken for granted: what it concerns, and what it says."""

    topic: str
    text: str


def assumptions_table(rows: Sequence[Row], configs: Mapping[str, Row], manifests: Mapping[str, Row]) -> Table:
    """Every assumption, with the points for which it is made."""
    found: dict[Assumption, list[Row]] = {}
    for row in rows:
        point = str(row["point"])
        for each in dict.fromkeys(_of_point(row, configs.get(point, {}), manifests.get(point, {}))):
            found.setdefault(each, []).append(row)
    cells: list[list[object]] = [[each.topic, each.text, _whose(of, rows)] for each, of in found.items()]
    cells += [[each.topic, each.text, "all"] for each in _of_all(rows)]
    cells.sort(key=lambda cell: _TOPICS.index(str(cell[0])))
    note = "" if configs else "This folder has no configurations: what only they say is missing here."
    columns = [Column("about"), Column("assumed"), Column("by")]
    return Table("assumptions-table", "Every assumption, and whose numbers rest on it", columns, cells, note=note)


_TOPICS = (
    "time", "requests", "arrivals", "memory", "true lengths", "system", "beams", "objective", "rejected", "averages",
    "steady state", "repeats",
)  # fmt: skip


def _of_point(row: Row, config: Row, manifest: Row) -> Iterator[Assumption]:
    yield from _time(row, config)
    yield from _requests(row, config, manifest)
    yield from _memory(row, manifest)
    knows = (
        "uses the true output length of a request before it is generated"
        if row.get("uses_true_lengths")
        else "learns an output's length when it ends"
    )
    yield Assumption("true lengths", f"The system {knows}.")
    for part in _PARTS:
        if part in config:
            yield Assumption("system", f"{part}: {_described(config[part])}")
    if (beams := (config.get("runner") or {}).get("beams")) and (row.get("beam_width") or 1) > 1:
        yield Assumption("beams", f"Which beams survive: {_described(beams)}")
    limits = [f"{name} {text(row[name])} s" for name in ("slo_ttft_s", "slo_tpot_s") if row.get(name) is not None]
    if limits:
        yield Assumption("objective", f"Goodput counts requests within {' and '.join(limits)}.")
    for reason in manifest.get("rejections") or ():
        yield Assumption("rejected", str(reason))
    end = "the end of the run" if row.get("measure_to_s") is None else f"{text(row['measure_to_s'])} s"
    yield Assumption(
        "averages",
        f"Averages and throughputs are of {text(row.get('measure_from_s') or 0)} s to {end}. "
        "Latencies are of all finished requests, warm-up and drain included; columns steady_ leave those out.",
    )
    if row.get("stable") is False:
        yield Assumption(
            "steady state",
            "The queue grew until the last arrival: latencies depend on how long requests arrived.",
        )


def _time(row: Row, config: Row) -> Iterator[Assumption]:
    if row["device"] != SIMULATED:
        yield Assumption("time", f"Measured on {row['device']}, by the runner {row['runner']}.")
        return
    yield Assumption(
        "time",
        "Simulated: iterations take what the coefficients below say; nothing was computed, no token has a value.",
    )
    costs = config.get("costs") or {}
    numbers = ", ".join(
        f"{name}={text(value)}" for name, value in leaves(costs) if name not in ("name", "source", "hardware")
    )
    source = f" Source: {costs['source']}." if costs.get("source") else ""
    yield Assumption(
        "time",
        f"Costs {row.get('costs')} of {row['model']} on {row['hardware']}: {numbers or 'not in this folder'}.{source}",
    )


def _requests(row: Row, config: Row, manifest: Row) -> Iterator[Assumption]:
    yield Assumption("requests", f"{row['workload']}: lengths from {row['workload_source']}.")
    for name, value in (manifest.get("inputs") or {}).items():
        if str(value).startswith("absent"):
            yield Assumption("requests", f"{name} was {value} stood in for it.")
    for name, what in (("num_dropped", "dropped"), ("num_clipped", "clipped")):
        if row.get(name):
            yield Assumption("requests", f"Requests longer than the model's maximum are {what}; {name} says how many.")
    if row.get("num_rejected"):
        yield Assumption(
            "rejected", "Some requests could never be served; they are in no latency, num_rejected says how many."
        )
    workload = config.get("workload") or {}
    if "arrivals" in workload:
        yield Assumption("arrivals", _described(workload["arrivals"]))
    if "lengths" in workload:
        yield Assumption("requests", f"lengths: {_described(workload['lengths'])}")


def _memory(row: Row, manifest: Row) -> Iterator[Assumption]:
    source = (manifest.get("capacity") or {}).get("source")
    parts = ", ".join(
        f"{name.removesuffix('_bytes').replace('_', ' ')} {row[name] / 2**30:.2f} GiB"
        for name in ("weights_bytes", "activation_bytes", "reserve_bytes", "kv_cache_bytes")
        if row.get(name) is not None
    )
    pool = f"The pool has {text(row.get('num_slots'))} slots of one token: {parts}"
    yield Assumption("memory", f"{pool} (from: {source})." if source else f"{pool}.")


def _of_all(rows: Sequence[Row]) -> Iterator[Assumption]:
    if len({row.get("repeat") for row in rows}) == 1:
        yield Assumption(
            "repeats",
            "Every point was run once: differences of a few percent may be chance, and no interval can be given.",
        )
    else:
        yield Assumption(
            "repeats", "Points were repeated with other seeds; charts against a parameter show the mean over repeats."
        )


def _described(node: Mapping[str, object]) -> str:
    """An object of a configuration: its class, and its arguments."""
    name = str(node.get("_target_", "")).rpartition(".")[2]
    options = ", ".join(
        f"{key}={text(value)}" for key, value in leaves(node) if key != "_target_" and not key.endswith("._target_")
    )
    return f"{name} ({options})" if options else name


def _whose(of: Sequence[Row], rows: Sequence[Row]) -> str:
    if len(of) == len(rows):
        return "all"
    systems = {row["system"] for row in of}
    if sum(row["system"] in systems for row in rows) == len(of):
        return ", ".join(sorted(systems))
    return f"{len(of)} of {len(rows)} points: {', '.join(sorted(systems))}"
