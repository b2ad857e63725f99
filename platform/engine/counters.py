"""What an engine has done since it started."""

from dataclasses import dataclass

from polyloom.routing.scheduler.batch import StepPlan


@dataclass
class EngineCounters:
    """step_seconds: spent in steps that ran tokens.  prompt_tokens: run as prefill, recomputed
    ones included.  generated_tokens: sampled."""

    steps: int = 0
    step_seconds: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0

    def ran(self, plan: StepPlan, seconds: float) -> int:
        """Count one step; how many of its tokens were of prompts."""
        self.steps += 1
        self.step_seconds += seconds
        prompt_tokens = 0
        for item in plan.scheduled:
            end = min(item.start + item.num_tokens, item.sequence.prompt_len)
            prompt_tokens += max(0, end - item.start)
        self.prompt_tokens += prompt_tokens
        return prompt_tokens
