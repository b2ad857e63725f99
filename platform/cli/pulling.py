"""Pulling a base with a progress bar."""

from pathlib import Path

import rich_click as click
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from polyloom.platform.engine.model.errors import ModelError
from polyloom.platform.engine.model.store import BaseModel, Stage, pull


def pull_with_progress(reference: str, data_dir: Path) -> BaseModel:
    """`store.pull`, its stages shown on a terminal. Ends the command if it cannot be done."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        task = progress.add_task(reference, total=None)

        def show(stage: Stage) -> None:
            progress.update(task, description=f"{reference}: {stage}")

        try:
            return pull(reference, data_dir, show)
        except ModelError as error:
            raise click.ClickException(str(error)) from error
