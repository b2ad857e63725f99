"""How a request wants its next tokens drafted."""

from typing import Literal

DraftPolicy = Literal["off", "latency", "adaptive"] | int
"""off: never.  latency: whatever makes this request fastest.  adaptive: whatever makes the engine
fastest as a whole.  A number: so many tokens each step, where a drafter has them."""

MAX_DRAFT_TOKENS = 31
"""Of one draft: with the token before it they fill two tiles of rows."""
