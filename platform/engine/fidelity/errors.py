"""Errors of the fidelity check.

FidelityError
├── FidelityTimeoutError    the worker did not answer in time; it was killed
├── FidelityWorkerError     the worker died, or could not start; the check may be tried again
└── UncheckableError        this adapter cannot be checked: the reason is PEFT's or the engine's
"""


class FidelityError(Exception):
    """Root of everything the fidelity check raises on purpose."""


class FidelityTimeoutError(FidelityError):
    """No verdict within the time allowed."""


class FidelityWorkerError(FidelityError):
    """The worker process ended without a verdict."""


class UncheckableError(FidelityError):
    """PEFT or the engine refused the adapter; another try would end the same."""
