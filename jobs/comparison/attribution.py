"""What each difference between two jobs costs: bytes of the predicted peak, and expected time.

Each category of the plan is a product (below), and each factor is traced to the settings that act through it.
Where several of these differ, they share its cost: the plan does not say more. Temporaries are no product, since some
of them are there whatever the tokens: beside rows and tokens, all that acts on them shares its cost.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from jobs.comparison.facts import JobFacts
from jobs.memory_plan import MemoryPlan
from jobs.plan import Resolved, rows_of_steps
from jobs.spec import FullMethod, JobSpec, LoraMethod

# -- division ----------------------------------------------------------------------------------------------------------
# A difference, divided among what is behind it.
#
# A category of the plan is a product: weights are parameters x bytes of one, activations are rows x tokens x bytes a
# token. Where one factor differs, the difference in the category is its cost. Where several do, each gets the part
# that its logarithm has in that of the quotient (the logarithmic mean Divisia index, Ang 2004): the parts add up
# exactly, and do not depend on which job comes first.

Keys = tuple[str, ...]
_LOST = 20.0
"""Where parts would be so many times the whole, they cancel each other out: nobody can tell them apart."""


@dataclass(frozen=True)
class Factor:
    """One factor of a product, in the reference and in the other job."""

    before: float
    after: float
    keys: Keys
    """Those that differ and act through it."""


@dataclass(frozen=True)
class Product:
    """A category of the peak, or a part of one; or the time."""

    category: str
    before: float
    after: float
    factors: Sequence[Factor]
    """The last one is what is left of the amount by the others."""
    exact: bool = True
    """Whether that is a factor of its own; else it is not told apart from the others."""


@dataclass
class Costs:
    """What differences cost, by the keys that are behind them; without keys: nobody knows what is."""

    parts: defaultdict[Keys, defaultdict[str, float]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(float))
    )
    estimated: set[Keys] = field(default_factory=set)
    """Those with a part of a category that others changed, too."""

    def add(self, product: Product) -> None:
        """Divide the difference among the keys."""
        shares = divide(product)
        for keys, amount in shares.items():
            self.parts[keys][product.category] += amount
        if len(shares) > 1:
            self.estimated |= shares.keys()

    def take(self, other: Costs) -> None:
        """Add those of another."""
        for keys, parts in other.parts.items():
            for category, amount in parts.items():
                self.parts[keys][category] += amount
        self.estimated |= other.estimated

    def of(self, *keys: str) -> float | None:
        """What these differences cost together, or one by itself; None: nothing is known of that."""
        return sum(self.parts[keys].values()) if keys in self.parts else None


def divide(product: Product) -> dict[Keys, float]:
    """The difference by keys. What has no keys is told of those that have: the product is not as simple as that."""
    change = product.after - product.before
    if not change:
        return {}
    moved = [each for each in product.factors if each.keys and each.before != each.after]
    every = tuple(dict.fromkeys(key for each in moved for key in each.keys))
    logs: defaultdict[Keys, float] = defaultdict(float)
    for each in moved:
        if each.before <= 0 or each.after <= 0:  # it came, or went
            return {each.keys: change}
        logs[each.keys] += math.log(each.after / each.before)
    total = sum(logs.values())
    left = product.factors[-1].keys
    if not product.exact and left and every != left:
        return {every: change}
    if total * change <= 0 or any(abs(log) > _LOST * abs(total) for log in logs.values()):
        return {every: change}
    return {keys: change * log / total for keys, log in logs.items()}


# -- attribution -------------------------------------------------------------------------------------------------------

Pair = tuple[float, float]
"""Of the reference, and of the other job."""
_ROWS: Keys = (
    "data.train", "data.validation", "data.input", "data.target", "data.format", "data.normalize",
    "data.keep_line_breaks", "data.learn", "data.chat_template",
)  # fmt: skip
LIMITS: Keys = ("data.max_tokens", "data.max_input_tokens", "data.max_target_tokens")
_SIZES: Keys = ("model.revision", "model.parameters", "task.labels")
_METHOD: Keys = ("method.type", "method.rank", "method.targets", "method.dora")


class Differing:
    """Which keys differ between two jobs."""

    def __init__(self, keys: Collection[str]) -> None:
        self._keys = set(keys)
        if "method.type" in keys:  # of two methods, one has none of the other's settings
            self._keys = {key for key in keys if key == "method.type" or not key.startswith("method.")}

    def first(self, *tiers: Keys) -> Keys:
        """Those of the first tier in which any differs."""
        found = (tuple(key for key in tier if key in self._keys) for tier in tiers)
        return next(filter(None, found), ())


@dataclass(frozen=True)
class Need:
    """What a job needs of memory, and in which setting."""

    memory: MemoryPlan
    parts: dict[str, int]
    micro_batch: int
    activation_checkpointing: int
    optimizer: str

    @classmethod
    def of(cls, job: JobFacts, memory: MemoryPlan, *, least: bool) -> Need:
        """In the setting that was chosen, or `least`: in the smallest that the job allows."""
        if not least or not memory.least_parts:
            weights = memory.parts.get("weights", 0) + job.unplanned_weight_bytes
            every = memory.activation_checkpointing
            return cls(memory, {**memory.parts, "weights": weights}, memory.micro_batch, every, memory.optimizer)
        asked, batch_size = job.spec.memory, job.spec.training.batch_size
        rows = 1 if asked.micro_batch == "auto" else min(asked.micro_batch, batch_size)
        every = 1 if asked.activation_checkpointing == "auto" else asked.activation_checkpointing
        return cls(memory, memory.least_parts, rows, every, memory.optimizer)


def memory_costs(before: JobFacts, after: JobFacts, differing: Collection[str]) -> Costs | None:
    """What each difference costs of memory; None where one of the two has no plan of it."""
    if before.memory is None or after.memory is None:
        return None
    # A job that was refused is compared in the least that it needs with the least of the other.
    least = before.memory.fits and not after.memory.fits
    pair = (Need.of(before, before.memory, least=least), Need.of(after, after.memory, least=least))
    costs = Costs()
    for product in _products(before, after, *pair, Differing(differing)):
        costs.add(product)
    return costs


def limit_costs(before: JobFacts, after: JobFacts, differing: Collection[str]) -> Costs:
    """By how much less the other job may use, and why."""
    costs = Costs()
    if before.memory is not None and after.memory is not None:
        keys = Differing(differing).first(
            ("memory.budget",),
            ("resources.gpu_memory_gib", "resources.gpu_name", "resources.engine"),
            ("memory.gpu",),
            ("memory.budget_bytes",),
        )
        limits = before.memory.limit_bytes, after.memory.limit_bytes
        costs.add(Product("limit", -limits[0], -limits[1], (Factor(*limits, keys),)))
    return costs


def time_costs(before: JobFacts, after: JobFacts, differing: Collection[str]) -> Costs | None:
    """What each difference costs of the expected time of all steps, in seconds; None where it is not known of both."""
    was, now = _time_factors(before), _time_factors(after)
    if was is None or now is None or before.plan is None or after.plan is None:
        return None
    keys = Differing(differing)
    optimizers = {plan.resolved.optimizer for plan in (before.plan, after.plan)}
    gpus = _gpus(before.plan.resolved, after.plan.resolved, keys)
    host = keys.first(("memory.optimizer",), ("resolved.optimizer",)) if "adamw_offload" in optimizers else ()
    behind = (
        keys.first(("training.epochs", "training.max_steps", "training.max_hours")),
        keys.first((*_ROWS, "data.max_invalid_fraction"), ("data.prepared",)),
        keys.first(("model", *_METHOD, *LIMITS, *_ROWS, "resume_from"), _SIZES),
        keys.first(("memory.activation_checkpointing",), ("resolved.activation_checkpointing",)),
    )
    (seconds, *factors), (other_seconds, *other_factors) = was, now
    costs = Costs()
    costs.add(
        _product(
            "time",
            (seconds, other_seconds),
            list(zip(zip(factors, other_factors, strict=True), behind, strict=True)),
            (*host, *(gpus or keys.first(("memory.gpu",), ("speed.compile", "speed.fused", "training.batch_size")))),
        )
    )
    return costs


def _time_factors(job: JobFacts) -> tuple[float, ...] | None:
    """Seconds; epochs, rows, FLOPs of a row, and how many times these are with what is recomputed. None: not known."""
    plan = job.plan
    time = None if plan is None else plan.time
    if plan is None or time is None or not (time.hours_expected and time.model_flops and plan.data.rows):
        return None
    rows = plan.data.rows
    epochs = rows_of_steps(job.spec, plan.data, plan.steps) / rows
    again = 1 + time.recomputed_flops / time.model_flops
    return 3600 * time.hours_expected, epochs, rows, time.model_flops / (epochs * rows), again


def _products(before: JobFacts, after: JobFacts, was: Need, now: Need, differing: Differing) -> Iterator[Product]:
    """Every category of the peak."""
    model = differing.first(("model",), _SIZES)
    dtype = () if before.base_dtype == after.base_dtype else differing.first(("method.base_dtype",), ("model.dtype",))
    full = isinstance(before.spec.method, FullMethod) and isinstance(after.spec.method, FullMethod)
    adapter_dtype = () if full else differing.first(("method.type",))
    if before.adapter_dtype != after.adapter_dtype:  # as set, or as it follows from the type of the model
        adapter_dtype = differing.first(("method.type",), ("method.adapter_dtype",)) or dtype
    trained_dtype = dtype if full else adapter_dtype
    optimizer = _setting("optimizer", was, now, differing)
    gpus = _gpus(was.memory, now.memory, differing)

    def parts(name: str) -> Pair:
        return was.parts.get(name, 0), now.parts.get(name, 0)

    adapters = before.adapter_bytes, after.adapter_bytes
    base = parts("weights")[0] - adapters[0], parts("weights")[1] - adapters[1]
    parameters = before.parameters, after.parameters
    trained = list(_trained(before, after, was.memory, now.memory, differing))
    trained_keys = tuple(key for _, keys in trained for key in keys)
    of_weights = dtype or model or trained_keys or trained_dtype
    yield _product("weights", base, [(parameters, model)], of_weights)
    yield _product("weights", adapters, trained, trained_dtype)
    yield _product("gradients", parts("gradients"), trained, trained_dtype)
    # The master copy that adamw keeps is one of weights with fewer bits than its states.
    of_states = (*optimizer, *(trained_dtype if "adamw" in (was.optimizer, now.optimizer) else ()))
    yield _product("optimizer", parts("optimizer"), trained, of_states)

    tokens = [need.memory.input_tokens + need.memory.target_tokens for need in (was, now)]
    through = [
        ((was.micro_batch, now.micro_batch), _rows_keys(before.spec, after.spec, was, now, differing)),
        ((tokens[0], tokens[1]), _token_keys(before, after, differing)),
    ]
    of_token = (
        *_setting("activation_checkpointing", was, now, differing),
        *differing.first((*_METHOD, "method.dropout")), *adapter_dtype, *model, *dtype,
        *differing.first(("training.dropout", "speed.fused", "task.type", "plan.task")),
    )  # fmt: skip
    yield _product("activations", parts("activations"), through, of_token)
    yield replace(_product("temporaries", parts("temporaries"), through, (*of_token, *optimizer)), exact=False)
    yield _product("context", parts("context"), [], (*gpus, *differing.first(("memory.device", "memory.gpu"))))


def _trained(
    before: JobFacts, after: JobFacts, was: MemoryPlan, now: MemoryPlan, differing: Differing
) -> Iterator[tuple[Pair, Keys]]:
    """What the number of trained parameters is made of: of adapters it is rank x numbers of a rank."""
    trained = was.trained_parameters or before.parameters, now.trained_parameters or after.parameters
    ranks = [job.spec.method.rank if isinstance(job.spec.method, LoraMethod) else 0 for job in (before, after)]
    if not all(ranks):
        yield trained, differing.first(("method.type", "model"), _SIZES)
        return
    yield (ranks[0], ranks[1]), differing.first(("method.rank",))
    others = differing.first(("method.targets", "method.dora", "model"), _SIZES)
    yield (trained[0] / ranks[0], trained[1] / ranks[1]), others


def _product(category: str, amounts: Pair, factors: Sequence[tuple[Pair, Keys]], of_each: Keys) -> Product:
    """These factors, and what is left of the amount: so much of each. `of_each`: the keys behind that."""
    known = [Factor(*values, keys) for values, keys in factors]
    before = amounts[0] / (math.prod(each.before for each in known) or 1)
    after = amounts[1] / (math.prod(each.after for each in known) or 1)
    return Product(category, *amounts, [*known, Factor(before, after, tuple(dict.fromkeys(of_each)))])


def _gpus(was: MemoryPlan | Resolved, now: MemoryPlan | Resolved, differing: Differing) -> Keys:
    """The key of how many GPUs train together, where that differs."""
    return () if was.gpus == now.gpus else differing.first(("resources.gpus",), ("resolved.gpus",))


def _setting(name: str, was: Need, now: Need, differing: Differing) -> Keys:
    """The key of a setting of the plan: as the job sets it, else as it was decided."""
    if getattr(was, name) == getattr(now, name):
        return ()
    return differing.first((f"memory.{name}",), (f"resolved.{name}",))


def _rows_keys(before: JobSpec, after: JobSpec, was: Need, now: Need, differing: Differing) -> Keys:
    """The micro-batch; and the batch size, which is the most that it can be."""
    keys = _setting("micro_batch", was, now, differing)
    capped = was.micro_batch == before.training.batch_size or now.micro_batch == after.training.batch_size
    return keys if not capped else differing.first((*keys, "training.batch_size"))


def _token_keys(before: JobFacts, after: JobFacts, differing: Differing) -> Keys:
    """A limit of tokens where rows reach it; the rows, where they do not in both jobs."""
    limits, free = [], False
    for side in ("input", "target"):
        reached = []
        for job in (before, after):
            key = job.limit_key(side)
            limit = None if key is None else getattr(job.spec.data, key)
            assert job.memory is not None, "it is compared"
            reached.append(limit is not None and getattr(job.memory, f"{side}_tokens") >= limit)
            limits += [f"data.{key}"] if reached[-1] else []
        free |= not all(reached)
    rows = differing.first(_ROWS) or differing.first(("model",)) if free else ()
    found = dict.fromkeys((*differing.first(tuple(dict.fromkeys(limits))), *rows))
    return tuple(found) or differing.first(("data.prepared",), ("memory.input_tokens", "memory.target_tokens"))
