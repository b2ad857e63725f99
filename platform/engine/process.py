"""The engine process: `python -m polyloom.platform.engine.process`, settings on standard input.

It answers on its socket once a probe generation has run. SIGTERM drains it; it leaves when its
parent does. Exit status: 0 after a drain or without a parent, 1 when it broke, 2 when it could not
start (the reason is the last line on standard error).
"""

import gc
import logging
import os
import signal
import sys

import msgspec
import torch

from polyloom.platform.engine.assembly import RevisionLoader, build_engine
from polyloom.platform.engine.errors import EngineError, EngineStartError
from polyloom.platform.engine.host import EngineHost, HostSocket
from polyloom.platform.engine.messages import Finished
from polyloom.platform.engine.model.errors import ModelError
from polyloom.platform.engine.processor_share import let_others_interrupt
from polyloom.platform.engine.settings import EngineSettings
from polyloom.platform.engine.step import Engine
from polyloom.routing.combination import Combination
from polyloom.routing.request import GenerationRequest
from polyloom.routing.sampling_params import SamplingParams

logger = logging.getLogger("polyloom.engine")

BROKEN, CANNOT_START = 1, 2
_PROBE_ID = "probe"


def main() -> int:
    """Run one engine until it is told to stop; the exit status."""
    parent = os.getppid()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    try:
        settings = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineSettings)
        socket = HostSocket()
        let_others_interrupt()  # after the socket, whose thread must not wait for a step to end
        torch.set_num_threads(settings.threads)
        engine = build_engine(settings)
        probe(engine, settings.base_digest)
        host = EngineHost(
            engine, settings.base_digest, socket, settings.address, lambda: os.getppid() != parent
        )
    except (EngineError, ModelError, msgspec.MsgspecError, ValueError, OSError, RuntimeError) as e:
        logger.error("cannot start: %s", e)
        return CANNOT_START
    signal.signal(signal.SIGTERM, lambda *_: host.drain())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who drains us
    gc.collect()
    gc.freeze()  # what lives as long as the process need not be looked at again
    RevisionLoader.warm_up()
    if settings.vocabulary is not None:
        engine.expect(settings.vocabulary)
    logger.info("ready at %s", settings.address)
    try:
        host.run()
    except EngineError:
        logger.exception("the engine broke")
        return BROKEN
    finally:
        socket.close()
        engine.close()
        settings.socket_path.unlink(missing_ok=True)
    return 0


def probe(engine: Engine, base_digest: str) -> None:
    """Generate two tokens, so that an engine that answers is one that works.

    Raises:
        EngineStartError: the generation failed.
    """
    request = GenerationRequest(
        sequence_id=_PROBE_ID,
        tenant="",
        combination=Combination(base_digest=base_digest, template_digest=""),
        adapter=None,
        prompt=(0,),
        sampling=SamplingParams(max_tokens=min(2, engine.max_model_len - 1), seed=0, temperature=0),
    )
    refused = engine.submit(request)
    if refused is not None:
        raise EngineStartError(f"the probe generation was refused: {refused.message}")
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Finished) and event.reason != "length":
                raise EngineStartError(f"the probe generation failed: {event.error}")
    engine.check_idle()


if __name__ == "__main__":
    sys.exit(main())
