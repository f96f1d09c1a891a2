"""What Prometheus reads of the service."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.service.running import Service

Figures = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scraped(text: str) -> Figures:
    """Every sample, by name and labels; read with Prometheus' own parser."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def figure(figures: Figures, name: str, /, **labels: str) -> float | None:
    return figures.get((f"longhaul_{name}", frozenset(labels.items())))


def scrape(service: Service) -> Figures:
    answer = service.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["Content-Type"].startswith("text/plain; version=")
    return scraped(answer.text)
