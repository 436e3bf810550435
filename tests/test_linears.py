"""Matrices in each form: what they compute, what they read, and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perfledger.instrumented_runtime.linears import (
    Dense,
    DynamicInt8,
    check_quantization,
    make_matrix,
)
from perfledger.schema.errors import UsageError

CPU = torch.device("cpu")


@settings(max_examples=30, deadline=None)
@given(
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 64),
    rows=st.integers(1, 9),
    biased=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_int8_is_the_dense_product_within_the_error_of_its_two_roundings(
    outputs: int, inputs: int, rows: int, biased: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    weight, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
    bias = torch.randn(outputs) if biased else None
    exact, found = Dense(weight, bias)(x), make_matrix(weight, bias, "int8")(x)
    # Half a step of a weight's rounding, a step of a row's (7 bits over the range).
    weight_error = weight.abs().amax(dim=1) / 127 / 2
    row_error = (x.amax().clamp(min=0) - x.amin().clamp(max=0)) / 127
    bound = x.abs().sum(dim=1)[:, None] * weight_error + row_error * weight.abs().sum(dim=1)
    bound = bound + inputs * weight_error * row_error + 1e-4
    assert ((exact - found).abs() <= bound).all()


def test_a_matrix_tells_the_bytes_that_it_reads() -> None:
    weight, bias = torch.randn(32, 64), torch.randn(32)
    assert Dense(weight).bytes == 32 * 64 * 4
    assert Dense(weight.bfloat16(), bias.bfloat16()).bytes == 32 * 64 * 2 + 32 * 2
    assert DynamicInt8(weight, bias).bytes == 32 * 64 + 32 * 4 + 32 * 4


def test_int8_rows_keep_their_dtype() -> None:
    matrix = make_matrix(torch.randn(8, 16), None, "int8")
    assert matrix(torch.randn(3, 16).bfloat16()).dtype == torch.bfloat16


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert torch.equal(DynamicInt8(torch.zeros(4, 8), None)(torch.randn(2, 8)), torch.zeros(2, 4))


@pytest.mark.parametrize(
    ("asked", "device", "said"),
    [
        ("int4", "cpu", "'int4' is not a quantization"),
        ("fp8", "cpu", "cpu does not multiply fp8"),
        ("int8", "cuda", "int8 runs on a CPU only, not on cuda"),
    ],
)
def test_what_cannot_be_multiplied_is_refused(asked: str, device: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        check_quantization(asked, torch.float32, torch.device(device))
    check_quantization("int8", torch.float32, CPU)
    check_quantization("none", torch.bfloat16, CPU)
