"""What /metrics shows. Where vLLM measures the same, the name and the buckets are vLLM's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache

import psutil
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from localllm.engine.meter import SECOND_BOUNDS, TOKEN_BOUNDS, Tally
from localllm.server.generation import TokenUsage
from localllm.server.service import VERSION, Service

_ON_PROCESSORS = ("cpu", "reference")
_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0),
    *(240.0, 480.0, 960.0, 1920.0, 7680.0),
)
_COUNTS = tuple(
    float(digit * 10**power) for power in range(7) for digit in (1, 2, 5) if digit * 10**power < 2e6
)


class Metrics:
    """One per application, with a registry of its own. Nothing is labelled with a user or key."""

    def __init__(self, service: Service, max_running: int) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(service, max_running))
        self._service = service

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: Sequence[float]) -> Histogram:
            labels = ("model_name", "class")
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets)

        self._arrivals = counter(
            "localllm:request_arrivals", "Requests for an answer, refused or not", "class", "api"
        )
        self._rejected = counter(
            "localllm:rejected", "Requests answered with an error", "reason", "code"
        )
        self._timeouts = counter("localllm:timeouts", "Requests given up, and where", "stage")
        self._cancellations = counter(
            "localllm:cancellations", "Sequences given up by their client", "phase"
        )
        self._structured = counter(
            "localllm:structured_outputs", "Answers under a grammar: true ones are whole", "valid"
        )
        self._tool_calls = counter("localllm:tool_calls", "Calls in answers", "parsed")
        self._truncations = counter(
            "localllm:context_truncations", "Requests whose prompt was cut, as they asked"
        )
        self._success = counter(
            "vllm:request_success",
            "Sequences that ended, by how",
            *("model_name", "class", "finished_reason"),
        )
        self._prompt_total = counter("vllm:prompt_tokens", "Prompt tokens", "model_name", "class")
        self._generation_total = counter(
            "vllm:generation_tokens", "Tokens written", "model_name", "class"
        )
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", _COUNTS)
        self._generation = histogram(
            "vllm:request_generation_tokens", "Tokens of an answer", _COUNTS
        )
        self._first = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token", _FIRST_TOKEN
        )
        self._between = histogram(
            "vllm:inter_token_latency_seconds", "From one token to the next", _TOKEN
        )
        self._per_token = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of an answer",
            _TOKEN,
        )
        self._whole = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token", _REQUEST
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the first step", _REQUEST
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the first step to the first token", _REQUEST
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From the first token to the last", _REQUEST
        )
        self.of_class = cache(self._of_class)

    def _of_class(self, traffic_class: str) -> ClassMetrics:
        return ClassMetrics(self, self._service.model_name, traffic_class)

    def arrival(self, traffic_class: str, api: str) -> None:
        self._arrivals.labels(traffic_class, api).inc()

    def rejection(self, reason: str, status: int) -> None:
        self._rejected.labels(reason, str(status)).inc()

    def timeout(self, stage: str) -> None:
        self._timeouts.labels(stage).inc()

    def cancellation(self, phase: str) -> None:
        self._cancellations.labels(phase).inc()

    def structured_output(self, valid: bool) -> None:
        self._structured.labels(str(valid).lower()).inc()

    def answer(self, usage: TokenUsage) -> None:
        """What a request's answers held, once it has ended."""
        self._tool_calls.labels("true").inc(usage.calls - usage.calls_cut)
        self._tool_calls.labels("false").inc(usage.calls_cut)
        self._truncations.inc(usage.truncated_tokens > 0)

    def text(self) -> bytes:
        """Prometheus's text format."""
        return generate_latest(self.registry)


class ClassMetrics:
    """The instruments of one traffic class, looked up once; each call is an observation."""

    def __init__(self, all: Metrics, model_name: str, traffic_class: str) -> None:
        labels = (model_name, traffic_class)
        self.queue_time = all._queue.labels(*labels).observe
        self.prefill_time = all._prefill.labels(*labels).observe
        self.decode_time = all._decode.labels(*labels).observe
        self.time_to_first_token = all._first.labels(*labels).observe
        self.inter_token_latency = all._between.labels(*labels).observe
        self.time_per_output_token = all._per_token.labels(*labels).observe
        self.e2e_latency = all._whole.labels(*labels).observe
        self.prompt_tokens = all._prompt.labels(*labels).observe
        self.generation_tokens = all._generation.labels(*labels).observe
        self.count_prompt_tokens = all._prompt_total.labels(*labels).inc
        self.count_generation_tokens = all._generation_total.labels(*labels).inc
        self._success = all._success
        self._labels = labels

    def finished(self, reason: str) -> None:
        self._success.labels(*self._labels, reason).inc()


class _EngineCollector(Collector):
    """What the engine tells of itself, as of its last step. Its counts start anew with it."""

    def __init__(self, service: Service, max_running: int) -> None:
        self._service = service
        self._max_running = max_running
        psutil.cpu_percent()  # the first look has nothing to compare with

    def collect(self) -> Iterator[Metric]:
        yield from self._model()
        yield from self._device()
        stats = self._service.engine.stats
        model = self._service.model_name

        def gauge(name: str, text: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, text, labels=["model_name"])
            family.add_metric([model], value)
            return family

        def counter(name: str, text: str, value: float) -> Metric:
            family = CounterMetricFamily(name, text, labels=["model_name"])
            family.add_metric([model], value)
            return family

        yield gauge("vllm:num_requests_running", "Sequences being computed", stats.running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait", stats.waiting)
        yield gauge(
            "localllm:batch_occupancy",
            "Share of the most sequences at a time, 0 to 1",
            stats.running / self._max_running,
        )
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks held, 0 to 1", stats.kv_usage)
        yield counter(
            "vllm:prefix_cache_queries", "Tokens looked up in the cache", stats.prefix_queries
        )
        yield counter("vllm:prefix_cache_hits", "Tokens found in the cache", stats.prefix_hits)
        yield counter("vllm:num_preemptions", "Sequences that had to wait anew", stats.preemptions)
        yield counter(
            "localllm:kv_alloc_failures",
            "Times that a running sequence found no block",
            stats.alloc_failures,
        )
        yield counter(
            "localllm:kv_evictions", "Cached blocks taken for something else", stats.evictions
        )
        tokens = HistogramMetricFamily(
            "vllm:iteration_tokens_total", "Tokens computed in a step", labels=["model_name"]
        )
        tokens.add_metric([model], *_buckets(TOKEN_BOUNDS, stats.step_tokens))
        yield tokens
        seconds = HistogramMetricFamily("localllm:step_seconds", "Time of a step", labels=["phase"])
        for phase, tally in stats.step_seconds:
            seconds.add_metric([phase], *_buckets(SECOND_BOUNDS, tally))
        yield seconds

    def _model(self) -> Iterator[Metric]:
        engine, model = self._service.engine, self._service.model_name
        loaded = GaugeMetricFamily(
            "localllm:model_loaded", "1 while it can answer", labels=["model_name"]
        )
        loaded.add_metric([model], float(engine.healthy and self._service.loaded))
        yield loaded
        yield CounterMetricFamily(
            "localllm:engine_restarts", "Engines started after the first", engine.restarts
        )
        build = {"version": VERSION, "backend": "", "quant": "", "config_hash": ""}
        if engine.ready is not None:
            seconds = GaugeMetricFamily(
                "localllm:model_load_seconds", "Until ready", labels=["model_name"]
            )
            seconds.add_metric([model], engine.ready.load_seconds)
            yield seconds
            build |= {"backend": engine.ready.backend, **self._service.build_labels}
        yield InfoMetricFamily("localllm:build", "What runs", value=build)

    def _device(self) -> Iterator[Metric]:
        """Of processors only: what other devices tell is for their backends to add."""
        ready = self._service.engine.ready
        if ready is None or ready.backend not in _ON_PROCESSORS:
            return
        busy = GaugeMetricFamily(
            "localllm:device_utilization",
            "Share of the cores' time that anybody used since the last look, 0 to 1",
            labels=["device"],
        )
        busy.add_metric([ready.device], psutil.cpu_percent() / 100)
        yield busy
        memory = GaugeMetricFamily(
            "localllm:device_memory_bytes", "The machine's memory", labels=["device", "kind"]
        )
        report = psutil.virtual_memory()
        memory.add_metric([ready.device, "total"], report.total)
        memory.add_metric([ready.device, "available"], report.available)
        yield memory


def _buckets(bounds: Iterable[float], tally: Tally) -> tuple[list[tuple[str, float]], float]:
    """Prometheus's cumulative buckets and the sum."""
    counts = tally.counts or (0,) * (len(tuple(bounds)) + 1)
    names = [*(str(float(bound)) for bound in bounds), "+Inf"]
    so_far, buckets = 0, []
    for name, count in zip(names, counts, strict=True):
        so_far += count
        buckets.append((name, float(so_far)))
    return buckets, tally.total
