"""A recorder of graphs without a device."""

import torch

from polyloom.platform.engine.graphs import Step, StepOutput


class Rerun:
    """Repeats the step, which reads nothing but its frames, into the tensors of the first run.

    captures: how many there were.  replaying: one runs.
    """

    def __init__(self) -> None:
        self.captures = 0
        self.replaying = False

    def capture(self, step: Step) -> Step:
        self.captures += 1
        with torch.inference_mode():
            result = step()

        def replay() -> StepOutput:
            self.replaying = True
            with torch.inference_mode():
                again = step()
                result.hidden.copy_(again.hidden)
                result.chosen.copy_(again.chosen)
            self.replaying = False
            return result

        return replay
