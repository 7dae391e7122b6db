"""Values that do not depend on the number of rows or threads, down to the last bit."""

import pytest
import torch

from zerogap.numerics.elementwise import GRAIN, exp, silu, tanh
from zerogap.numerics.norm import swiglu


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [20, 64, 96, 300, 1536])
@pytest.mark.parametrize("function", [exp, silu, tanh])
def test_a_row_alone_equals_a_row_among_others_on_any_number_of_threads(threads, function, width, dtype):
    rows = 2 * GRAIN // width + 3
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(width)).to(dtype)
    threads(1)
    alone = torch.cat([function(row) for row in x.split(1)])
    for count in (1, 2, 3):
        threads(count)
        for some in (1, 2, 5, rows // 2, rows - 1, rows):
            assert torch.equal(function(x[:some]), alone[:some]), (count, some)


def test_the_right_function(threads):
    x = torch.randn(5, 70)
    assert torch.allclose(exp(x), x.exp())
    assert torch.allclose(silu(x), torch.nn.functional.silu(x))
    assert torch.allclose(tanh(x), x.tanh())


def test_the_activation_of_661_rows_on_two_threads_is_that_of_one(threads):
    """A part that ended inside a row sent 16 of its elements through scalar code: seen on AVX-512."""
    x = torch.randn(661, 192, generator=torch.Generator().manual_seed(1))
    threads(1)
    one = swiglu(x)
    threads(2)
    assert torch.equal(swiglu(x), one)
