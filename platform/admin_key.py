"""The operator's key: given by a setting, or made at the first start and kept in a private file."""

import os
import secrets
from contextlib import suppress
from pathlib import Path

FILE_NAME = "admin.key"


def load_or_create(data_dir: Path) -> tuple[str, Path]:
    """The key in `data_dir` and its file, made with mode 0600 if it is not there yet.

    Two servers that start at once agree: one creates the file, the other reads it.
    """
    path = data_dir / FILE_NAME
    draft = data_dir / f"{FILE_NAME}.{os.getpid()}"
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as out:
        out.write("pla_" + secrets.token_urlsafe(32) + "\n")
    with suppress(FileExistsError):
        os.link(draft, path)  # atomic, and never over an existing one
    draft.unlink()
    return path.read_text().strip(), path
