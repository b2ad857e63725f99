"""All tables of the record: importing this module declares every one."""

import polyloom.platform.db.draft_head_models
import polyloom.platform.db.prefix_models
import polyloom.platform.db.route_models  # noqa: F401
from polyloom.platform.db.models import Record

METADATA = Record.metadata
