"""All sinks. That of `integrations.NAME` is made by the function `make` of `worker/sinks/NAME.py`, or of a larger one's
`NAME/sink.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

from jobs.integrations import INTEGRATIONS
from worker.sinks.base import Sink, SinkSettings
from worker.sinks.curve import CurveSink
from worker.sinks.log import LogSink


def sinks_of(settings: SinkSettings) -> list[Sink]:
    """All sinks; those without a configuration accept no job. ValueError names the variable that is wrong."""
    return [LogSink(), CurveSink(), *(_maker(name)(settings) for name in INTEGRATIONS)]


def _maker(name: str) -> Callable[[SinkSettings], Sink]:
    module = import_module(f"worker.sinks.{name}")
    if hasattr(module, "__path__"):
        module = import_module(f"worker.sinks.{name}.sink")
    make: Callable[[SinkSettings], Sink] = module.make
    return make
