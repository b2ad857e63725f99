"""Steps through the frames of captured graphs equal eager ones, whatever the buckets are filled with."""

import pytest
import torch

from polyloom.platform.engine.graphs import DecodeGraphs, Forward
from tests.cuda_emulator.backend import EmulatedDevice


class Rerun:
    """A recorder without a device: it repeats the forward, which reads nothing but its frames."""

    def __init__(self) -> None:
        self.captures = 0

    def capture(self, forward: Forward) -> Forward:
        self.captures += 1
        forward()
        return forward


def graphs_of(engine, recorder: Rerun, **sizes: int) -> DecodeGraphs:
    runner = engine._runner
    return DecodeGraphs(
        runner._decoder,
        runner._attention,
        runner._lora_layers,
        engine._pages,
        runner._lora_layers._op,
        recorder,
        engine._capabilities,
        block_size=16,
        device=torch.device("cpu"),
        **sizes,
    )


@pytest.fixture
def graph_engine(emulated_device: EmulatedDevice, engine_factory):
    return engine_factory(implementation="cuda", itl_target=60.0, max_rank=16)


def test_graphs_change_no_token_and_adapters_come_and_go(
    graph_engine, request_factory, run, adapter_factory
) -> None:
    sources = [None, adapter_factory(4, 1), adapter_factory(12, 2)]

    def answers():
        requests = [
            request_factory((7, 8, 9, 7, 8, 9, n), adapter=source, max_tokens=9, logprobs=0)
            for n in (3, 4)
            for source in sources
        ]
        return run(graph_engine, requests)

    eager, recorder = answers(), Rerun()
    graphs = graphs_of(graph_engine, recorder, max_tokens=8, max_blocks=8)
    graph_engine._runner._graphs = graphs
    for source in sources[1:]:
        graph_engine.retire(source.digest)
    replayed = answers()
    captured = recorder.captures
    again = answers()
    assert recorder.captures == captured <= 4 * len(graphs.sizes)
    for answer, other, third in zip(eager, replayed, again, strict=True):
        assert answer.token_ids == other.token_ids == third.token_ids
        assert [one.logprob for one in other.logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
    used = {one.name: one for one in graph_engine.capabilities()}["graph"]
    assert used.engaged > 0 and used.graph_buckets == (1, 2, 4, 8)


def test_what_fits_no_bucket_runs_eagerly_and_is_counted(
    graph_engine, request_factory, run
) -> None:
    graphs = graphs_of(graph_engine, Rerun(), max_tokens=2, max_blocks=2)
    graph_engine._runner._graphs = graphs
    run(graph_engine, [request_factory(tuple(range(3, 33)), max_tokens=6)])
    run(graph_engine, [request_factory((n, 5), max_tokens=2) for n in range(3, 6)])
    used = {one.name: one for one in graph_engine.capabilities()}["graph"]
    assert used.fallbacks["a chunk of a prompt is in the step"] == 1
    assert used.fallbacks["a context is longer than the buckets are for"] > 0
    assert used.fallbacks["more tokens than the largest bucket"] > 0


def test_capture_covers_every_bucket_once(graph_engine) -> None:
    recorder = Rerun()
    graphs = graphs_of(graph_engine, recorder, max_tokens=3, max_blocks=2)
    graphs.capture_all()
    graphs.capture_all()
    assert (graphs.sizes, recorder.captures) == ((1, 2), 8)
    assert graphs.capture_seconds > 0
