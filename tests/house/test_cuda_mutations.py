"""The checks of the kernels can fail: each planted fault is caught."""

import pytest

from tests.cuda_emulator.backend import EmulatedDevice
from tests.cuda_emulator.mutations import (
    MUTATIONS,
    Mutation,
    caught,
    run_attention,
    run_eight_bits,
    run_lora,
    run_sampling,
)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_planted_fault_is_caught(mutation: Mutation) -> None:
    assert caught(mutation)


@pytest.mark.parametrize("run", [run_lora, run_attention, run_eight_bits, run_sampling])
def test_without_a_fault_nothing_is(emulated_device: EmulatedDevice, run) -> None:
    run()
