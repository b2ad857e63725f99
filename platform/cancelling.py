"""Tasks that were told to end."""

import asyncio


def being_cancelled() -> bool:
    """Whether the running task was told to end.

    A library may make another error of a cancellation on its way, or lose it in a race: a loop that
    asks this ends all the same.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
