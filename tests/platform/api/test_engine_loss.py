"""The engine is killed mid-stream: an error soon, and the next request works."""

import time

import psutil


def engine_process(pid: int) -> psutil.Process:
    for child in psutil.Process(pid).children():
        if "polyloom.platform.engine.process" in child.cmdline():
            return child
    raise AssertionError("no engine process")


def test_a_killed_engine_is_told_and_restarted(server, tenant, base_name) -> None:
    body = {"model": base_name, "prompt": "x", "max_tokens": 900, "stream": True}
    body |= {"ignore_eos": True}
    with tenant.http() as client, client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        engine_process(server.pid).kill()
        killed = time.monotonic()
        rest = "".join(lines)
    assert time.monotonic() - killed < 2.0
    assert '"code":"engine_unavailable"' in rest
    answer = tenant.http().post("/v1/completions", json=body | {"stream": False, "max_tokens": 1})
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert answer.headers["retry-after"]
    give_up = time.monotonic() + 120
    while tenant.http().get("/health").status_code != 200:
        assert time.monotonic() < give_up
        time.sleep(0.2)
    answer = tenant.http().post("/v1/completions", json=body | {"stream": False, "max_tokens": 2})
    assert answer.status_code == 200
