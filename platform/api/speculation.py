"""The operator's view of speculation: what drafts brought and cost."""

from typing import Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency

from polyloom.platform.api.guards import requires
from polyloom.platform.engine.errors import EngineUnavailableError
from polyloom.platform.engine.messages import SpeculationLine
from polyloom.platform.engine.pool import EnginePool
from polyloom.platform.errors import EngineUnavailable


class DraftReport(msgspec.Struct, frozen=True, kw_only=True):
    """One kind of request on one engine: `SpeculationLine`, and what follows from it.

    acceptance_rate: accepted of drafted tokens.  acceptance_length: tokens that a step with a draft
    brought.  acceptance_by_position[i]: of the drafts that reach place i, how many were right up to
    and with it.  gain: accepted tokens per second of drafting and verifying.  rejected: tokens.
    """

    engine: int
    line: SpeculationLine
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: tuple[float, ...]
    gain: float | None
    rejected: int


class EngineDrafting(msgspec.Struct, frozen=True, kw_only=True):
    """controller_share: of the time of the steps in which drafts were possible."""

    engine: int
    drafters: tuple[str, ...]
    controller_share: float | None


class SpeculationView(msgspec.Struct, frozen=True, kw_only=True):
    """All engines, and on each all kinds of requests, since their processes started.

    Kinds beyond 1,024 are summed up in lines whose revision and domain are `other`.
    """

    engines: tuple[EngineDrafting, ...]
    data: tuple[DraftReport, ...]
    object: Literal["list"] = "list"


@get("/admin/speculation", guards=[requires("admin")])
async def speculation(engine: NamedDependency[EnginePool]) -> SpeculationView:
    """What each drafter brought and cost, by revision, domain and temperature."""
    try:
        reports = await engine.speculation_reports()
    except EngineUnavailableError as error:
        raise EngineUnavailable(str(error), retry_after=5) from error
    return SpeculationView(
        engines=tuple(
            EngineDrafting(
                engine=index,
                drafters=report.drafters,
                controller_share=_ratio(report.controller_seconds, report.step_seconds),
            )
            for index, report in reports.items()
        ),
        data=tuple(
            draft_report(index, line) for index, report in reports.items() for line in report.lines
        ),
    )


def draft_report(engine: int, line: SpeculationLine) -> DraftReport:
    """A line with its ratios; those without a denominator are None."""
    return DraftReport(
        engine=engine,
        line=line,
        acceptance_rate=_ratio(line.accepted, line.drafted),
        acceptance_length=_ratio(line.accepted + line.steps, line.steps),
        acceptance_by_position=_by_position(line),
        gain=_ratio(line.accepted, line.draft_seconds + line.verify_seconds),
        rejected=line.drafted - line.accepted,
    )


def _by_position(line: SpeculationLine) -> tuple[float, ...]:
    lengths = line.proposals_by_length
    reaching = [sum(lengths[place + 1 :]) for place in range(len(line.accepted_by_position))]
    accepted = zip(line.accepted_by_position, reaching, strict=True)
    return tuple(right / drafts for right, drafts in accepted if drafts)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


SPECULATION_ROUTES = [speculation]
