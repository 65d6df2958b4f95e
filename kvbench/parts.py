"""The objects of a point, built from its configuration; the pool they share is sized first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, cast

from kvbench import compiled
from kvbench.allocators.base import Ability, Allocator
from kvbench.capacity import (
    COMPUTED,
    ESTIMATED,
    MAX_BATCHED_TOKENS,
    SWAP_SPACE_BYTES,
    Capacity,
    Footprint,
    capacity_of,
    check_fits,
    measured,
    model_of,
    usable_bytes,
    with_swap_space,
)
from kvbench.clock import VirtualClock, WallClock
from kvbench.core import KvbenchError, Request
from kvbench.engine import Engine, Watcher
from kvbench.engine import serve as step_by_step
from kvbench.instantiate import check_arguments, instantiate, locate, takes
from kvbench.ledger import Ledger
from kvbench.records import Record
from kvbench.runners.base import Runner
from kvbench.runners.simulated import NOT_COEFFICIENTS, IterationCosts
from kvbench.schedulers.base import Scheduler
from kvbench.workloads.base import Workload


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects of a point; a runner that loads a model does so when it is opened."""

    capacity: Capacity
    scheduler: Scheduler
    open_runner: Callable[[], Runner]
    clock: type[VirtualClock] | type[WallClock]
    workload: Workload
    uses_true_lengths: bool

    def open_engine(self, watchers: Seq[Watcher] = ()) -> Engine:
        """An engine that has served nothing yet. Raises what opening the runner raises."""
        runner = self.open_runner()
        ledger = Ledger(self.scheduler.allocator, may_stop_early=runner.may_stop_early)
        return Engine(self.scheduler, runner, self.clock(), ledger, watchers)


def build(config: Mapping[str, Any], capacity: Capacity | None = None) -> Parts:
    """Build every object of a point from its configuration; no model is loaded.

    Args:
        config: of the point.
        capacity: the KV pool, as ``capacity_now`` found it; None for the one that is planned.

    Raises:
        KvbenchError: a value, a key or a combination that a constructor refuses.
    """
    capacity = capacity or _planned(config)
    if config["metric"] is not None:
        _check_searchable(config)
    allocator = _allocator(config, capacity)
    host_slots = allocator.host_slots if Ability.SWAP in allocator.abilities else 0
    capacity = replace(capacity, swap_space_bytes=host_slots * capacity.bytes_per_slot)
    reservation = instantiate(config["reservation"], "reservation")
    scheduler = instantiate(config["scheduler"], "scheduler", allocator=allocator, reservation=reservation)
    workload = instantiate_workload(config)
    uses_true_lengths = bool(reservation.uses_true_lengths or scheduler.uses_true_lengths)
    if is_real(config):
        check_fits(capacity)
        return Parts(capacity, scheduler, _real_runner(config, allocator), WallClock, workload, uses_true_lengths)
    runner = _simulated_runner(config, allocator)
    return Parts(capacity, scheduler, lambda: runner, VirtualClock, workload, uses_true_lengths)


def serve(engine: Engine, requests: Seq[Request]) -> Record:
    """Serve all requests: by the compiled loop where it can, which gives the same records, else step by step."""
    return compiled.serve(engine, requests) or step_by_step(engine, requests)


def _allocator(config: Mapping[str, Any], capacity: Capacity) -> Allocator:
    """Over the pool, and over a host pool of ``swap_space_bytes`` if it takes one."""
    node, given = config["allocator"], {"num_slots": capacity.num_slots}
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if isinstance(target, str) and takes(locate(target, "allocator"), "host_slots"):
        given["host_slots"] = capacity.swap_space_bytes // capacity.bytes_per_slot
    allocator: Allocator = instantiate(node, "allocator", **given)
    least = allocator.block_size * capacity.bytes_per_slot
    if "host_slots" in given and 0 < (config.get("swap_space_bytes") or 0) < least:
        raise KvbenchError(
            f"swap_space_bytes={config['swap_space_bytes']} holds no block; give {least} (one block) or more, or 0"
        )
    return allocator


def _check_searchable(config: Mapping[str, Any]) -> None:
    """Refuse what a search cannot repeat at another rate with other seeds."""
    workload = config["workload"]
    if is_real(config):
        raise KvbenchError(f"metric={config['metric']} is searched in simulated runs; leave runner= at simulated")
    if workload.get("arrivals") is None or workload.get("request_rate") is None:
        raise KvbenchError(
            f"metric={config['metric']} is searched over the rate, with repeats that differ: workload="
            f"{config['choices']['workload']} as given has one trace; choose one with arrivals and a request_rate"
        )


def is_real(config: Mapping[str, Any]) -> bool:
    """Whether a point computes tokens, in real time."""
    return bool(config["runner"].get("real_clock"))


def instantiate_workload(config: Mapping[str, Any]) -> Workload:
    """Build the workload alone. Raises KvbenchError as ``build``."""
    workload: Workload = instantiate(config["workload"], "workload")
    return workload


def inputs_of(config: Mapping[str, Any], workload: Workload) -> dict[str, str]:
    """File name -> digest of everything a point reads, or what stands in for it."""
    if not is_real(config):
        return workload.inputs()
    from kvbench.models import sources

    return workload.inputs() | sources.inputs(model_of(config).weights)


def _planned(config: Mapping[str, Any]) -> Capacity:
    """The capacity report before anything is loaded: of a real run whose pool is not given, an estimate."""
    planned = capacity_of(config)
    given, most = config.get("swap_space_bytes"), planned.kv_cache_bytes
    if is_real(config):
        most = min(most, planned.num_gpus * SWAP_SPACE_BYTES)
        if planned.source == COMPUTED:
            planned = replace(planned, source=ESTIMATED)
    return replace(planned, swap_space_bytes=most if given is None else int(given))


def capacity_now(config: Mapping[str, Any]) -> Capacity:
    """The capacity report of a point that is about to run.

    That of a real run respects what the machine can give now, of the host's memory for what is swapped out too. Where
    the pool's size is not given, the model is loaded and its largest iteration profiled (the runner's ``measured_by``);
    the pool is what they leave.

    Raises:
        KvbenchError: too little memory, said before anything large is allocated, or what loading the model raises.
    """
    planned = _planned(config)
    if not is_real(config):
        return planned
    usable = _usable_bytes(config["runner"].get("usable_by"), planned.num_gpus)
    check_fits(planned, usable)
    found = planned if planned.source != ESTIMATED else _measured(config, planned, usable)
    has_own_memory = config["runner"].get("usable_by") is not None
    return with_swap_space(found, config.get("swap_space_bytes"), usable_bytes(), pinned=has_own_memory)


def _measured(config: Mapping[str, Any], planned: Capacity, usable: int) -> Capacity:
    """What a loaded model leaves. Raises KvbenchError as ``capacity_now``."""
    runner, scheduler, model = config["runner"], config["scheduler"], model_of(config)
    if runner.get("measured_by") is None:
        raise KvbenchError("runner.measured_by names nothing that measures; give kv_cache_bytes= or kv_cache_seqs=")
    num_seqs = scheduler.get("max_num_seqs", MAX_BATCHED_TOKENS)
    num_tokens = scheduler.get("max_num_batched_tokens", num_seqs * model.max_model_len)
    seen: Footprint = instantiate(
        _runner_node(config) | {"_target_": runner["measured_by"]},
        "runner",
        model=model,
        seed=config["seed"],
        num_tokens=num_tokens,
        num_seqs=num_seqs,
    )
    found = _sized(planned, seen, num_tokens, runner.get("usable_by"))
    check_fits(replace(found, reserve_bytes=0), usable)  # what other programs took since then may be as much
    return found


@lru_cache
def _sized(planned: Capacity, seen: Footprint, num_tokens: int, usable_by: str | None) -> Capacity:
    """Size a pool once in a process: points that need the same get the same, whatever other programs do meanwhile."""
    return measured(planned, seen, num_tokens, _usable_bytes(usable_by, planned.num_gpus))


def _usable_bytes(usable_by: str | None, num_gpus: int) -> int:
    """What the device of a real run can give now: this machine's memory, unless the runner names who knows better."""
    return usable_bytes() if usable_by is None else int(locate(usable_by, "runner.usable_by")(num_gpus))


def measured_capacity(planned: Capacity, runner: Runner) -> Capacity:
    """The capacity report with what an opened runner really takes. Raises KvbenchError as ``check_fits``."""
    if runner.weights_bytes is None:
        return planned
    capacity = replace(planned, weights_bytes=runner.weights_bytes)
    check_fits(capacity)
    return capacity


def _runner_node(config: Mapping[str, Any]) -> dict[str, Any]:
    keys = ("real_clock", "measured_by", "usable_by")
    return {key: value for key, value in config["runner"].items() if key not in keys}


def _real_runner(config: Mapping[str, Any], allocator: Allocator) -> Callable[[], Runner]:
    """Check the options; the model is loaded later."""
    node = _runner_node(config)
    given = {"model": model_of(config), "allocator": allocator, "seed": config["seed"]}
    arguments = {key: value for key, value in node.items() if key != "_target_"}
    check_arguments(locate(node["_target_"], "runner"), arguments, "runner", given)
    if "sampling" in node:
        instantiate(node["sampling"], "runner.sampling")
    return lambda: cast(Runner, instantiate(node, "runner", **given))


def _simulated_runner(config: Mapping[str, Any], allocator: Allocator) -> Runner:
    costs, hardware = config["costs"], config["hardware"]["name"]
    if costs["hardware"] != hardware:
        raise KvbenchError(
            f"costs={costs['name']} has {config['model']['name']} on {costs['hardware']}, not on hardware={hardware}; "
            f"choose hardware={costs['hardware']}, or give a costs file for {hardware}"
        )
    coefficients = {key: value for key, value in costs.items() if key not in NOT_COEFFICIENTS}
    check_arguments(IterationCosts, coefficients, "costs")
    model = model_of(config)
    node = _runner_node(config)
    beams = instantiate(node.pop("beams"), "runner.beams") if node.get("beams") else None
    runner: Runner = instantiate(
        node,
        "runner",
        costs=IterationCosts(**coefficients),
        bytes_per_slot=model.bytes_per_slot,
        num_layers=model.num_layers,
        beams=beams,
        # The kernel that follows a block table depends on the block size; one that reads contiguous memory does not.
        **({"block_size": allocator.block_size} if Ability.GROW in allocator.abilities else {}),
    )
    return runner
