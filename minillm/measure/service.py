"""A server in virtual time: what it is, as one frozen dataclass, and what becomes of a workload on it.

The engines, their schedulers and their pools are the real ones; the duration of a step comes from a
cost model (`virtual.py`). So the times are predictions from a data sheet, and follow from the seed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property

from minillm.fast.engine import Engine
from minillm.guard.inputs import check_at_least, whole_setting
from minillm.ladder.records import Records, RequestRecord
from minillm.load.config import ModelConfig
from minillm.measure import fleet, metrics
from minillm.measure.capacity import GB, WEIGHT_BYTES, Capacity, capacity
from minillm.measure.roofline import weight_numbers
from minillm.measure.virtual import DEVICES, CostModel, VirtualProposer, virtual_engine
from minillm.measure.workload import WorkItem, make_workload, numbered_ids, play

PRICE = 2.9  # dollars an hour of an A100: what the articles' costs imply
MOST_REPLICAS = 1000
ENGINE_SETTINGS = ("max_batch", "max_step_tokens", "batching", "kv", "chunked_prefill", "prefix_cache")


@dataclass(frozen=True)
class Service:
    """Replicas of one engine on one kind of device.

    device: a name in `DEVICES`, or a `CostModel`, which then also decides model, KV format and
    weights. weights: their bytes, as a share of 16 bits. kv_memory: bytes for keys and values; None:
    what weights and `overhead_gb` leave of the device's memory. prefill_replicas: further devices, which
    compute prompts only and send the cache on at `transfer_gb_per_s`. prompts_received: prompts are
    in the cache already, so only answers are computed. acceptance: the probability that a draft is
    right, given that its predecessors were, with 4 drafts that cost nothing; None: no speculation.
    max_waiting: a request that finds this many in the queue is refused; None: no bound. answer_cap:
    the most tokens of an answer. price_per_hour: of one device. The others are the engine's settings.

    ValueError for an unknown device, a negative price, or no replica.
    """

    device: str | CostModel = "a100-80gb"
    model: str = "llama-3.1-8b"  # Llama-3-8B with positions for real chats: some have 15,000 tokens
    kv_format: str = "bf16"
    weights: float = 1.0
    replicas: int = 1
    prefill_replicas: int = 0
    transfer_gb_per_s: float = 50.0
    prompts_received: bool = False
    acceptance: float | None = None
    max_waiting: int | None = None
    answer_cap: int | None = None
    max_batch: int = 256
    max_step_tokens: int = 2048
    batching: str = "continuous"
    kv: str = "paged"
    chunked_prefill: bool = True
    prefix_cache: bool = False
    kv_memory: int | None = None
    overhead_gb: float = 4.0
    price_per_hour: float = PRICE

    def __post_init__(self) -> None:
        whole_setting("replicas", self.replicas, 1, MOST_REPLICAS)
        whole_setting("prefill_replicas", self.prefill_replicas, 0, MOST_REPLICAS)
        check_at_least(0, price_per_hour=self.price_per_hour)
        if isinstance(self.device, str) and self.device not in DEVICES:
            raise ValueError(f"unknown device {self.device!r}; known: {', '.join(DEVICES)}")

    def __str__(self) -> str:
        """The fields that differ from their defaults."""
        given = {field: getattr(self, field.name) for field in fields(self)}
        return ", ".join(f"{field.name}={value!r}" for field, value in given.items() if value != field.default)

    @property
    def devices(self) -> int:
        return self.replicas + self.prefill_replicas

    @cached_property
    def cost(self) -> CostModel:
        """How long a step takes."""
        if isinstance(self.device, CostModel):
            return self.device
        cost = CostModel.of_device(self.device, ModelConfig.preset(self.model), self.kv_format)
        return replace(cost, weight_bytes=cost.weight_bytes * self.weights)

    def capacity(self, context: int = 4096) -> Capacity:
        """How many requests of `context` tokens fit into the memory of the device, which needs a data sheet."""
        config = ModelConfig.preset(self.model)
        weights_gb = weight_numbers(config) * WEIGHT_BYTES / GB * self.weights
        return capacity(config, DEVICES[self.device].memory_gb, weights_gb, self.overhead_gb, context, self.kv_format)

    def engine(self, max_context: int = 16_384) -> Engine:
        """One replica, on a virtual clock of its own. max_context: tokens of the longest request."""
        memory = self.kv_memory
        if memory is None and isinstance(self.device, str):
            memory = round(self.capacity().cache_gb * GB)
        proposer = None if self.acceptance is None else VirtualProposer(self.acceptance)
        settings = {name: getattr(self, name) for name in ENGINE_SETTINGS}
        return virtual_engine(
            self.cost, self.prompts_received, proposer, kv_memory=memory, max_context=max_context, **settings
        )

    def serve(self, items: Sequence[WorkItem], clients: int | None = None) -> Served:
        """Serve a workload to its end. clients: of a closed loop, shared among the replicas; None: the open loop."""
        if sum((clients is not None, self.prefill_replicas > 0, self.max_waiting is not None)) > 1:
            raise ValueError("a run has at most one of a closed loop, prefill replicas, and a bounded queue")
        if self.answer_cap is not None:
            items = [replace(item, max_tokens=min(item.max_tokens, self.answer_cap)) for item in items]
        longest = max(len(item.prompt_ids) + item.max_tokens for item in items)
        if self.prefill_replicas:
            engines, requests = self._serve_apart(items, longest)
        else:
            engines = [self.engine(longest) for _ in range(self.replicas)]
            if clients is None:
                requests = fleet.serve(engines, items, max_waiting=self.max_waiting)
            else:
                requests = closed_loop(engines, items, clients)
        return Served(self, requests, metrics.merge([engine.records for engine in engines]))

    def _serve_apart(self, items: Sequence[WorkItem], longest: int) -> tuple[list[Engine], list[RequestRecord]]:
        """Prompts on some devices, answers on the others, which take a whole prompt in one step."""
        decoding = replace(self, prompts_received=True, max_step_tokens=max(self.max_step_tokens, longest))
        first = [self.engine(longest) for _ in range(self.prefill_replicas)]
        second = [decoding.engine(longest) for _ in range(self.replicas)]
        requests = fleet.serve_disaggregated(first, second, items, self.transfer_gb_per_s * GB)
        return [*first, *second], requests


@dataclass(frozen=True)
class Served:
    """What became of a workload on a service.

    requests: one record per item in the items' order, None where it was refused; of a closed loop, in
    the order of finishing. records: of all engines, merged.
    """

    service: Service
    requests: list[RequestRecord | None]
    records: Records

    @cached_property
    def summary(self) -> dict:
        """`metrics.summary` at the price of all devices; its latencies are those of whole requests."""
        found = metrics.summary(self.records, self.service.price_per_hour * self.service.devices)
        if self.service.prefill_replicas:  # two engines have a record of each request
            counts = {"finished": len(self.requests), "aborted": 0, "failed": 0, "unfinished": 0}
            found |= {**metrics.latencies(self.requests), "requests": counts}
        return found


def closed_loop(engines: Sequence[Engine], items: Sequence[WorkItem], clients: int) -> list[RequestRecord]:
    """Clients and their requests shared among the engines, each with at least one client; in order of finishing."""
    check_at_least(1, clients=clients)
    for number, engine in enumerate(engines):
        play(engine, items[number :: len(engines)], max(1, clients // len(engines)))
    return [record for engine in engines for record in engine.records.requests]


COMPACT = ("chat", "code", "trace", "worked-example")  # workloads whose prompts need no memory in virtual time


def simulate(workload: str, service: Service, clients: int | None = None, **settings) -> dict:
    """The fields of a service and the summary of a workload on it, with `row_steps` and the number of devices.

    clients: of a closed loop, on one replica; None: the open loop. `settings` are the workload's.
    Prompts of the workload "shared-prefix" are cached.
    """
    if clients is not None and service.devices > 1:
        raise ValueError("a closed loop is played on one replica; leave the number of clients or of replicas")
    items = make_workload(workload, **({"ids": numbered_ids} if workload in COMPACT else {}), **settings)
    service = replace(service, prefix_cache=service.prefix_cache or workload == "shared-prefix")
    served = service.serve(items, clients)
    more = {"row_steps": served.records.totals["rows"], "devices": service.devices}
    return {**asdict(service), **served.summary, **more}
