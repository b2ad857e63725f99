"""A real draft model: the base beside a pruned, distilled copy of itself.

    python -m benchmarks.draft_model [--rounds 5]

The copy is made once by `examples.distil` (some minutes) and kept in ~/.cache/polyloom. Its output
head is as large as the base's, so what it can give here has a low ceiling, which is shown too.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.bars import Bar
from benchmarks.drafting import Base, Drafting, Workload, pace, paired
from benchmarks.speculation import first_token_bar, main
from examples.distil import Recipe, distil
from examples.draft_prompts import GENERAL, prompts

COPIES = Path.home() / ".cache/polyloom/draft-models"
LAYERS = 4
DRAFTS = (1, 2, 3, 4, 5)
NUM_PROMPTS = 4


def copy_of(base: Base) -> Path:
    """The distilled copy, made where it is not there yet."""
    folder = COPIES / f"smollm2-135m-{LAYERS}-layers"
    if not folder.exists():
        COPIES.mkdir(parents=True, exist_ok=True)
        distil(base.folder, folder, Recipe(LAYERS))
    return folder


def everyday(base: Base) -> Workload:
    """Questions that the copy was not taught on."""
    asked = [str(messages[-1]["content"]) for messages in prompts(GENERAL, "held_out")]
    return Workload("everyday questions", base.questions(asked[:NUM_PROMPTS]))


@dataclass(frozen=True)
class Ceiling:
    """What drafts of the best fixed length would give with these chances and costs, if choosing
    it were free."""

    drafts: int
    speed: float


def ceiling(
    chances: Sequence[float], decode: float, draft: float, verify: Sequence[float]
) -> Ceiling:
    """chances: that each drafted token and all before it are accepted.  decode: seconds of a step
    without drafts; draft: of one drafted token; verify: of a step with 1, 2, … drafted tokens."""
    best = Ceiling(0, 1.0)
    for count, step in enumerate(verify[: len(chances)], 1):
        speed = (1 + sum(chances[:count])) * decode / (step + count * draft)
        if speed > best.speed:
            best = Ceiling(count, speed)
    return best


def measured_ceiling(drafting: Drafting, workload: Workload) -> tuple[Ceiling, list[float]]:
    """From drafts of fixed lengths, and the chances of their tokens."""
    decode = _seconds_per_step(drafting, workload, 0)
    verify = [_seconds_per_step(drafting, workload, drafts) for drafts in DRAFTS]
    [line] = drafting.engine.speculation_report().lines
    lengths = line.proposals_by_length
    chances = [a / sum(lengths[k:]) for k, a in enumerate(line.accepted_by_position, 1)]
    draft = line.draft_seconds / line.drafted
    alone = [step - count * draft for step, count in zip(verify, DRAFTS, strict=True)]
    return ceiling(chances, decode, draft, alone), chances


def _seconds_per_step(drafting: Drafting, workload: Workload, drafts: int) -> float:
    """Drafting included."""
    before = drafting.engine.status().steps
    seconds = pace(drafting.engine, workload, drafts).seconds
    return seconds / (drafting.engine.status().steps - before - len(workload.prompts))


def bars(base: Base, rounds: int) -> Iterator[Bar]:
    """The pair's speed is reported, whatever it is; that it cannot do harm is a bar."""
    workload = everyday(base)
    with base.drafting(draft_model=copy_of(base)) as drafting:
        limit, chances = measured_ceiling(drafting, workload)
        ratio = paired(drafting.engine, workload, "off", "adaptive", rounds)
        shown = ", ".join(f"{chance:.2f}" for chance in chances)
        figure = f"{ratio}; accepted {shown}; ceiling {limit.speed:.2f} with {limit.drafts} drafts"
        yield Bar(f"draft model on {workload.name}, times no drafts", figure, "reported", True)
        yield first_token_bar(drafting, "draft model", workload, base)


if __name__ == "__main__":
    sys.exit(main(__doc__, bars))
