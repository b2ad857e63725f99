"""Steps through the frames of captured graphs equal eager ones, whatever the buckets are filled with."""

import pytest
import torch

from polyloom.platform.engine.graphs import DecodeGraphs, DecodeParts, GraphSizes
from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.recorder import Rerun


def graphs_of(engine, recorder: Rerun, *, max_tokens: int, max_model_len: int) -> DecodeGraphs:
    runner = engine._runner
    layers = runner._lora_layers
    parts = DecodeParts(runner._decoder, runner._attention, layers, engine._pages, layers._op)
    sizes = GraphSizes(max_tokens, max_model_len, block_size=16)
    return DecodeGraphs(parts, recorder, engine._capabilities, sizes, torch.device("cpu"))


@pytest.fixture
def graph_engine(emulated_device: EmulatedDevice, engine_factory):
    return engine_factory(implementation="cuda", itl_target=60.0, max_rank=16)


def test_graphs_change_no_token_and_adapters_come_and_go(
    graph_engine, request_factory, run, adapter_factory
) -> None:
    """Greedy and sampled, read on the device and on the host, verified drafts, an adapted head."""
    head = ["q_proj", "lm_head"]
    sources = [None, adapter_factory(4, 1), adapter_factory(12, 2), adapter_factory(3, 3, head)]
    parameters = [
        {"logprobs": 0},
        {"temperature": 0.9, "top_p": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.2},
    ]

    def answers():
        requests = [
            request_factory((7, 8, 9, 7, 8, 9, n), adapter=source, max_tokens=9, **chosen)
            for n, chosen in enumerate(parameters, 3)
            for source in sources
        ]
        return run(graph_engine, requests)

    eager, recorder = answers(), Rerun()
    graphs = graphs_of(graph_engine, recorder, max_tokens=64, max_model_len=128)
    graphs.capture_all()
    graph_engine._runner._graphs = graphs
    for source in sources[1:]:
        graph_engine.retire(source.digest)
    replayed, again = answers(), answers()
    assert recorder.captures == 4 * len(graphs.sizes)
    for answer, other, third in zip(eager, replayed, again, strict=True):
        assert answer.token_ids == other.token_ids == third.token_ids
        assert [one.logprob for one in other.logprobs] == pytest.approx(
            [one.logprob for one in answer.logprobs], abs=1e-4
        )
    used = {one.name: one for one in graph_engine.capabilities()}["graph"]
    assert used.engaged > 0 and not used.fallbacks
    assert used.graph_buckets == graphs.sizes and used.compile_seconds > 0


def test_a_replay_ends_with_token_ids(graph_engine, request_factory, run, monkeypatch) -> None:
    """Neither logits nor a second launch of the sampler outside the graph."""
    recorder = Rerun()
    graph_engine._runner._graphs = graphs_of(graph_engine, recorder, max_tokens=4, max_model_len=64)
    requests = [request_factory((5, n), max_tokens=6, temperature=0.7, seed=n) for n in (1, 2)]
    expected = [answer.token_ids for answer in run(graph_engine, requests)]
    runner, captured = graph_engine._runner, recorder.captures
    monkeypatch.setattr(runner._sampler, "sample", None)
    logits = runner._decoder.logits

    def only_in_a_graph(*args):
        assert recorder.replaying
        return logits(*args)

    monkeypatch.setattr(runner._decoder, "logits", only_in_a_graph)
    requests = [request_factory((5, n), max_tokens=6, temperature=0.7, seed=n) for n in (1, 2)]
    assert [answer.token_ids for answer in run(graph_engine, requests)] == expected
    assert recorder.captures == captured


def test_hidden_states_outlive_the_next_replay(
    graph_engine, request_factory, run, monkeypatch
) -> None:
    """A draft head reads the state of the step before, which lay in the graph's memory."""
    runner, kept = graph_engine._runner, []
    runner._graphs = graphs_of(graph_engine, Rerun(), max_tokens=4, max_model_len=64)
    runner._keeps_hidden = True

    def ran(_plan, results, _seconds):
        kept.extend((result.hidden, result.hidden.clone()) for result in results)

    monkeypatch.setattr(graph_engine._speculator, "ran", ran)
    run(graph_engine, [request_factory((5, n), max_tokens=6) for n in (1, 2)])
    assert len(kept) > 6
    assert all(torch.equal(hidden, then) for hidden, then in kept)


def test_what_fits_no_bucket_runs_eagerly_and_is_counted(
    graph_engine, request_factory, run
) -> None:
    graphs = graphs_of(graph_engine, Rerun(), max_tokens=2, max_model_len=32)
    graph_engine._runner._graphs = graphs
    run(graph_engine, [request_factory(tuple(range(3, 33)), max_tokens=6)])
    run(graph_engine, [request_factory((n, 5), max_tokens=2) for n in range(3, 6)])
    used = {one.name: one for one in graph_engine.capabilities()}["graph"]
    assert used.fallbacks["a chunk of a prompt is in the step"] == 1
    assert used.fallbacks["a context is longer than the buckets are for"] > 0
    assert used.fallbacks["more tokens than the largest bucket"] > 0


def test_capture_covers_every_bucket_once(graph_engine) -> None:
    recorder = Rerun()
    graphs = graphs_of(graph_engine, recorder, max_tokens=3, max_model_len=32)
    graphs.capture_all()
    graphs.capture_all()
    assert (graphs.sizes, recorder.captures) == ((1, 2), 8)
    assert graphs.capture_seconds > 0
