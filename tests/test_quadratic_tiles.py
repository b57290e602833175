"""Causal quadratic attention leaves out squares above the diagonal: the function must stay the same."""

import pytest

from kernels_xla import quadratic
from tests import numerics
from tests.backends import differentiate


@pytest.mark.parametrize("layout", ["whole", "padded", "packed"])
@pytest.mark.parametrize("n", [32, 40, 37], ids=["three_halvings", "one_odd_half", "odd"])
@pytest.mark.parametrize("case", [{}, {"divisor": "length"}, {"scale": "paper_appendix", "divisor": 32}], ids=str)
def test_halving_a_causal_row_changes_neither_value_nor_gradients(monkeypatch, layout, n, case):
    monkeypatch.setattr(quadratic, "TILE", 4)
    spec, case = quadratic.SPEC, {"causal": True, **case}
    arrays, masked = numerics.inputs(spec, n=n), numerics.masks(layout, n=n)
    got = differentiate(spec.fast, case, arrays, masked)
    found = numerics.errors(got, differentiate(spec.reference, case, arrays, masked, "float64"))
    assert max(found.values()) < numerics.FLOAT32, found


def test_halving_leaves_out_nearly_half_of_the_pairs(monkeypatch):
    pairs = []
    attend = quadratic.attend
    monkeypatch.setattr(quadratic, "TILE", 4)
    monkeypatch.setattr(
        quadratic,
        "attend",
        lambda q, k, *rest: pairs.append(q.shape[0] * q.shape[1] * k.shape[1]) or attend(q, k, *rest),
    )
    arrays = numerics.inputs(quadratic.SPEC, b=1, n=32)
    differentiate(quadratic.SPEC.fast, {"causal": True}, arrays)
    assert sum(pairs) == 32 * 32 // 2 + 32 * 4 // 2
