"""The template worker: `python -m polyloom.platform.generation.template_worker`.

Reads jobs from standard input and ends when that does. Jinja's sandbox keeps a template from the
machine's objects, not from its time and memory; this process bounds those.
"""

import os
import resource
import signal
import sys
from pathlib import Path

import msgspec
from transformers.utils.chat_template_utils import _compile_jinja_template, render_jinja_template

from polyloom.platform.engine.fidelity.frames import pack, read_frame
from polyloom.platform.generation.template_jobs import (
    MEMORY_BYTES,
    OUTPUT_BYTES,
    RENDER_SECONDS,
    TemplateAnswer,
    TemplateFault,
    TemplateJob,
    fault_of,
)

_SPENT_BYTES = MEMORY_BYTES // 4


def main() -> None:
    """Say that it is ready, then answer jobs until the input ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    ready = _data_bytes()
    resource.setrlimit(resource.RLIMIT_DATA, (ready + MEMORY_BYTES,) * 2)
    answers.write(pack(TemplateAnswer()))
    answers.flush()
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        # The parent kills a worker that is late; the alarm does when there is no parent any more.
        signal.setitimer(signal.ITIMER_REAL, 2 * RENDER_SECONDS)
        answer = _answer(frame)
        signal.setitimer(signal.ITIMER_REAL, 0)
        spent = _data_bytes() - ready > _SPENT_BYTES
        answers.write(pack(msgspec.structs.replace(answer, spent=spent)))
        answers.flush()


def _answer(frame: bytes) -> TemplateAnswer:
    try:
        return TemplateAnswer(_text(frame))
    except TemplateFault as fault:
        return TemplateAnswer(fault=str(fault))


def _text(frame: bytes) -> str:
    try:
        text = _render(msgspec.msgpack.decode(frame, type=TemplateJob))
        size = len(text.encode())
    except Exception as error:  # a template can raise anything that Python can
        raise TemplateFault(fault_of(error)) from error
    if size > OUTPUT_BYTES:
        raise TemplateFault(f"the chat template writes more than {OUTPUT_BYTES >> 20} MiB of text")
    return text


def _render(job: TemplateJob) -> str:
    if job.messages is None:
        _compile_jinja_template(job.template)
        return ""
    # What `apply_chat_template` calls, without the tokenizer that this process does not have.
    texts, _ = render_jinja_template(
        [job.messages],
        tools=job.tools,
        chat_template=job.template,
        add_generation_prompt=True,
        **job.special_tokens,
    )
    return str(texts[0])


def _data_bytes() -> int:
    """What RLIMIT_DATA counts: private writable memory."""
    pages = Path("/proc/self/statm").read_text().split()[5]
    return int(pages) * resource.getpagesize()


if __name__ == "__main__":
    main()
