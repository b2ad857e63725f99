"""Aliases: every move is kept, and rollback chooses an older one."""

import asyncio
import itertools
from typing import TYPE_CHECKING

import pytest

from polyloom.platform.errors import Conflict, InvalidRequest, NotFound
from polyloom.platform.services.views import TenantView

if TYPE_CHECKING:
    from conftest import Process


async def three_promoted(process: "Process") -> TenantView:
    acme = await process.tenant()
    for text in ("a", "b", "c"):
        await process.ready(acme, text, promote="prod")
    return acme


async def test_rollback_goes_back_step_by_step(process: "Process") -> None:
    acme = await three_promoted(process)
    targets = []
    for _ in range(2):
        alias = await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
        targets.append(alias.number)
    assert targets == [2, 1]
    with pytest.raises(Conflict, match="no older revision"):
        await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
    history = await process.aliases.history(acme.id, "support", "prod")
    assert [(c.version, c.number, c.restores) for c in history] == [
        (5, 1, 1),
        (4, 2, 2),
        (3, 3, None),
        (2, 2, None),
        (1, 1, None),
    ]


async def test_rollback_after_a_new_move_returns_to_what_was_in_force(process: "Process") -> None:
    acme = await three_promoted(process)
    await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
    await process.aliases.move(acme.id, "support", "prod", 3, author="key:1", reason="again")
    alias = await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
    assert alias.number == 2


async def test_rollback_passes_over_what_was_retired(process: "Process") -> None:
    acme = await three_promoted(process)
    await process.registry.retire(acme.id, "support", 2, author="key:1")
    alias = await process.aliases.rollback(acme.id, "support", "prod", author="key:1")
    assert alias.number == 1


async def test_moving_where_it_points_already_is_no_change(process: "Process") -> None:
    acme = await three_promoted(process)
    alias = await process.aliases.move(acme.id, "support", "prod", 3, author="key:2")
    assert (alias.version, alias.author) == (3, "key:1")
    assert len(await process.aliases.history(acme.id, "support", "prod")) == 3


async def test_what_does_not_exist_is_not_found(process: "Process") -> None:
    acme = await three_promoted(process)
    for call in (
        process.aliases.move(acme.id, "support", "prod", 4, author="key:1"),
        process.aliases.move(acme.id, "other", "prod", 1, author="key:1"),
        process.aliases.rollback(acme.id, "support", "canary", author="key:1"),
        process.aliases.history(acme.id, "other", "prod"),
    ):
        with pytest.raises(NotFound):
            await call


async def test_a_storm_of_moves_keeps_a_true_history(process: "Process") -> None:
    acme = await three_promoted(process)
    numbers = [1, 2, 3] * 8
    moved = await asyncio.gather(
        *(
            process.aliases.move(acme.id, "support", "prod", number, author=f"key:{i}")
            for i, number in enumerate(numbers)
        )
    )
    history = await process.aliases.history(acme.id, "support", "prod")
    versions = [change.version for change in history]
    assert versions == list(range(len(history), 0, -1))
    told = {(view.version, view.number) for view in moved}
    assert told <= {(change.version, change.number) for change in history}
    pairs = list(itertools.pairwise(history))
    assert all(newer.number != older.number for newer, older in pairs)
    alias = await process.aliases.get(acme.id, "support", "prod")
    assert (alias.version, alias.number) == (history[0].version, history[0].number)
    snapshot = process.snapshots.current
    (entry,) = snapshot.adapters.values()
    assert entry.aliases == {"prod": alias.number}


@pytest.mark.parametrize("number", [0, -1, 2**31, 2**63, 10**30])
async def test_a_number_that_no_column_can_hold_is_no_revision(
    process: "Process", number: int
) -> None:
    acme = await process.tenant()
    await process.ready(acme, "a")
    with pytest.raises(NotFound):
        await process.aliases.move(acme.id, "support", "prod", number, author="key:1")
    with pytest.raises(NotFound):
        await process.registry.revision(acme.id, "support", number)
    with pytest.raises(NotFound):
        await process.registry.retire(acme.id, "support", number, author="key:1")


@pytest.mark.parametrize("reason", ["a\0b", "x" * 1_001])
async def test_a_reason_is_short_text(process: "Process", reason: str) -> None:
    acme = await three_promoted(process)
    with pytest.raises(InvalidRequest) as moved:
        await process.aliases.move(acme.id, "support", "prod", 1, author="key:1", reason=reason)
    with pytest.raises(InvalidRequest) as rolled_back:
        await process.aliases.rollback(acme.id, "support", "prod", author="key:1", reason=reason)
    assert moved.value.param == rolled_back.value.param == "reason"
