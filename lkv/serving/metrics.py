"""What a server tells Prometheus of itself, read when it is asked."""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from lkv.serving.service import Service


class ServiceCollector:
    """Reads the numbers of one service."""

    def __init__(self, service: Service):
        self._service = service

    def collect(self) -> Iterator[Any]:
        """All metrics."""
        service = self._service
        jobs = [job for job in service.jobs() if job.error is None]
        resident, entries = service.store.resident(), service.store.entries()
        yield GaugeMetricFamily("lkv_requests_open", "Requests answered now or waiting", service.engine.open)
        yield GaugeMetricFamily("lkv_texts_waiting", "Texts that wait or are being compressed", len(jobs))
        yield CounterMetricFamily("lkv_generated_tokens", "Tokens generated", service.engine.tokens)
        yield GaugeMetricFamily("lkv_tokens_per_second", "Tokens generated a second", service.tokens_a_second())
        yield GaugeMetricFamily("lkv_contexts_resident", "Contexts in memory", len(resident))
        yield GaugeMetricFamily("lkv_contexts_stored", "Contexts in the store", len(entries))
        yield GaugeMetricFamily("lkv_context_bytes", "Bytes of k and v of contexts in memory", sum(resident.values()))
        full = sum(entry.full_nbytes for entry in entries if entry.id in resident)
        yield GaugeMetricFamily(
            "lkv_context_bytes_saved", "Bytes that full caches of them would hold beyond that",
            max(0, full - sum(resident.values())),
        )  # fmt: skip


def registry_of(service: Service) -> CollectorRegistry:
    """A registry of one service alone: several may run in one process."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return registry
