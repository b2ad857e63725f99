"""An upload on its way to a draft head."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec

from polyloom.adapters.artifact import ArtifactFiles, ArtifactLimits, Staging
from polyloom.adapters.base_layout import BaseLayout
from polyloom.adapters.draft_heads.checkpoint import DraftHead, read_draft_head
from polyloom.adapters.draft_heads.config import CONFIG_FILE, WEIGHTS_FILE
from polyloom.adapters.draft_heads.validation import validate_draft_head
from polyloom.adapters.errors import InvalidAdapterError
from polyloom.platform.services.blobs import BlobStore
from polyloom.platform.services.draft_heads import (
    BaseOwner,
    DraftHeadRegistry,
    HeadOwner,
    RecordedHead,
)
from polyloom.platform.services.views import DraftHeadContent

HEAD_FILES = ArtifactFiles(CONFIG_FILE, WEIGHTS_FILE, {CONFIG_FILE, WEIGHTS_FILE}.__contains__)


class DraftHeadOnboarding:
    """Receives, validates and records draft heads."""

    def __init__(
        self,
        *,
        registry: DraftHeadRegistry,
        blobs: BlobStore,
        layout: BaseLayout,
        limits: ArtifactLimits,
        max_rank: int,
    ) -> None:
        """layout: of the base that is served.  max_rank: of a delta."""
        self._registry = registry
        self._blobs = blobs
        self._layout = layout
        self._limits = limits
        self._max_rank = max_rank

    async def upload(
        self,
        owner: HeadOwner,
        adapter_digest: str | None,
        receive: Callable[[Staging], Awaitable[None]],
        *,
        author: str,
        promote: bool,
    ) -> RecordedHead:
        """Receive the body, check it whole and record it.

        adapter_digest: of the revision it is for; None for the base's shared head. Raises
        InvalidAdapterError or TooLargeError (nothing is recorded), and what `record` raises.
        """
        shared = {head.digest for head in await self._registry.list(BaseOwner(self._layout.digest))}
        with (
            self._blobs.staging() as parent,
            Staging(parent, self._limits, HEAD_FILES) as staging,
        ):
            await receive(staging)
            head = await asyncio.to_thread(
                validate_draft_head,
                staging.folder,
                self._layout,
                adapter_digest,
                lambda digest: self._stored(digest) if digest in shared else None,
                self._max_rank,
            )
            content = _content(head, staging.folder)
            return await self._registry.record(owner, content, author=author, promote=promote)

    def _stored(self, digest: str) -> DraftHead | None:
        """A shared head of this base from the store; None if its files are not there as they were."""
        try:
            head = read_draft_head(self._blobs.path(digest))
        except InvalidAdapterError:
            return None
        return head if head.digest == digest else None


def _content(head: DraftHead, folder: Path) -> DraftHeadContent:
    config = head.config
    return DraftHeadContent(
        digest=head.digest,
        folder=str(folder),
        bytes=sum(path.stat().st_size for path in folder.iterdir()),
        shared_digest=config.shared_head_digest,
        rank=config.rank,
        drafts=config.max_drafts,
        training=(
            None if config.training is None else msgspec.json.encode(config.training).decode()
        ),
    )
